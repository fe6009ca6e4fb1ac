"""Fits by this package and by its peers, each in a process of its own: what the benchmarks of whole fits share."""

import functools
import shutil
import subprocess
import sys
from pathlib import Path

import jax.random as jr
import numpy as np
import pytest
from arviz_stats.base import array_stats

import sdeinfer as si

PEERS = Path(__file__).parent / "benchmarks" / "peers"
PARAMETERS = ("gamma", "tau0", "c_gap")
CHAINS, DRAWS = 4, 200
SECONDS = 300
"""How long a process may take."""


def dynestyx_environment(folder: Path) -> str:
    """The interpreter of a new environment with dynestyx, which wants other versions than ours."""
    if shutil.which("uv") is None:
        pytest.skip("dynestyx needs an environment of its own, and uv is not on the path")
    where = folder / "venv"
    python = str(where / "bin" / "python")
    made = [["uv", "venv", "--python", sys.executable, str(where)]]
    made += [["uv", "pip", "install", "--python", python, "dynestyx"]]
    made += [[python, "-W", "ignore", "-c", "import dynestyx; print(f'dynestyx {dynestyx.__version__}')"]]
    for command in made:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.skip(f"no environment with dynestyx: {' '.join(result.stderr.split())[-300:]}")
    print(f"\n{result.stdout.strip()}")
    return python


@functools.cache
def problem(tokens: int, every: int, folder: Path, *, networks: int = 8, depth: int = 16) -> Path:
    """A file of networks, of which every so many layers were observed."""
    truth = si.ShapedTransformer(gamma=0.5, tau0=1.0, c_plus=2.0, c_minus=-2.0)
    V0 = si.equicorrelated(tokens=tokens, correlation=0.2, norm=1.0)
    data = si.sample_networks(truth, V0, width=128, depth=depth, networks=networks, key=jr.key(0))
    data = data.isel(layer=slice(None, None, every))
    source = folder / f"{tokens}-{every}-{networks}-{depth}.npz"
    np.savez(source, V=data["covariance"].values, layers=data["layer"].values, width=128)
    return source


@functools.cache
def measured(python: str, script: str, source: Path, *, draws: int = DRAWS, most_seconds: int = SECONDS) -> dict | str:
    """What a script drew and how long it took; or how it failed."""
    out = source.with_name(f"{script}-{draws}-{source.name}")
    command = [python, "-W", "ignore", str(PEERS / f"{script}.py"), str(source), str(out)]
    command += [str(count) for count in (CHAINS, draws, draws)]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=most_seconds)
    except subprocess.TimeoutExpired:
        return f"{script:14} did not finish {CHAINS} × ({draws} + {draws}) in {most_seconds} s"
    except subprocess.CalledProcessError as error:
        return f"{script:14} failed: {error.stderr.strip().splitlines()[-1]}"
    result = dict(np.load(out))
    result["ess"] = min(float(array_stats.ess(result[name], method="bulk")) for name in PARAMETERS)
    return result
