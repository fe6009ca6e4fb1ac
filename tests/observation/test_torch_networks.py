"""Networks of PyTorch, drawn by a script that knows nothing of this package: from its file to a verdict.

`SDEINFER_TORCH_PYTHON` names an interpreter with torch; its default is the one that runs the tests.
"""

import functools
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path

import jax.random as jr
import numpy as np
import pytest
import xarray as xr

import sdeinfer as si
from sdeinfer.diagnostics import Check
from sdeinfer.layers import Architecture

pytestmark = pytest.mark.torch

SCRIPT = Path(__file__).parents[1] / "torch_networks.py"
PYTHON = os.environ.get("SDEINFER_TORCH_PYTHON", sys.executable)

GAMMA, TAU0, SLOPE = 0.5, 0.5, 2.0
DEPTH, NETWORKS = 64, 64
TRUTH = {"gamma": GAMMA, "tau0": TAU0, "c_gap": 2 * SLOPE}
DEVIATIONS = 4.0
"""Largest distance of a posterior mean from the truth, in posterior standard deviations."""


@functools.cache
def why_not() -> str | None:
    """Why the interpreter cannot run the script; None if it can."""
    try:
        result = subprocess.run([PYTHON, "-c", "import torch"], capture_output=True, text=True, check=False)
    except OSError as error:
        return str(error)
    return " ".join(result.stderr.split())[-200:] if result.returncode else None


def drawn(folder: Path, kind: Architecture, width: int, seed: int) -> xr.Dataset:
    """Networks of the script; the truth is left out of the data, so that no verdict sees it."""
    if why_not() is not None:
        pytest.skip(f"{PYTHON} has no torch, set SDEINFER_TORCH_PYTHON: {why_not()}")
    out = folder / "networks.npz"
    command = [PYTHON, str(SCRIPT), str(out), "--kind", kind.name, "--heads", str(kind.sizes.get("heads", 1))]
    command += ["--causal"] if kind.pattern.causal else []
    sizes = {"width": width, "depth": DEPTH, "networks": NETWORKS, "seed": seed}
    for name, value in (sizes | {"gamma": GAMMA, "tau0": TAU0, "slope": SLOPE}).items():
        command += [f"--{name}", str(value)]
    subprocess.run(command, check=True)
    with np.load(out) as file:
        return si.covariance_dataset(file["covariance"], width=int(file["width"]), architecture=kind)


def fitted(folder: Path, kind: Architecture, width: int, seed: int, **options) -> tuple[Check, dict[str, float]]:
    """The check of a fit to such networks, and (mean − truth)/sd of every coordinate on the real line."""
    started = time.perf_counter()
    data = drawn(folder, kind, width, seed)
    ready = time.perf_counter()
    model = si.models.full_path
    post = si.fit(model, data, **options, key=jr.key(0))
    done = time.perf_counter()
    with warnings.catch_warnings():
        # ArviZ's, of importance weights that a wrong law does not allow.
        warnings.simplefilter("ignore")
        found = si.check(post)
    seconds = (ready - started, done - ready, time.perf_counter() - done)
    posterior, z = post["posterior"].to_dataset(), {}
    print(
        f"\nn = {width}, {kind.attributes()}: {', '.join(f'{each:.0f}' for each in seconds)} s to draw, fit and check"
    )
    for name in kind.coordinates.identified:
        parameter = kind.coordinates.sampled[name]
        draws = posterior[name].values
        u = parameter.to_real(draws)
        z[name] = float((u.mean() - parameter.to_real(TRUTH[name])) / u.std())
        print(
            f"  {name}: {draws.mean():.4g} ± {draws.std():.2g}, {TRUTH[name]:g}; "
            f"{parameter.bijection} {u.mean():.4g} ± {u.std():.2g}, z = {z[name]:+.2f}"
        )
    print(f"  {found.verdict}", *(f"  note: {note}" for note in found.notes), sep="\n")
    return found, z


@pytest.mark.parametrize("width", [128, 512])
@pytest.mark.parametrize("heads", [1, 4])
@pytest.mark.parametrize("name", ["attention", "transformer"])
def test_shaped_networks_are_recovered(name, heads, width, tmp_path):
    found, z = fitted(tmp_path, Architecture(name, heads=heads), width, seed=1)
    told = {each: z[each] for each in z if each not in found.unidentified}
    assert all(abs(each) < DEVIATIONS for each in told.values()), told
    assert found.passed, found.verdict


@pytest.mark.parametrize("width", [128, 512])
def test_causal_attention_is_recovered_or_not_trusted(width, tmp_path):
    """The limit's law omits more than that of the width; where that matters, the check says so."""
    found, z = fitted(tmp_path, Architecture("attention", pattern=si.CAUSAL), width, seed=2, law="limit")
    told = {each: z[each] for each in z if each not in found.unidentified}
    assert not found.passed or all(abs(each) < DEVIATIONS for each in told.values()), told
