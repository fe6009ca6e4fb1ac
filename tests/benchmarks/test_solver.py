"""Paths of the SDE: `simulate` against what one would write with Diffrax and a dense Σ, and against its random numbers.

All take steps of order 1: the dense peers step the p entries of V by Euler–Maruyama with the Cholesky factor of the p×p
matrix Σ(V). The floor is drawing p normals for each step and path inside a scan: the fewest that Σ^{1/2} dB needs.
"""

import math
import time

import diffrax
import jax
import jax.numpy as jnp
import jax.random as jr
import lineax as lx
import numpy as np
import pytest
from dense import dense_diffusions

import sdeinfer as si
from sdeinfer.covariance import unvech, vech

pytestmark = pytest.mark.benchmark

STEP, STEPS = 0.01, 75
PATHS = {2: 4096, 4: 4096, 8: 4096, 16: 256}
FLOOR = {2: 5, 4: 5, 8: 5, 16: math.inf}
UNSAFE = {2: 6, 4: 6, 8: 4, 16: 20}
VIRTUAL = {2: 20, 4: 20, 8: 8, 16: 50}
"""Bounds: at most so many times the floor, at least so many times faster than the dense forms."""


@pytest.fixture(autouse=True)
def _single_precision():
    with jax.enable_x64(False):  # noqa: FBT003
        yield


def layer():
    return si.ShapedTransformer(gamma=1 / math.sqrt(8), tau0=1.0, c_plus=0.0, c_minus=-1.0)


def start(tokens: int):
    return si.equicorrelated(tokens=tokens, correlation=0.2)


def ours(tokens: int, paths: int):
    V0, key = start(tokens), jr.key(0)
    return lambda: si.simulate(layer(), V0, [STEP * STEPS], paths=paths, step=STEP, key=key)


def floor(tokens: int, paths: int):
    count = paths * tokens * (tokens + 1) // 2

    @jax.jit
    def draw(key):
        def one_step(total, number):
            return total + jr.normal(jr.fold_in(key, number), (count,), jnp.float32), None

        return jax.lax.scan(one_step, jnp.zeros(count, jnp.float32), jnp.arange(STEPS))[0]

    return lambda: draw(jr.key(0))


def dense_fields(tokens: int):
    limit = layer().limit()

    def drift(t, y, args):
        return vech(limit.drift(unvech(y)))

    def diffusion(t, y, args):
        linear, attention = dense_diffusions(unvech(y))
        return jnp.linalg.cholesky(limit.linear_noise * linear + limit.attention_noise * attention)

    return drift, diffusion, vech(start(tokens))


def dense_scan(tokens: int, paths: int):
    drift, diffusion, y0 = dense_fields(tokens)

    def path(key):
        def one_step(y, number):
            noise = math.sqrt(STEP) * jr.normal(jr.fold_in(key, number), y0.shape, y0.dtype)
            return y + STEP * drift(0, y, None) + diffusion(0, y, None) @ noise, None

        return jax.lax.scan(one_step, y0, jnp.arange(STEPS))[0]

    run = jax.jit(jax.vmap(path))
    return lambda: run(jr.split(jr.key(0), paths))


def dense_diffrax(tokens: int, paths: int, *, virtual: bool):
    drift, diffusion, y0 = dense_fields(tokens)
    adjoint = diffrax.RecursiveCheckpointAdjoint() if virtual else diffrax.DirectAdjoint()
    shape = jax.ShapeDtypeStruct(y0.shape, y0.dtype)

    def path(key):
        if virtual:
            brownian = diffrax.VirtualBrownianTree(0.0, STEP * STEPS, tol=STEP / 2, shape=shape, key=key)
        else:
            brownian = diffrax.UnsafeBrownianPath(shape=shape, key=key)
        noise = diffrax.ControlTerm(lambda t, y, args: lx.MatrixLinearOperator(diffusion(t, y, args)), brownian)
        terms = diffrax.MultiTerm(diffrax.ODETerm(drift), noise)
        times = {"t0": 0.0, "t1": STEP * STEPS, "dt0": STEP}
        return diffrax.diffeqsolve(terms, diffrax.Euler(), **times, y0=y0, adjoint=adjoint, max_steps=STEPS + 1).ys

    run = jax.jit(jax.vmap(path))
    return lambda: run(jr.split(jr.key(0), paths))


@pytest.mark.parametrize("tokens", PATHS)
def test_against_the_dense_forms_and_the_floor(tokens, timed, bounded):
    paths = PATHS[tokens]
    mine, least = timed(ours(tokens, paths)), timed(floor(tokens, paths))
    print(f"\nm = {tokens}, {paths} paths × {STEPS} steps, float32: {mine * 1e3:.1f} ms")
    print(f"  {least * 1e3:8.1f} ms  {tokens * (tokens + 1) // 2} normals", end="; ")
    print(bounded("times that:", mine / least, most=FLOOR[tokens]))
    peers = {
        "dense, lax.scan": (dense_scan(tokens, paths), 1),
        "dense, Diffrax, UnsafeBrownianPath": (dense_diffrax(tokens, paths, virtual=False), UNSAFE[tokens]),
        "dense, Diffrax, VirtualBrownianTree": (dense_diffrax(tokens, paths, virtual=True), VIRTUAL[tokens]),
    }
    for name, (peer, least_ratio) in peers.items():
        seconds = timed(peer, repeats=3)
        print(f"  {seconds * 1e3:8.1f} ms  " + bounded(f"{name}: ratio", seconds / mine, least=least_ratio))


@pytest.mark.parametrize("tokens", [2, 4, 8, 16])
def test_compilation(tokens, bounded):
    jax.clear_caches()
    run, elapsed = ours(tokens, 4096), []
    for _ in range(2):
        started = time.perf_counter()
        jax.block_until_ready(run())
        elapsed.append(time.perf_counter() - started)
    print("\n" + bounded(f"m = {tokens}: seconds of tracing and compilation", elapsed[0] - elapsed[1], most=3))


def test_growth_with_the_number_of_tokens(timed, bounded):
    """From 16 tokens on; the dense form's Σ alone has p² entries a path: 4·10⁶ at m = 64, and p³ is 9·10⁹."""
    sizes, paths = (16, 32, 64, 128), 64
    costs = [timed(ours(tokens, paths), repeats=3) / (paths * STEPS) for tokens in sizes]
    for tokens, cost in zip(sizes, costs, strict=True):
        print(f"\nm = {tokens}: {cost * 1e6:.1f} µs a step and path, {cost / tokens**3 * 1e9:.2f} ns / m³", end="")
    exponent = np.polyfit(np.log(sizes), np.log(costs), 1)[0]
    print("\n" + bounded("exponent of m from 16 to 128:", exponent, most=3))
