"""`simulate` against a loop in C: Euler–Maruyama at a quarter of the step, vectorised over paths, on all threads."""

import ctypes
import os
import subprocess
import time

import jax
import jax.random as jr
import numpy as np
import pytest
from helpers.references import coefficients

import sdeinfer as si

pytestmark = pytest.mark.benchmark

LAYER = si.ShapedTransformer(gamma=0.5, tau0=2.0, c_plus=0.5, c_minus=-1.0)
TIME, STEP, SLOWER, BLOCK = 0.5, 0.05, 4, 16
PATHS = {4: 2**16, 16: 2**13}
REFERENCE = 8
"""Steps of the reference to one of `simulate`, and its paths over those that are timed."""


@pytest.fixture(scope="module")
def loop(tmp_path_factory):
    """The function of `peers/euler.c`, compiled by gcc."""
    source = os.path.join(os.path.dirname(__file__), "peers", "euler.c")
    library = tmp_path_factory.mktemp("euler") / "euler.so"
    flags = ["-O3", "-march=native", "-ffast-math", "-fopenmp", "-shared", "-fPIC"]
    subprocess.run(["gcc", *flags, source, "-o", library, "-lm"], check=True)
    solve = ctypes.CDLL(str(library)).solve
    pointer, number = ctypes.POINTER(ctypes.c_double), ctypes.c_double
    solve.argtypes = [pointer, pointer, *[ctypes.c_int] * 3, *[number] * 5, ctypes.c_uint64]

    def run(V0: np.ndarray, paths: int, step: float, seed: int) -> np.ndarray:
        theta1, theta2, a, kappa2 = coefficients(LAYER)
        V0, ends = np.ascontiguousarray(V0), np.empty((paths // BLOCK, *V0.shape, BLOCK))
        arrays = (x.ctypes.data_as(pointer) for x in (V0, ends))
        solve(*arrays, len(ends), len(V0), round(TIME / step), step, a, theta1, kappa2**0.5, theta2, seed)
        return np.moveaxis(ends, -1, 1).reshape(paths, *V0.shape)

    return run


@pytest.mark.parametrize("tokens", PATHS)
def test_simulate_over_a_loop_in_c(tokens, loop, record):
    V0, paths = np.asarray(si.equicorrelated(tokens=tokens, correlation=0.2, norm=1.0)), PATHS[tokens]

    def simulated(seed: int, step: float = STEP, paths: int = paths) -> np.ndarray:
        return np.asarray(
            jax.block_until_ready(si.simulate(LAYER, V0, [TIME], paths=paths, step=step, key=jr.key(seed)))
        )[:, -1]

    simulated(0)  # compiles
    ours, loops = [], []
    for seed in range(1, 6):
        for seconds, function in ((ours, simulated), (loops, lambda seed: loop(V0, paths, STEP / SLOWER, seed))):
            start = time.perf_counter()
            function(seed)
            seconds.append(time.perf_counter() - start)
    exact = _means([simulated(seed, STEP / REFERENCE) for seed in range(10, 10 + REFERENCE)])
    by_us, by_loop = (
        _means([function(seed) for seed in range(20, 20 + REFERENCE)])
        for function in (simulated, lambda seed: loop(V0, paths, STEP / SLOWER, seed))
    )
    errors = [np.abs(means[0] - exact[0]).max() for means in (by_us, by_loop)]
    sampling = np.hypot(exact[1], by_us[1]).max()
    ratio = np.median(loops) / np.median(ours)
    print(f"\n{tokens} tokens: {np.median(ours):.3f} s, loop {ratio:.2f} ×; errors {errors}, sampling {sampling:.2g}")
    cells = [f"{np.median(ours):.2g} s", f"{ratio:.1f}", *[f"{error:.1e}" for error in errors], f"{sampling:.0e}"]
    record("time_of_solver", {f"{tokens} tokens, {paths:,} paths": cells})


def _means(runs: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Means of the mean norm and of the mean correlation over paths, and their standard errors."""
    V = np.concatenate(runs)
    squares = np.diagonal(V, axis1=1, axis2=2)
    whole = np.isfinite(V).all(axis=(1, 2)) & (squares > 0).all(axis=1)  # the loop may leave the cone
    V, norms = V[whole], np.sqrt(squares[whole])
    pairs = np.triu_indices(V.shape[-1], 1)
    correlations = (V / (norms[:, :, None] * norms[:, None]))[:, pairs[0], pairs[1]].mean(axis=1)
    statistics = np.stack([np.log(norms**2).mean(axis=1), correlations])
    return statistics.mean(axis=1), statistics.std(axis=1) / np.sqrt(statistics.shape[1])
