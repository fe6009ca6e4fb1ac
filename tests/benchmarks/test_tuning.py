"""Tuning three parameters under two constraints, over plain `simulate`s, and over a grid search of equal accuracy.

The grid search evaluates both criteria by `simulate` on a grid of 6³ points,
in logs, and again around the best point, until neighbours differ by less than the Monte Carlo error of the tuned γ.
"""

import time

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import sdeinfer as si
from sdeinfer.criteria import LargestCorrelation, NormFactor, probability, quantile

pytestmark = pytest.mark.benchmark

V0 = np.asarray(si.equicorrelated(tokens=4, correlation=0.2, norm=1.0))
WIDTH, DEPTH, PATHS, POINTS = 256, 64, 4096, 6
BOX = {"gamma": (0.05, 0.95), "tau0": (0.3, 5.0), "c_gap": (0.1, 5.0)}


def tune(seed):
    goals = [probability(NormFactor(), below=2) >= 0.95, quantile(LargestCorrelation(), 0.95) <= 0.56]
    sizes = {"width": WIDTH, "depth": DEPTH, "paths": PATHS}
    return si.tune("transformer", V0, maximise="gamma", subject_to=goals, bounds=BOX, key=jr.key(seed), **sizes)


def simulate(gamma, tau0, c_gap):
    layer = si.ShapedTransformer(gamma=gamma, tau0=tau0, c_plus=c_gap / 2, c_minus=-c_gap / 2)
    return np.asarray(si.simulate(layer, V0, [DEPTH / WIDTH], paths=PATHS, key=jr.key(0)))[:, 0]


def slack(V):
    if not np.isfinite(V).all():
        return -1.0
    norms = np.diagonal(V, axis1=1, axis2=2)
    rho = V[:, *np.triu_indices(4, 1)] / np.sqrt(norms[:, :, None] * norms[:, None])[:, *np.triu_indices(4, 1)]
    inside = np.exp(np.abs(np.log(norms / np.diag(V0))).max(axis=1)) < 2
    return min(inside.mean() - 0.95, 0.56 - np.quantile(rho.max(axis=1), 0.95))


def grid_search(accuracy):
    low, high = (np.log([ends[side] for ends in BOX.values()]) for side in (0, 1))
    evaluations = 0
    while True:
        axes = [np.linspace(*ends, POINTS) for ends in zip(low, high, strict=True)]
        points = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 3)
        evaluations += len(points)
        kept = [point for point in points if slack(simulate(*np.exp(point))) >= 0]
        best = max(kept, key=lambda point: point[0]) if kept else points[0]
        spacing = (high - low) / (POINTS - 1)
        if spacing[0] < accuracy:
            return float(np.exp(best[0])), evaluations
        edge = np.log([ends for ends in BOX.values()])
        low, high = np.maximum(best - spacing, edge[:, 0]), np.minimum(best + spacing, edge[:, 1])


def test_tuning_over_simulations_and_over_a_grid(record):
    times = []
    for seed in (0, 0):
        started = time.perf_counter()
        tuned = tune(seed)
        times.append(time.perf_counter() - started)
    simulate(0.2, 1.0, 1.0)
    started = time.perf_counter()
    for number in range(100):
        simulate(0.2 + number / 1000, 1.0, 1.0)
    hundred = time.perf_counter() - started
    error = tuned.parameters["error"]["gamma"] / tuned.values["gamma"]
    started = time.perf_counter()
    gamma, evaluations = grid_search(error)
    grid = time.perf_counter() - started
    print(f"\n{tuned}\n\ntune: cold {times[0]:.1f} s, warm {times[1]:.1f} s, {tuned.found['evaluations']} evaluations")
    print(f"100 simulates {hundred:.1f} s: cold over these {times[0] / hundred:.2f}, warm {times[1] / hundred:.2f}")
    print(f"grid of equal accuracy ({error:.1%}): γ = {gamma:.4f} in {evaluations} simulates, {grid:.1f} s")
    print(f"grid over tune: cold {grid / times[0]:.1f}, warm {grid / times[1]:.1f}")
    rows = {
        "seconds of `tune`": [f"{each:.0f}" for each in times],
        "over one `simulate`": [f"{100 * each / hundred:.0f}" for each in times],
        "a grid search of equal accuracy, over `tune`": [f"{grid / each:.1f}" for each in times],
    }
    record("tuning_over_grid", rows)
    assert jnp.isfinite(gamma)
