"""What users wait for beside the work: imports, tracing, compilation; one table of ratios, measured in one run.

Everything runs in processes of their own. `-s` shows the table. The cache of compiled programs is a new folder.
"""

import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from peer_runs import dynestyx_environment, measured, problem

pytestmark = pytest.mark.benchmark

PEER_SCRIPTS = Path(__file__).parent / "peers"
README, README_FILE = PEER_SCRIPTS / "readme.py", Path(__file__).parents[2] / "README.md"
SDEINFER = Path(sys.executable).with_name("sdeinfer")

MOST = {
    "`sdeinfer --help`, over `import jax`": 0.3,
    "`import sdeinfer`, over `import jax`": 1.5,
    "README's script, no cache: cold less warm, over warm": 6.0,
    "the same in a second process, with the cache": 2.5,
    "the same for data of another shape in one process": 0.3,
    "compiled programs of that script": 60,
}
"""Bounds. The third and the fourth rise where the warm script, by which they are divided, gets faster."""

EIGHT_SCHOOLS, PAIRS = 1.6, 5
"""Bound on the seconds of README's example over those of NumPyro's eight schools, and how often both are run."""

PEERS = {"textbook": 12, "dynestyx_model": 40}
"""Cold effective samples a second over the peer's: at least."""

PATIENCE = 3600
"""Seconds that a peer may take."""


def environment(**variables: str) -> dict[str, str]:
    """The environment of a user: byte code is kept, and no cache of compiled programs is there unless asked for."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "PYTHONDONTWRITE"))}
    return kept | {"SDEINFER_NO_CACHE": "1"} | variables


def once(command: list[str]) -> float:
    """Seconds of one run."""
    started = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, env=environment())
    return time.perf_counter() - started


def seconds(command: list[str], repeats: int = 5) -> float:
    """The shortest of a few runs, after one that writes byte code."""
    once(command)
    return min(once(command) for _ in range(repeats))


def readme(*flags: str, **variables: str) -> dict[str, float]:
    """What README's script reports of a process."""
    command = [sys.executable, "-W", "ignore", str(README), *flags]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment(**variables))
    return json.loads(run.stdout)


def test_table(tmp_path, bounded, record):
    jax = seconds([sys.executable, "-c", "import jax"])
    alone = readme()
    cached = {"SDEINFER_NO_CACHE": "0", "XDG_CACHE_HOME": str(tmp_path)}
    readme("--cache", **cached)
    second = readme("--cache", **cached)
    found = [
        seconds([str(SDEINFER), "--help"]) / jax,
        seconds([sys.executable, "-c", "import sdeinfer"]) / jax,
        (alone["cold"] - alone["warm"]) / alone["warm"],
        (second["cold"] - second["warm"]) / second["warm"],
        (alone["other_first"] - alone["other_again"]) / alone["other_again"],
        alone["programs"],
    ]
    print(f"\nimport jax {jax:.2f} s; README's script: {rounded(alone)}; with the cache: {rounded(second)}")
    rows = {"`import jax`, seconds": jax, "README's script, seconds": alone["cold"], "a later run": alone["warm"]}
    for (name, most), value in zip(MOST.items(), found, strict=True):
        print(bounded(name, value, most=most))
        rows[name] = value
    record("latency", {name: [f"{value:.2g}"] for name, value in rows.items()})


def test_first_run_over_eight_schools(tmp_path, bounded, record):
    """README's example, from the first import to the verdict, without a cache; and the eight schools with a summary."""
    example = tmp_path / "readme.py"
    example.write_text(re.findall(r"```python\n(.*?)```", README_FILE.read_text("utf-8"), re.DOTALL)[0], "utf-8")
    commands = [
        [sys.executable, "-W", "ignore", str(script)] for script in (example, PEER_SCRIPTS / "eight_schools.py")
    ]
    _, *pairs = [[once(command) for command in commands] for _ in range(1 + PAIRS)]  # the first writes byte code
    ours, theirs = (statistics.median(each) for each in zip(*pairs, strict=True))
    ratio = statistics.median(mine / other for mine, other in pairs)
    rows = {"README's script with its imports, seconds": ours, "that over NumPyro's eight schools": ratio}
    record("latency", {name: [f"{value:.3g}"] for name, value in rows.items()})
    print(
        f"\nREADME's example {ours:.1f} s, eight schools {theirs:.1f} s;", bounded("ratio", ratio, most=EIGHT_SCHOOLS)
    )


@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("draws", [200, 1000])
def test_effective_samples_a_second(peer, draws, tmp_path, bounded, record):
    """Of 32 networks of 64 layers and two tokens, in a new process, compilation included."""
    python = dynestyx_environment(tmp_path) if peer == "dynestyx_model" else sys.executable
    source = problem(2, 1, tmp_path, networks=32, depth=64)
    ours = measured(sys.executable, "ours", source, draws=draws)
    theirs = measured(python, peer, source, draws=draws, most_seconds=PATIENCE)
    assert isinstance(ours, dict), ours
    assert isinstance(theirs, dict), theirs
    cold, warm = (ours["ess"] / ours[kind] / (theirs["ess"] / theirs[kind]) for kind in ("seconds", "warm"))
    if peer == "textbook":
        row = f"a textbook program's first fit of 4 × ({draws} + {draws}), over ours"
        record("latency", {row: [f"{theirs['seconds'] / ours['seconds']:.2g}"]})
    print(f"\n4 × ({draws} + {draws}): ours {ours['ess']:.0f} in {float(ours['seconds']):.1f} s, {peer}", end=" ")
    print(f"{theirs['ess']:.0f} in {float(theirs['seconds']):.1f} s;", bounded("cold ratio", cold, least=PEERS[peer]))
    print(f"warm ratio {warm:.3g}")


def rounded(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in found.items())
