"""Seconds of `tune` in processes of their own, and over a grid search of equal accuracy by `simulate`.

The grid search evaluates both criteria by `simulate` on a grid of 6³ points, in logs, and again around the best point,
until neighbours differ by less than the Monte Carlo error of the tuned γ.
"""

import json
import subprocess
import sys
import time

import jax.random as jr
import numpy as np
import pytest

import sdeinfer as si
from sdeinfer.criteria import LargestCorrelation, NormFactor, probability, quantile

pytestmark = pytest.mark.benchmark

SCRIPT = """
import json, sys, time
started = time.perf_counter()
import jax
import numpy as np
jax.config.update("jax_enable_x64", True)
import sdeinfer as si
from sdeinfer.criteria import LargestCorrelation, NormFactor, probability, quantile
imported = time.perf_counter() - started
V0 = np.asarray(si.equicorrelated(tokens=4, correlation=0.2, norm=1.0))
goals = [probability(NormFactor(), below=2) >= 0.95, quantile(LargestCorrelation(), 0.95) <= 0.7]
blocks = si.Stack((
    si.blocks.Block(si.blocks.SelfAttention(heads=4, pattern=si.CAUSAL), norm="layer"),
    si.blocks.Block(si.blocks.MLP(), norm="layer"),
))
known, of_blocks = {"tau0": 1.0, "c_gap": 1.0}, {"gain": 1.0, "temperature": 1.0}
shaped = {"maximise": "gamma", "fixed": known, "depth": 64, "paths": 4096}
settings = {
    "limit": ("transformer", shaped | {"law": "limit"}),
    "finite-width": ("transformer", shaped),
    "blocks": (blocks, {"maximise": "strength", "fixed": of_blocks, "depth": 12, "paths": 1024}),
}
what, arguments = settings[sys.argv[1]]
times = []
for seed in (0, 1, 2):
    started = time.perf_counter()
    si.tune(what, V0, width=256, subject_to=goals, key=jax.random.key(seed), **arguments)
    times.append(time.perf_counter() - started)
print(json.dumps([imported, times[0], min(times[1:])]))
"""

ROWS = {
    "limit": "γ under two bounds, 64 layers, 4,096 paths, by the limit",
    "finite-width": "the same by width n, 4,096 networks",
    "blocks": "strength of Pre-LN blocks, 12 layers, 1,024 networks",
}


def test_seconds_of_tune(record):
    found = {}
    for name, row in ROWS.items():
        run = subprocess.run([sys.executable, "-c", SCRIPT, name], check=True, capture_output=True, text=True)
        found[name] = json.loads(run.stdout.splitlines()[-1])
        record("time_of_tuning", {row: [f"{each:.1f} s" for each in found[name]]})
    ratios = [f"{found['finite-width'][place] / found['limit'][place]:.1f}" for place in (1, 2)]
    record("time_of_tuning", {"width n over the limit": ["", *ratios]})
    print(f"\nimports, first, further: {found}; width n over the limit: {ratios}")


V0 = np.asarray(si.equicorrelated(tokens=4, correlation=0.2, norm=1.0))
WIDTH, DEPTH, PATHS, POINTS = 256, 64, 4096, 6
BOX = {"gamma": (0.05, 0.95), "tau0": (0.3, 5.0), "c_gap": (0.1, 5.0)}


def simulate(gamma, tau0, c_gap):
    layer = si.ShapedTransformer(gamma=gamma, tau0=tau0, c_plus=c_gap / 2, c_minus=-c_gap / 2)
    return np.asarray(si.simulate(layer, V0, [DEPTH / WIDTH], paths=PATHS, key=jr.key(0)))[:, 0]


def slack(V):
    if not np.isfinite(V).all():
        return -1.0
    norms, pairs = np.diagonal(V, axis1=1, axis2=2), np.triu_indices(4, 1)
    rho = V[:, *pairs] / np.sqrt(norms[:, :, None] * norms[:, None])[:, *pairs]
    inside = np.exp(np.abs(np.log(norms / np.diag(V0))).max(axis=1)) < 2
    return min(inside.mean() - 0.95, 0.56 - np.quantile(rho.max(axis=1), 0.95))


def grid_search(accuracy):
    edge = np.log([ends for ends in BOX.values()])
    low, high = edge.T
    while True:
        axes = [np.linspace(*ends, POINTS) for ends in zip(low, high, strict=True)]
        points = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)
        kept = [point for point in points if slack(simulate(*np.exp(point))) >= 0]
        best = max(kept, key=lambda point: point[0]) if kept else points[0]
        spacing = (high - low) / (POINTS - 1)
        if spacing[0] < accuracy:
            return float(np.exp(best[0]))
        low, high = np.maximum(best - spacing, edge[:, 0]), np.minimum(best + spacing, edge[:, 1])


def test_tuning_over_simulations_and_over_a_grid(record):
    def seconds(call):
        started = time.perf_counter()
        return call(), time.perf_counter() - started

    def tune():
        goals = [probability(NormFactor(), below=2) >= 0.95, quantile(LargestCorrelation(), 0.95) <= 0.56]
        sizes = {"width": WIDTH, "depth": DEPTH, "paths": PATHS}
        return si.tune("transformer", V0, maximise="gamma", subject_to=goals, bounds=BOX, key=jr.key(0), **sizes)

    (tuned, cold), (_, warm) = seconds(tune), seconds(tune)
    simulate(0.2, 1.0, 1.0)
    _, hundred = seconds(lambda: [simulate(0.2 + number / 1000, 1.0, 1.0) for number in range(100)])
    error = tuned.parameters["error"]["gamma"] / tuned.values["gamma"]
    gamma, grid = seconds(lambda: grid_search(error))
    rows = {
        "seconds of `tune`": [f"{each:.0f}" for each in (cold, warm)],
        "over one `simulate`": [f"{100 * each / hundred:.0f}" for each in (cold, warm)],
        "a grid search of equal accuracy, over `tune`": [f"{grid / each:.1f}" for each in (cold, warm)],
    }
    record("tuning_over_grid", rows)
    print(f"\n{tuned}\n{rows}\ngrid of equal accuracy ({error:.1%}): γ = {gamma:.4f}")
    assert np.isfinite(gamma)
