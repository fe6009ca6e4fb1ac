"""Cost at equal weak error: the solver of weak order 2 against that of weak order 1; run with `-m benchmark -s`.

The bias of a mean at a step h is measured as its difference from the same mean at h/2 on the same Brownian motion, and
extrapolated by the solver's order: times 2 for order 1, times 4/3 for order 2. The step at which a bias is that of
the default of order 1, h = 0.01, follows from the order; the cost, from the time of a step. Another table has the
seconds of first and later calls, at the default steps.
"""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from budget import mean_and_error

import sdeinfer as si
from sdeinfer.solve import BrownianArray, PSDEuler, PSDSplitting, scan_paths, solve_in_blocks, step_grid
from sdeinfer.solve._limits import limit_over_on_host

pytestmark = pytest.mark.benchmark

DURATION = 0.8
LAYER = si.ShapedTransformer(gamma=1 / math.sqrt(8), tau0=1.0, c_plus=0.0, c_minus=-1.0)
PATHS = {2: 400_000, 4: 200_000, 8: 40_000, 16: 6_000}
BATCH = {2: 20_000, 4: 10_000, 8: 4_000, 16: 1_000}
TIMED = {2: 4096, 4: 4096, 8: 4096, 16: 512}
SOLVERS = {1: (PSDEuler(), (0.1, 0.05)), 2: (PSDSplitting(), (0.2, 0.1))}
CALLS = Path(__file__).parent / "peers" / "orders.py"
STATISTICS = ("correlation", "log det V", "effective rank", "log V₁₁", "share of ρ > .3")


def start(tokens: int):
    return np.asarray(si.equicorrelated(tokens=tokens, correlation=0.2), float)


def statistics(V):
    """The statistics of paths V of shape (m, m, paths); the last one is a quantile's level, as a probability."""
    trace, rho = jnp.einsum("iip->p", V), V[0, 1] / jnp.sqrt(V[0, 0] * V[1, 1])
    log_det = jnp.linalg.slogdet(jnp.moveaxis(V, -1, 0))[1]
    rank = trace**2 / jnp.einsum("ijp,jip->p", V, V)
    return jnp.stack([rho, log_det, rank, jnp.log(V[0, 0]), (rho > 0.3).astype(rho.dtype)])


def biases(tokens: int, order: int, h: float):
    """Bias of each statistic at the step h, and its Monte Carlo error."""
    solver, _ = SOLVERS[order]
    limit, V0, count = LAYER.limit(), start(tokens), round(DURATION / h)
    X0 = jnp.broadcast_to(jnp.linalg.cholesky(V0)[..., None], (tokens, tokens, BATCH[tokens]))

    @jax.jit
    def batch(key):
        fine = jr.normal(key, (2 * count, *solver.normals(limit, tokens), BATCH[tokens]))
        found = []
        for normals, step in (((fine[::2] + fine[1::2]) / jnp.sqrt(2.0), h), (fine, h / 2)):
            grid = step_grid([DURATION], step)
            brownian = BrownianArray(jnp.asarray(grid.steps), normals)
            found.append(statistics(scan_paths(limit, X0, grid, brownian, solver=solver)[0][0]))
        return found[0] - found[1]

    differences = [np.asarray(batch(key)).T for key in jr.split(jr.key(0), PATHS[tokens] // BATCH[tokens])]
    mean, error = mean_and_error(np.concatenate(differences))
    scale = 1 / (1 - 0.5**order)
    return scale * mean, scale * error


def seconds_of_a_step(tokens: int, order: int) -> float:
    """Of `TIMED` paths, by the solve that `simulate` runs."""
    grid = step_grid([0.64], 0.01)
    limit, X0 = limit_over_on_host(LAYER, grid), np.linalg.cholesky(start(tokens))[None].astype(np.float32)

    def solve():
        began = time.perf_counter()
        solve_in_blocks(limit, X0, grid, paths=TIMED[tokens], solver=SOLVERS[order][0], key=jr.key(1))
        return time.perf_counter() - began

    solve()
    return min(solve() for _ in range(5)) / (len(grid.steps) - 1)


@pytest.mark.parametrize("tokens", PATHS)
def test_cost_at_equal_weak_error(tokens):
    found = {}
    for order, (_, steps) in SOLVERS.items():
        for h in steps:
            found[order, h] = biases(tokens, order, h)
            row = "   ".join(
                f"{name} {b:+.1e} ± {e:.0e}" for name, b, e in zip(STATISTICS, *found[order, h], strict=True)
            )
            print(f"\nm = {tokens}, order {order}, h = {h:g}: {row}", end="")
    ratio = seconds_of_a_step(tokens, 2) / seconds_of_a_step(tokens, 1)
    print(f"\nm = {tokens}: a step of order 2 takes {ratio:.1f} times one of order 1")
    coarse = {order: steps[-1] for order, (_, steps) in SOLVERS.items()}
    for number, name in enumerate(STATISTICS):
        first = abs(found[1, coarse[1]][0][number]) * 0.01 / coarse[1]
        of_second, error = (part[number] for part in found[2, coarse[2]])
        # An upper bound of the bias where it is not seen.
        second = max(abs(of_second), 2 * error) / coarse[2] ** 2
        step = math.sqrt(first / second)
        bound = "" if abs(of_second) > 2 * error else "at least "
        print(
            f"  {name}: bias {first:.1e} at h = 0.01 of order 1 is that at h = {step:.3f} of order 2: {bound}", end=""
        )
        print(f"{step / 0.01 / ratio:.1f} times less work")


def first_and_later(tokens: int, solver: str, what: str) -> tuple[float, float]:
    """Seconds of the first and of later calls, in a process of its own without a cache of compiled programs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    result = subprocess.run(
        [sys.executable, str(CALLS), str(tokens), solver, what],
        env=kept | {"SDEINFER_NO_CACHE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return tuple(json.loads(result.stdout))


def test_seconds_of_first_and_later_calls():
    """1,024 paths to time 0.8 in single precision, at the default step of each solver."""
    print("\nseconds cold / warm by PSDEuler, h = 0.01, and by PSDSplitting, h = 0.05\n")
    print("| m | simulate, order 1 | order 2 | its gradient, order 1 | order 2 |\n|---|---|---|---|---|")
    for tokens in PATHS:
        found = [
            first_and_later(tokens, solver, what)
            for what in ("simulate", "gradient")
            for solver in ("PSDEuler", "PSDSplitting")
        ]
        print(f"| {tokens} | " + " | ".join(f"{cold:.1f} / {warm:.2g}" for cold, warm in found) + " |", flush=True)
        assert all(0 < warm < cold for cold, warm in found)
