"""The law of a path from its statistics: it must be the naive sum over terms, for every layer and every parameter."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import references
from helpers.cases import LAYERS, layer_of
from helpers.internals import (
    USED,
    FullPath,
    NetworkKeys,
    PathStatistics,
    Terms,
    observed_path,
    path_layout,
    path_statistics,
)
from likelihood.paths import (
    LAWS,
    all_terms,
    common_path,
    law_of,
    log_prob,
    naive,
    path_of,
    statistics_of,
)

import sdeinfer as si
from sdeinfer.layers import AbstractLayer, template
from sdeinfer.networks import covariance_chain
from sdeinfer.observation import covariance_dataset

ARCHITECTURES = {
    "transformer": template("transformer"),
    "transformer, 4 heads, W_O, r = 4": template("transformer", heads=4, output_projection=True, expansion=4),
    "attention": template("attention"),
    "attention, 4 heads": template("attention", heads=4),
    "feedforward": template("feedforward"),
    "feedforward, r = 8/3": template("feedforward", expansion=8 / 3),
    "mlp": template("mlp"),
}


@functools.cache
def scattered() -> tuple[PathStatistics, Terms, np.ndarray]:
    """Transitions of networks of three widths from everywhere: e spread over many decades, logits small and large."""
    rng, widths, count = np.random.default_rng(7), np.array([16, 64, 400]), 1000
    paths = np.empty((len(widths), 2 * count, 3, 3))
    for number, n in enumerate(widths):
        for start in range(0, 2 * count, 2):
            norms = np.exp(rng.normal(-0.7, 0.5)) * np.exp(rng.normal(0, 0.2, size=3))
            together = rng.uniform(0, 0.95) * rng.normal(size=(1, 8))
            X = norms[:, None] * (together + rng.normal(size=(3, 8))) / np.sqrt(8)
            paths[number, start] = X @ X.T
            after = np.linalg.cholesky(paths[number, start]) @ rng.normal(size=(3, n))
            paths[number, start + 1] = after @ after.T / n
    # Every other layer is a start of its own.
    used = np.tile(np.arange(2 * count) % 2 == 0, (len(widths), 1))
    data = covariance_dataset(paths, width=widths).assign({USED: (("network", "layer"), used)})
    path = observed_path(data)
    assert len(path) == len(widths) * count
    return path_statistics(path), all_terms(path), path.network


def prior_draws(architecture: AbstractLayer) -> list[dict[str, float]]:
    """Draws from a prior wider than that of the models, and its corners."""
    rng = np.random.default_rng(3)
    gamma = np.append(rng.uniform(size=12), [1e-3, 0.05, 0.999, 1e-3, 0.999, 0.5, 0.5])
    tau0 = np.append(np.exp(rng.uniform(np.log(0.05), np.log(10), 12)), [0.05, 0.05, 0.05, 10, 10, 1, 0.1])
    gap = np.append(rng.uniform(0, 8, 12), [8, 0, 8, 0, 0, 1e-6, 8])
    mean = np.append(rng.normal(0, 2, 12), np.linspace(-3, 3, 7))
    columns = {"gamma": gamma, "tau0": tau0, "c_plus": mean + gap / 2, "c_minus": mean - gap / 2}
    return [{name: float(columns[name][i]) for name in architecture.declared()} for i in range(len(gamma))]


@functools.cache
def naive_data() -> list[list[np.ndarray]]:
    """The terms of each of the widths."""
    _, terms, network = scattered()
    arrays = (terms.increments, terms.drift, terms.mixing, terms.variance)
    return [[np.asarray(x)[network == number] for x in arrays] for number in range(network.max() + 1)]


@jax.jit
@jax.value_and_grad
def fast(law, statistics):
    """By the statistics, with its gradient in the law's coefficients: one program for all architectures."""
    return FullPath(law, statistics).log_prob(statistics.weights).sum()


@functools.partial(jax.jit, static_argnames="limit")
@functools.partial(jax.value_and_grad, has_aux=True)
def slow(law, statistics, data, log_jacobian, *, limit):
    """By the naive terms of each width; and the sum of the absolute terms."""
    logs = []
    for number, mine in enumerate(data):
        if limit:
            z, b, e, _ = mine
            v = law.linear_noise + law.attention_noise * e
            residual = z - law.attention_drift * b[:, 0] - law.relu_drift * b[:, 1]
            logs.append(-(residual**2 / v + jnp.log(2 * jnp.pi * v)) / 2)
        else:
            law_ = jax.tree.map(lambda x, number=number: x[number], law)
            logs.append(references.finite_width_terms(law_, *mine, statistics, xp=jnp))
    logs = jnp.concatenate([x.reshape(-1) for x in logs] + [log_jacobian])
    return jnp.sum(logs), jnp.sum(jnp.abs(jax.lax.stop_gradient(logs)))


def inner(x, y) -> float:
    return sum(float(np.vdot(a, b)) for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True))


def worst_errors(architecture: AbstractLayer, law: str) -> tuple[float, float]:
    """Of the compressed log-likelihood and its gradient, relative to the sum of its absolute terms and to its size."""
    statistics = scattered()[0]

    @jax.jit
    def law_and_slopes(parameters):
        def coefficients(parameters):
            return law_of(layer_of(architecture, **parameters), statistics, law)

        units = [{name: 1.0 * (name == one) for name in parameters} for one in parameters]
        return coefficients(parameters), [jax.jvp(coefficients, (parameters,), (unit,))[1] for unit in units]

    naive, worst = (statistics, naive_data(), scattered()[1].log_jacobian), [0.0, 0.0]
    for parameters in prior_draws(architecture):
        law_, slopes = law_and_slopes(parameters)
        value, slope = fast(law_, statistics)
        (expected, scale), expected_slope = slow(law_, *naive, limit=law == "limit")
        worst[0] = max(worst[0], float(abs(value - expected) / scale))
        slope, expected_slope = (np.array([inner(x, along) for along in slopes]) for x in (slope, expected_slope))
        # In units in which each parameter's own scale is one.
        unit = np.array([abs(x) + 1 for x in parameters.values()])
        error, size = (np.linalg.norm(x * unit) for x in (slope - expected_slope, expected_slope))
        worst[1] = max(worst[1], 0.0 if error == 0 else float(error / size))
    return worst[0], worst[1]


