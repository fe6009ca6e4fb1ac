"""The cost of a first use: CPU seconds of the scripts of pages, each page in a new process without a cache."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from helpers import printed_outputs
from helpers.processes import output

pytestmark = pytest.mark.benchmark

ROOT = Path(__file__).parents[2]

DRIVER = """
import json, sys, time
names, seconds = {"__name__": "__main__"}, []
for code in json.loads(sys.argv[1]):
    started = time.process_time()
    exec(compile(code, "page", "exec"), names)
    seconds.append(time.process_time() - started)
print(json.dumps(seconds))
"""

EIGHT_SCHOOLS = (Path(__file__).parent / "peers" / "eight_schools.py").read_text("utf-8")

PAGES = {
    "README.md": ["README: 64 networks of 16 layers, 512 paths, fit and verdict"],
    "docs/guides/simulate.md": ["256 paths of 3 tokens", "its gradient in γ", "200 steps of optax, four parameters"],
    "docs/guides/initialisation.md": ["the strongest γ under two bounds, n = 256, 64 layers"],
    "docs/guides/hand_over.md": ["", "", "tune a Transformer of Equinox, draw and audit its weights"],
}
"""The first scripts of each page: what the row of the table says, none for those that only prepare others."""

OF_TORCH = {
    "docs/guides/pytorch.md": [
        "audit a GPT-2 of n = 256, 8 layers",
        "observe 16 of them",
        "strengths of its branches, and the verdict",
        "tune it, draw and audit its weights",
    ]
}


def cpu_seconds(scripts: Sequence[str]) -> list[float]:
    """CPU seconds of scripts that run one after the other in a process of a user, after one that keeps byte code."""
    command = [sys.executable, "-W", "ignore", "-c", DRIVER, json.dumps(scripts)]
    printed = [output(*command) for _ in range(2)]
    return json.loads(printed[-1].splitlines()[-1])


def test_costs(record):
    rows = {"`import jax`": cpu_seconds(["import jax"])[0]}
    rows["NumPyro's eight schools, with a summary"] = cpu_seconds([EIGHT_SCHOOLS])[0]
    write(rows | seconds_of(PAGES), rows["`import jax`"], record)


@pytest.mark.torch
def test_costs_of_torch(record):
    write(seconds_of(OF_TORCH), cpu_seconds(["import jax"])[0], record)


def seconds_of(pages: dict[str, list[str]]) -> dict[str, float]:
    rows = {}
    for page, names in pages.items():
        scripts = printed_outputs.scripts((ROOT / page).read_text("utf-8"))[: len(names)]
        seconds = cpu_seconds([script.code for script in scripts])
        rows |= {name: value for name, value in zip(names, seconds, strict=True) if name}
    return rows


def write(rows: dict[str, float], jax: float, record) -> None:
    cells = {name: [f"{value:.2g}", f"{value / jax:.2g}"] for name, value in rows.items()}
    print(f"\n{cells}")
    record("costs", cells)
