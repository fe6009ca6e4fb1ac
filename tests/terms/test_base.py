"""A term and a layer of a user's (`tanh_mlp`): the drift and its flow, paths, networks with weights, densities."""

import functools
import itertools

import jax
import numpy as np
import pytest
from helpers.budget import assert_estimate, mean_and_error
from helpers.cases import random_covariance
from helpers.references import extrapolated
from helpers.tanh_mlp import CubicDrift, TanhMLP
from numpy.polynomial.hermite_e import hermegauss
from scipy import stats

import sdeinfer as si
from sdeinfer.likelihood import CovariancePath


def test_the_drift_is_that_of_a_wide_layer():
    """n (E φ(x_α) φ(x_β) − V_αβ), by Gauss–Hermite quadrature; what remains halves with 1/n and is extrapolated."""
    layer, V = TanhMLP(kappa=0.7), random_covariance(2)
    x, w = hermegauss(40)
    g, weight = np.stack(np.meshgrid(x, x), -1).reshape(-1, 2), np.outer(w, w).ravel() / w.sum() ** 2
    X = g @ np.linalg.cholesky(V).T

    def drift(width):
        s = np.sqrt(width / (3 * 0.7))
        images = np.sqrt(1 + 6 * 0.7 / width) * s * np.tanh(X / s)
        return width * (np.einsum("k,ka,kb->ab", weight, images, images) - np.asarray(V))

    widths = 4000 * 2 ** np.arange(4)
    table = [drift(width) for width in widths]
    for power in range(1, len(table)):
        table = [extrapolated(*pair, power) for pair in itertools.pairwise(table)]
    np.testing.assert_allclose(layer.limit().drift(V), table[0], rtol=1e-6)


@pytest.mark.long
def test_the_flow_is_that_of_the_drift():
    X, c, h = np.linalg.cholesky(random_covariance(3)), -0.8, 0.3
    term, V = CubicDrift(), X @ X.T

    def step(_, V):
        middle = V + h / 6000 * term.drift(c, V)
        return V + h / 3000 * term.drift(c, middle)

    V = jax.lax.fori_loop(0, 3000, step, V)
    found = np.asarray(term.flow(c, X, h))
    np.testing.assert_allclose(found @ found.T, V, rtol=1e-7)


@pytest.mark.long
def test_networks_have_the_norms_of_paths(key):
    """At n = 64 the mean of log V_αα is off by O(1/n), a fifth of the errors of 100 networks."""
    layer, V0 = TanhMLP(kappa=0.5), si.equicorrelated(tokens=2, correlation=0.3, norm=1.6)
    data = si.sample_networks(layer, V0, width=64, depth=32, networks=100, observe_every=32, key=key)
    V = np.asarray(si.simulate(layer, V0, [0.5], paths=4000, key=jax.random.fold_in(key, 1)))[:, 0]
    for statistic in (lambda V: np.log(V[:, 0, 0]), lambda V: V[:, 0, 1] / np.sqrt(V[:, 0, 0] * V[:, 1, 1])):
        (networks, error), (paths, paths_error) = (
            mean_and_error(statistic(each)) for each in (data["covariance"].values[:, -1], V)
        )
        assert_estimate(networks, paths, np.hypot(error, paths_error))


def test_densities_have_its_drift(key):
    """A layer's V′ of one token, given V, is N(V + 2c (V − 1) V/n, 2V²/n) by the limit's law, with c = −3κ."""
    width, V0 = 64, np.array([[1.8]])
    data = si.sample_networks(TanhMLP(kappa=0.5), V0, width=width, depth=12, networks=3, key=key)
    path, prepared = (
        make(data, architecture=TanhMLP, law="limit")
        for make in (si.transitions, functools.partial(si.prepare, si.models.full_path))
    )
    V = data["covariance"].values[:, :, 0, 0]

    @jax.jit
    def found(kappa):
        return [CovariancePath(TanhMLP(kappa=kappa), each).log_prob(each.value) for each in (path, prepared)]

    for kappa in (0.2, 1.5):
        mean = V[:, :-1] - 6 * kappa * (V[:, :-1] - 1) * V[:, :-1] / width
        expected = stats.norm(mean, V[:, :-1] * np.sqrt(2 / width)).logpdf(V[:, 1:]).sum(axis=1)
        for each in found(kappa):
            np.testing.assert_allclose(each, expected, rtol=1e-9)


class NoisyTerm(CubicDrift):
    columns = 1


class NoisyMLP(TanhMLP):
    def limit(self):
        return si.layers.Limit(linear_noise=1.0, others={NoisyTerm(): self.kappa})


def test_a_fit_refuses_noise_that_it_does_not_know(key):
    data = si.sample_networks(TanhMLP(kappa=0.5), np.eye(2), width=32, depth=2, networks=2, method="weights", key=key)
    with pytest.raises(si.InputError, match="^architecture: a fit has no noise of other terms, got NoisyTerm"):
        si.prepare(si.models.full_path, data, architecture=NoisyMLP(kappa=0.5))
