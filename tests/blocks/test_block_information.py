"""What an increment tells of a temperature: by its law, and by the scatter of scores of networks with weights."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from budget import assert_estimate, assert_within, mean_and_error
from conftest import random_covariance
from references import assert_agrees

import sdeinfer as si
from sdeinfer import blocks
from sdeinfer.blocks import MLP, Block, SelfAttention
from sdeinfer.networks import tokens_with_covariance

STEP, WIDTH, PARTS = 0.05, 32, 32
V3 = random_covariance(3)
PEAKED = Block(SelfAttention(heads=2, temperature=0.5, gain=1.5), strength=0.6)
"""Two heads that attend to single tokens."""


def data_of(block, *, networks: int):
    """Increments of networks of one layer, which all read `V3`."""
    data = si.sample_branches(block, V3, width=WIDTH, depth=1, networks=networks, key=jr.key(1))
    return data, blocks.BlockOrder.of_data(block, data)


@eqx.filter_jit
def scores(block, U, nodes, keys):
    """First and second differences in log τ of the scale-free log density, at increments of networks with weights."""

    def increment(key):
        D = block.increment(U, key=key)
        return D @ D.T / WIDTH

    D = jax.lax.map(increment, keys, batch_size=100)

    def at(step):
        moved = blocks.reshaped(block, step)
        law = jax.vmap(lambda D: blocks.law_of_increment(moved, V3, D, nodes, width=WIDTH).in_factor())
        return blocks.scale_free(law(D))

    below, here, above = jax.lax.map(at, STEP * jnp.arange(-1.0, 2.0))
    return (above - below) / (2 * STEP), (2 * here - above - below) / STEP**2


def test_information_on_a_temperature_agrees_with_the_scatter_of_scores_of_networks(key):
    data, order = data_of(PEAKED, networks=20)
    table = blocks.branch_coefficients(data, order)
    free = blocks.scale_free(table)
    mode = int(free.sum((0, 1)).argmax())
    U = tokens_with_covariance(jnp.asarray(V3), width=WIDTH, key=key)
    block = blocks.reshaped(PEAKED, blocks.LOG_FACTORS[mode])
    parts = []
    for part, own in enumerate(jr.split(key, PARTS)):
        nodes = blocks.nodes_of(PEAKED, 3, WIDTH, seed=100 + part)
        score, information = scores(block, U, nodes, jr.split(own, 200))
        parts.append((information.mean(), jnp.square(score).mean()))
    H, J = np.transpose(parts)
    adjusted = blocks.scale_free(blocks.adjusted_coefficients(table, data, order))
    shares = (adjusted[..., 0] - adjusted[..., mode]) / (free[..., 0] - free[..., mode])
    # One factor for all increments of a block; at the mode nothing changes.
    assert_agrees(shares, np.broadcast_to(shares[0, 0], shares.shape), rtol=1e-9)
    assert_agrees(adjusted[..., mode], free[..., mode])
    assert H.mean() < J.mean() / 1.5
    # The package has draws for half as many nodes, more of each.
    gap, error = mean_and_error(H - shares[0, 0] * J)
    assert_estimate(gap, 0.0, error * np.sqrt(3))


def test_the_scale_free_density_does_not_depend_on_the_scale():
    data, order = data_of(Block(MLP(gated=True), strength=0.5), networks=1)
    table, factor = blocks.branch_coefficients(data, order, log2=6), 5.3
    scaled = blocks.branch_coefficients(data.assign(increment=factor * data["increment"]), order, log2=6)
    # A volume of symmetric matrices of 3 × 3 scales with the sixth power.
    assert_agrees(blocks.scale_free(scaled), blocks.scale_free(table) - 6 * np.log(factor))
    np.testing.assert_array_equal(blocks.adjusted_coefficients(table, data, order), table)


def test_errors_of_nodes_are_independent():
    """Of equal increments, so that they do not add up over layers."""
    data, order = data_of(PEAKED, networks=40)
    for name in ("input", "increment"):
        data[name].values[:] = data[name].values[:1]
    gain = np.diff(blocks.scale_free(blocks.branch_coefficients(data, order, log2=5))[..., 12:21:4])
    z = (gain - gain.mean(0)) / gain.std(0, ddof=1)
    assert np.unique(gain).size == gain.size
    # Neighbours are as far apart as any two.
    of_neighbours = np.square(np.diff(z, axis=0)) / 2
    assert_within((of_neighbours.mean(0) - 1) * np.sqrt(len(gain)) / 2)
