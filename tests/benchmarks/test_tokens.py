"""A fit over its number of tokens m, p = m(m + 1)/2 terms a transition: time, memory, and what they grow with.

Each fit runs twice in a process of its own. Of m, either the number of transitions is the same, or that of terms.
Exponents are those of m from `MANY` tokens on; with fewer, other costs are larger. Seconds are of processors: those of
the clock depend on what else the machine does. `SDEINFER_FIGURE=FILE` also draws a figure.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest

pytestmark = pytest.mark.benchmark

SCRIPT = Path(__file__).parent / "peers" / "tokens.py"
TOKENS, MANY = (4, 8, 16, 32, 64), 16
DEPTH, TRANSITIONS, TERMS = 32, 512, 2**17


def fitted(tokens: int, transitions: int) -> dict[str, Any]:
    """What a fit of about so many transitions reports, in a process of its own without a cache of programs."""
    sizes = {"tokens": tokens, "depth": DEPTH, "networks": max(2, round(transitions / DEPTH))}
    command = [sys.executable, "-W", "ignore", str(SCRIPT), *(f"--{name}={value}" for name, value in sizes.items())]
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PYTHONDONT"))}
    environment = kept | {"SDEINFER_NO_CACHE": "1"}
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return json.loads(run.stdout)


def exponent(tokens: list[int], values: list[float]) -> float:
    """Of m, by least squares over `MANY` tokens and more."""
    many = np.array(tokens) >= MANY
    return float(np.polyfit(np.log(np.array(tokens)[many]), np.log(np.array(values)[many]), 1)[0])


def columns(found: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The costs of fits: in total, compiled in this process or before, and in MiB."""
    return {
        "first fit, CPU s": [fit["run 0"]["cpu"] for fit in found],
        "next fit, CPU s": [fit["run 1"]["cpu"] for fit in found],
        "compilation, s": [fit["run 0"]["phases"]["compilation"] for fit in found],
        "peak MiB": [fit["peak"] for fit in found],
    }


def draw(tables: dict[str, dict[str, list[float]]], file: str) -> None:
    """Time and memory over m on logarithmic axes, with their exponents."""
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.2), layout="constrained")
    shown = ("next fit, CPU s", "peak MiB")
    for axis, column in zip(axes, shown, strict=True):
        for (name, table), marker in zip(tables.items(), "os", strict=True):
            values = table[column]
            label = f"{name}: $m^{{{exponent(list(TOKENS), values):.1f}}}$"
            axis.loglog(TOKENS, values, marker=marker, label=label)
        axis.set(xlabel="tokens m", ylabel=column)
        axis.set_xticks(TOKENS, [str(m) for m in TOKENS])
        axis.minorticks_off()
        axis.legend()
    figure.savefig(file, dpi=150)
    plt.close(figure)


def test_fits_over_the_number_of_tokens():
    tables = {}
    for name in (f"{TRANSITIONS} transitions", f"{TERMS} terms"):
        found = []
        for tokens in TOKENS:
            transitions = TRANSITIONS if "transitions" in name else TERMS // (tokens * (tokens + 1) // 2)
            found.append(fitted(tokens, transitions))
            print(f"\n{name}, m = {tokens}, {found[-1]['networks']} networks: {summary(found[-1])}", flush=True)
        tables[name] = columns(found)
        print(f"\n| {name}, depth {DEPTH} | " + " | ".join(f"m = {m}" for m in TOKENS) + " | exponent |")
        print("|---|" + "---|" * (len(TOKENS) + 1))
        for cost, values in tables[name].items():
            cells = " | ".join(f"{value:.3g}" for value in values)
            print(f"| {cost} | {cells} | {exponent(list(TOKENS), values):.1f} |")
    if file := os.environ.get("SDEINFER_FIGURE"):
        draw(tables, file)


def summary(found: dict[str, Any]) -> str:
    """Phases of the second fit, in seconds and MiB, and its posterior."""
    phases, memory = found["run 1"]["phases"], found["run 1"]["memory"]
    of_phases = ", ".join(f"{name} {s:.2g} s {memory.get(name, 0):.0f} MiB" for name, s in phases.items())
    z = ", ".join(f"{name} {found[name]['z']:.2f}" for name in ("gamma", "tau0", "c_gap"))
    return f"{of_phases}; z of the truth: {z}; R-hat {found['rhat']:.3f}"