@pytest.mark.one_case("finite-width-transformer, 4 heads, W_O, r = 4")
@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize("law", LAWS)
def test_statistics_lose_nothing_wherever_the_prior_goes(law, name):
    value, slope = worst_errors(ARCHITECTURES[name], law)
    print(f"\n{name}, {law}: log-likelihood {value:.1e}, gradient {slope:.1e}")
    assert value <= 1e-8
    assert slope <= 1e-8


@pytest.mark.parametrize("pattern", [si.Pattern(), si.CAUSAL], ids=str)
@pytest.mark.parametrize("tokens", [1, 2, 4])
def test_statistics_lose_nothing_at_wild_parameters(tokens, pattern):
    path = path_of(common_path(tokens), pattern=pattern)
    statistics, terms = path_statistics(path), all_terms(path)
    for tau0, gamma in itertools.product([1e-3, 1e-1, 1.0, 30.0, 1e3], [0.01, 0.3, 1.0]):
        layer = si.ShapedTransformer(gamma=gamma, tau0=tau0, c_plus=2.0, c_minus=-3.0, pattern=pattern)
        expected, scale = naive(path, terms, layer)
        assert (np.abs(log_prob(layer, statistics) - expected) <= 1e-10 * scale).all()


@pytest.mark.parametrize("decades", [3, 6, 9, 12])
def test_statistics_lose_nothing_for_nearly_coincident_tokens(layer, decades):
    # Tokens at distances over many decades give values of e over many decades.
    rng = np.random.default_rng(decades)
    X = rng.normal(size=(1, 12)) + np.logspace(0, -decades / 4, 4)[:, None] * rng.normal(size=(4, 12))
    path = [X @ X.T / 12]
    for _ in range(5):
        X = X @ rng.normal(size=(12, 12)) / np.sqrt(12)
        path.append(X @ X.T / 12)
    path = path_of(np.stack(path)[None], width=12)
    terms = all_terms(path)
    e = np.asarray(terms.mixing)
    assert np.log10(e.max() / e[e > 1e-14 * e.max()].min()) >= 0.8 * decades
    expected, scale = naive(path, terms, layer)
    assert (np.abs(log_prob(layer, path_statistics(path)) - expected) <= 1e-10 * scale).all()


@pytest.mark.one_case("finite-width")
@pytest.mark.parametrize("law", LAWS)
def test_networks_of_one_width_pool(law):
    layer = LAYERS["transformer"]()
    path = path_of(np.concatenate([common_path(3), common_path(3)[:2, ::-1]]), width=[40, 15, 40, 300, 15])
    statistics = path_statistics(path)
    each = log_prob(layer, statistics, law)
    expected = [each[[1, 4]].sum(), each[[0, 2]].sum(), each[3]]
    for pooled in (statistics.pooled(), path_statistics(path, pooled=True)):
        np.testing.assert_array_equal(pooled.widths, [15, 40, 300])
        np.testing.assert_allclose(log_prob(layer, pooled, law), expected, rtol=1e-11)
    np.testing.assert_allclose(log_prob(layer, statistics.pooled().pooled(), law), expected, rtol=1e-11)
    # Pooled statistics have a gradient that is written out, and the others an automatic one.
    of_networks, of_widths = (fast(law_of(layer, each, law), each) for each in (statistics, statistics.pooled()))
    np.testing.assert_allclose([of_networks[0], of_widths[0]], each.sum(), rtol=1e-11)
    for one, other in zip(*map(jax.tree.leaves, (of_networks[1], of_widths[1])), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_variances_where_attention_dominates_are_those_of_sampled_layers(key):
    """At width 1000 with logits of spread 0.4, attention makes most of the variance, and G takes 10 % of that away."""
    width, count, layer = 1000, 200_000, si.ShapedAttention(0.9, 1.0)
    V = jnp.diag(jnp.array([1.0, 0.9])) * 0.4 * np.sqrt(width)
    keys = NetworkKeys.numbered(key, jnp.arange(count, dtype=jnp.uint32))
    after = covariance_chain(layer, jnp.broadcast_to(V, (count, 2, 2)), width=width, layers=1, keys=keys)
    path = path_of(np.asarray(after)[:, :2], width=width)
    z = np.concatenate([np.asarray(path.terms(block).increments) for block in path.blocks()])[:, 1:]
    terms = path.terms(np.array([0]))
    law, centre = layer.finite_width(float(width)), path_layout(path).centre
    variance = sum(references.finite_width_variances(law, terms.mixing, terms.variance, centre))[0, 1:]
    limit = layer.limit().linear_noise + layer.limit().attention_noise * terms.mixing[0, 1:]
    print("law, limit over sampled:", variance / z.var(axis=0), limit / z.var(axis=0))
    # What is left out is of order s⁴ = 3 %; the sampled variances have errors of 0.3 %.
    np.testing.assert_allclose(variance, z.var(axis=0), rtol=0.04)
    assert (limit > 1.06 * z.var(axis=0)).all()


def test_covariances_too_large_for_their_law_are_refused():
    paths = common_path(3).copy()
    paths[1] *= 1e120
    with pytest.raises(ValueError, match="covariance: network 1: too large or too small for its law, .* overflows"):
        statistics_of(paths)
