"""The information of increments on a temperature: the t law, and its scores by draws and by networks with weights."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_estimate, assert_within, mean_and_error
from helpers.cases import random_covariance
from helpers.internals import (
    LOG_FACTORS,
    STEP,
    BlockOrder,
    BranchInput,
    BranchPath,
    Increments,
    _at_steps,
    _by_t,
    _drawn_coefficients,
    adjusted_coefficients,
    branch_coefficients,
    branch_inputs,
    scale_free,
)
from helpers.references import assert_agrees
from scipy import interpolate, stats

import sdeinfer as si
from sdeinfer import blocks
from sdeinfer.blocks import MLP, Block, SelfAttention
from sdeinfer.networks import tokens_with_covariance

WIDTH, PARTS, FREEDOM = 16, 24, 8.0
COUNT = 5
"""Entries of three tokens' increments, less their scale."""
V3 = np.asarray(random_covariance(3))
PEAKED = Block(SelfAttention(heads=2, temperature=0.5, gain=1.5), strength=0.6)
"""Two heads that attend to single tokens."""


def data_of(block, *, networks: int):
    """Increments of networks of one layer, which all read `V3`."""
    data = si.sample_branches(block, V3, width=WIDTH, depth=1, networks=networks, key=jr.key(1))
    return data, BlockOrder.of_data(block, data)


@eqx.filter_jit
def increments_of_networks(block, U, keys):
    """ΔΔᵀ/n of networks with weights, for a strength of 1."""

    def increment(key):
        D = block.increment(U, key=key)
        return D @ D.T / (WIDTH * block.strength**2)

    return jax.lax.map(increment, keys, batch_size=250)


def score_moments(coefficients, freedom: float) -> np.ndarray:
    """Chi-square and its square, the score, its square and the information, as means over draws."""
    c = np.asarray(coefficients)
    chi_square = -2 * (c[1, :, 0] - c[1, :, 1] ** 2 / (4 * c[1, :, 2]))
    below, here, above = _by_t(c, COUNT, freedom)
    score = (above - below) / (2 * STEP)
    each = [chi_square, chi_square**2, score, score**2, (2 * here - above - below) / STEP**2]
    return np.mean(each, axis=1)


@pytest.mark.long
def test_draws_have_the_scores_of_networks_with_weights(key):
    """Means over several sets of nodes, which draws and networks have of their own."""
    U = tokens_with_covariance(jnp.asarray(V3), width=WIDTH, key=key)
    each = [BranchInput(0, number, 0, PEAKED, WIDTH, np.asarray(V3)) for number in range(PARTS)]
    drawn = [score_moments(_drawn_coefficients([here], 0.0), FREEDOM) for here in each]
    D = increments_of_networks(PEAKED, U, jr.split(key, PARTS * 250)).reshape(PARTS, 250, 3, 3)
    width, V = jnp.asarray(WIDTH), jnp.asarray(V3)
    networks = [
        score_moments(_at_steps(PEAKED, V, own, here.nodes(seed=5), width), FREEDOM)
        for here, own in zip(each, D, strict=True)
    ]
    (one, of_one), (other, of_other) = mean_and_error(drawn), mean_and_error(networks)
    assert_estimate(one, other, np.hypot(of_one, of_other))
    # By the normal law the scatter of the score is several times the information.
    by_normal = np.mean([score_moments(_drawn_coefficients([here], 0.0), np.inf) for here in each[:4]], axis=0)
    assert by_normal[3] > 2 * by_normal[4]


