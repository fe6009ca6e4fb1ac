"""Time of the law of branches: one gradient over all branches of a network, the table of a fit, and a fit."""

import time

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jaxtyping import Array

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, BlockOrder, SelfAttention, branch_coefficients, law_of_increment, nodes_of

pytestmark = pytest.mark.benchmark

WIDTH, DEPTH = 4096, 24


def layer(heads: int = 32) -> si.Stack:
    attention = SelfAttention(gain=0.3, heads=heads, pattern=si.CAUSAL)
    return si.Stack((Block(attention, 0.2, "layer"), Block(MLP(0.3), 0.2, "layer")))


def increments(tokens: int, layer: si.Stack) -> list[tuple[Block, Array, Array]]:
    """Increments about their mean, without a network of 4,096 features."""
    rng, found = np.random.default_rng(0), []
    for block in layer.layers * DEPTH:
        V = si.equicorrelated(tokens=tokens, correlation=rng.uniform(0.1, 0.6))
        hidden = block.branch.moments(V, nodes_of(block, tokens, WIDTH), width=WIDTH)
        root = np.linalg.cholesky(0.04 * np.asarray(hidden.mean))
        G = root @ rng.standard_normal((tokens, WIDTH))
        found.append((block, V, jnp.asarray(G @ G.T / WIDTH)))
    return found


@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_one_gradient(tokens):
    blocks = layer()
    observed = increments(tokens, blocks)

    @eqx.filter_jit
    def density(parameters, V, D, nodes):
        def one(block, V, D, nodes):
            return law_of_increment(block, V, D, nodes, width=WIDTH).log_density(2 * jnp.log(block.strength))

        changed = blocks.with_parameters(parameters).layers
        return sum(
            jax.lax.map(lambda both, block=block, own=own: one(block, *both, own), (V[k::2], D[k::2])).sum()
            for k, (block, own) in enumerate(zip(changed, nodes, strict=True))
        )

    V, D = (jnp.stack([each[k] for each in observed]) for k in (1, 2))
    nodes = [nodes_of(block, tokens, WIDTH) for block in blocks.layers]
    gradient = eqx.filter_jit(jax.grad(density, argnums=(0, 1)))
    times = []
    for _ in range(4):
        started = time.perf_counter()
        jax.block_until_ready(gradient(blocks.parameters(), V, D, nodes))
        times.append(time.perf_counter() - started)
    print(f"\n{tokens} tokens, {2 * DEPTH} branches: first {times[0]:.2f} s, then {min(times[1:]):.3f} s")


def test_table_and_fit():
    blocks = layer(heads=8)
    data = si.sample_branches(blocks, si.equicorrelated(tokens=4, correlation=0.3), width=512, depth=12, key=jr.key(0))
    for what, run in {
        "table": lambda: branch_coefficients(data, BlockOrder.of_data(blocks, data)),
        "fit": lambda: si.fit(si.models.branches, data, architecture=blocks, key=jr.key(0)),
    }.items():
        times = []
        for _ in range(3):
            started = time.perf_counter()
            run()
            times.append(time.perf_counter() - started)
        print(f"\n{what}, 24 branches of 4 tokens, n = 512: first {times[0]:.2f} s, then {min(times[1:]):.2f} s")
