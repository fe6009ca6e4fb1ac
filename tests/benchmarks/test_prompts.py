"""What a batch of prompts tells, and what attention patterns and tangents cost.

pytest -m benchmark -s tests/benchmarks/test_prompts.py
"""

import functools
import time

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from calibration.study import posterior, statistics

import sdeinfer as si
from sdeinfer.infer import in_range, problem_of
from sdeinfer.likelihood import Assumptions
from sdeinfer.models import full_path
from sdeinfer.solve._splitting import splitting_step

pytestmark = pytest.mark.benchmark

BLOCK = 256
"""Paths of one block of the solver."""


def sd_of(pattern: si.Pattern, tokens: int, networks: int, key) -> dict[str, float]:
    """Posterior standard deviations of logit γ's and log τ0's parameters, relative to the truth."""
    kind = si.Architecture("transformer", pattern=pattern)
    truth = {"gamma": 0.6, "tau0": 1.0, "c_plus": 2.0, "c_minus": -2.0}
    V0 = si.equicorrelated(tokens=tokens, correlation=0.1, norm=2.2)
    data = si.sample_networks(kind.layer(**truth), V0, width=256, depth=16, networks=networks, key=key)
    assumptions = Assumptions(kind)
    found = posterior(statistics(in_range(problem_of(full_path, assumptions), data)[0], assumptions), key)
    return {name: found.mean_and_sd(name)[1] / truth[name] for name in ("gamma", "tau0")}


def test_what_prompts_tell(key):
    """32 networks of width 256 and depth 16, three data sets each: mean relative posterior sds."""
    cases = {
        "4 prompts of 3 tokens, 32 networks": (si.Pattern(prompts=(3, 3, 3, 3)), 12, 32),
        "1 prompt of 12 tokens, 32 networks": (si.Pattern(), 12, 32),
        "1 prompt of 3 tokens, 128 networks": (si.Pattern(), 3, 128),
        "1 prompt of 3 tokens, 32 networks": (si.Pattern(), 3, 32),
        "4 causal prompts of 3 tokens, 32 networks": (si.Pattern(causal=True, prompts=(3, 3, 3, 3)), 12, 32),
    }
    print()
    for name, (pattern, tokens, networks) in cases.items():
        found = [sd_of(pattern, tokens, networks, jr.fold_in(key, seed)) for seed in range(3)]
        sds = {parameter: np.mean([each[parameter] for each in found]) for parameter in found[0]}
        print(f"{name:42s} gamma ± {sds['gamma']:.2%}, tau0 ± {sds['tau0']:.1%}", flush=True)


def seconds(step, *arguments) -> float:
    """Shortest time of one call."""
    jax.block_until_ready(step(*arguments))
    times = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(5):
            result = step(*arguments)
        jax.block_until_ready(result)
        times.append((time.perf_counter() - start) / 5)
    return min(times)


def setting(tokens: int, rows: int, normals: tuple[int, int], key):
    """A factor of rows tokens for each path, a step, and normals, in float32."""
    keys = jr.split(key)
    X = jnp.eye(rows, dtype=jnp.float32)[..., None] + 0.3 / np.sqrt(rows) * jr.normal(
        keys[0], (rows, rows, BLOCK), jnp.float32
    )
    h = jnp.float32(0.01)
    return X, h, jnp.sqrt(h) * jr.normal(keys[1], (*normals, BLOCK), jnp.float32)


@functools.partial(jax.jit, static_argnames="tangents")
def solver_step(limit, X, h, G, *, tangents=False):
    return splitting_step(limit, X, h, G, h < 0, tangents=tangents)[0]


@pytest.mark.parametrize("kind", ["attention", "transformer"])
@pytest.mark.parametrize("tokens", [8, 32])
def test_steps_with_patterns(kind, tokens, key):
    """Time of one step of a block of paths over that without a mask."""
    half = tokens // 2
    patterns = {
        "no mask": si.Pattern(),
        "causal": si.CAUSAL,
        "2 prompts": si.Pattern(prompts=(half, half)),
        "2 causal prompts": si.Pattern(causal=True, prompts=(half, half)),
        "band": si.Pattern.of_mask(np.tri(tokens) - np.tri(tokens, k=-4)),
    }
    found = {}
    for name, pattern in patterns.items():
        layer = si.Architecture(kind, pattern=pattern).layer(gamma=0.5, tau0=1.0, c_plus=1.0, c_minus=-1.0)
        limit = jax.tree.map(jnp.float32, layer.limit())
        found[name] = seconds(solver_step, limit, *setting(tokens, tokens, limit.normals(tokens), key))
    print(f"\n{kind}, m = {tokens}: " + ", ".join(f"{k} {s / found['no mask']:.2f}" for k, s in found.items()))


@pytest.mark.parametrize("kind", ["attention", "transformer"])
@pytest.mark.parametrize("tokens", [4, 8, 16])
def test_steps_of_tangents(kind, tokens, key):
    """Time of one step of a tangent over two of 2m tokens without one."""
    layer = si.Architecture(kind).layer(gamma=0.5, tau0=1.0, c_plus=1.0, c_minus=-1.0)
    limit, rows = jax.tree.map(jnp.float32, layer.limit()), 2 * tokens

    def time_of(of: int, *, tangents: bool) -> float:
        step = functools.partial(solver_step, tangents=tangents)
        return seconds(step, limit, *setting(of, rows, limit.normals(rows), key))

    tangent, plain = time_of(tokens, tangents=True), time_of(rows, tangents=False)
    print(f"\n{kind}, m = {tokens}: {tangent / (2 * plain):.2f} of two steps of {rows} tokens")