def test_a_block_has_the_information_of_the_scatter_of_its_scores():
    """The adjusted density is the t law's, moved and multiplied."""
    data, order = data_of(PEAKED, networks=6)
    table = branch_coefficients(data, order)
    mode = int(scale_free(table).sum((0, 1)).argmax())
    each = list(branch_inputs(data, order))
    drawn = _drawn_coefficients(each, float(LOG_FACTORS[mode]))
    chi, chi_squared, *_ = score_moments(drawn, np.inf)
    freedom = 4 + 2 / (chi_squared / chi**2 * COUNT / (COUNT + 2) - 1)
    _, _, bias, square, information = score_moments(drawn, freedom)
    least = 0.1 / len(each)
    share, move = (information + least) / (square - bias**2 + least), bias / (information + least)
    assert abs(share - 1) > 0.1
    adjusted = adjusted_coefficients(table, data, order)
    np.testing.assert_array_equal(adjusted, adjusted_coefficients(table, data, order))
    found = scale_free(adjusted)[:, 0]
    by_t = interpolate.CubicSpline(LOG_FACTORS, _by_t(table[:, 0], COUNT, freedom), axis=1)
    near = np.abs(LOG_FACTORS) < 1.5
    expected = share * by_t(LOG_FACTORS[near] + move)
    gap = found[:, near] - expected
    # A constant, and the error of the spline.
    np.testing.assert_allclose(gap - gap[:, :1], 0.0, atol=0.02)


def test_the_scale_free_density_is_that_of_a_t_law():
    """The t law is that of the standardised entries without the direction of the scale."""
    rng, freedom = np.random.default_rng(0), 7.0
    nodes = PEAKED.branch.nodes(3, WIDTH, log2=6)
    G = np.linalg.cholesky(V3) @ rng.standard_normal((2, 3, WIDTH))
    found, expected = [], []

    @jax.jit
    def numbers(D):
        law = blocks.law_of_increment(PEAKED, jnp.asarray(V3), D, nodes, width=WIDTH)
        return law.standardised(0.0), law.standardised(1.0), law.in_factor()

    for D in G @ np.swapaxes(G, 1, 2) / WIDTH:
        residual, moved, coefficients = map(np.asarray, numbers(D))
        along, c = residual - moved, coefficients[None]
        basis = np.linalg.svd(along[None])[2][1:]
        t = stats.multivariate_t(np.zeros(COUNT), (freedom - 2) / freedom * np.eye(COUNT), df=freedom)
        normal = stats.multivariate_normal(np.zeros(COUNT))
        found.append(_by_t(c, COUNT, freedom)[0] - scale_free(c)[0])
        expected.append(t.logpdf(basis @ residual) - normal.logpdf(basis @ residual))
    np.testing.assert_allclose(found, expected, rtol=1e-9)


def test_the_scale_free_density_does_not_depend_on_the_scale():
    block, (data, _) = Block(MLP(gated=True), strength=0.5), data_of(PEAKED, networks=1)
    data = data.assign_coords(kind=("branch", ["mlp"]))
    order = BlockOrder.of_data(block, data)
    table, factor = branch_coefficients(data, order, log2=6), 5.3
    scaled = branch_coefficients(data.assign(increment=factor * data["increment"]), order, log2=6)
    # A volume of symmetric matrices of 3 × 3 scales with the sixth power.
    assert_agrees(scale_free(scaled), scale_free(table) - 6 * np.log(factor))
    np.testing.assert_array_equal(adjusted_coefficients(table, data, order), table)

    def density(table, strength):
        table = jnp.asarray(table)
        path = BranchPath(table, table[:, :, 0, 0], jnp.ones(1), part=(0,), strengths=("strength",), shapes=("gain",))
        return Increments(path, jnp.array([strength]), jnp.zeros(1)).log_prob(path.observed)

    # Increments grow with the square of the strength.
    assert_agrees(density(scaled, 0.4 * np.sqrt(factor)), density(table, 0.4) - 6 * np.log(factor))


@pytest.mark.long
def test_errors_of_nodes_are_independent():
    """Equal increments have independent errors, which do not add up over layers."""
    data, order = data_of(PEAKED, networks=40)
    for name in ("input", "increment"):
        data[name].values[:] = data[name].values[:1]
    gain = np.diff(scale_free(branch_coefficients(data, order, log2=5))[..., 12:21:4])
    z = (gain - gain.mean(0)) / gain.std(0, ddof=1)
    assert np.unique(gain).size == gain.size
    # Neighbours are as far apart as any two.
    of_neighbours = np.square(np.diff(z, axis=0)) / 2
    assert_within((of_neighbours.mean(0) - 1) * np.sqrt(len(gain)) / 2)
