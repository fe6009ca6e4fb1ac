"""First looks: normal laws near a posterior."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
import xarray as xr
from arviz_stats.base import array_stats
from budget import assert_estimate, assert_within, mean_and_error

import sdeinfer as si
from sdeinfer.infer import NUTS, posterior_mode
from sdeinfer.infer._approximate import draw, pareto_k
from sdeinfer.likelihood import CovariancePath
from sdeinfer.observation import covariance_dataset

DRAWS = 4000
NAMELESS = covariance_dataset(np.arange(1.0, 7.0).reshape(2, 3, 1, 1), width=64)
"""Covariances, at which the programs below do not look."""

X = np.array([-2.0, -1.0, 0.5, 1.0, 3.0])
Y = np.array([-1.1, 0.4, 0.9, 1.2, 2.8])
NOISE = 0.3


def line(points):
    """Linear regression: its posterior is normal. The sites are not in alphabetical order."""
    slope = numpyro.sample("slope", dist.Normal())
    intercept = numpyro.sample("intercept", dist.Normal())
    numpyro.deterministic("at_two", intercept + 2 * slope)
    with numpyro.plate("point", len(X)):
        numpyro.sample("y", dist.Normal(intercept + slope * points[0], NOISE), obs=points[1])


def scale(points):
    """A scale with a long tail to the right."""
    numpyro.sample("scale", dist.HalfCauchy(1.0))


def unbounded(points):
    """A density that grows without end."""
    x = numpyro.sample("x", dist.Normal())
    numpyro.factor("no_mode", x**2 / 2 + x)


@functools.cache
def program(model):
    """A program of points, beside networks whose layers are known: their density is a constant."""

    def beside_networks(path):
        model(jnp.array([X, Y]))
        numpyro.sample("covariance", CovariancePath(si.ShapedMLP(1.0, -1.0), path), obs=path.observed)

    return beside_networks


def draws_of(post: xr.DataTree, *names: str) -> np.ndarray:
    return np.stack([post["posterior"][name].values[0] for name in names], axis=-1)


@functools.cache
def approximated(model):
    return si.approximate(program(model), NAMELESS, draws=DRAWS, key=jr.key(0))


def test_a_normal_posterior_is_found_exactly():
    design = np.stack([X, np.ones_like(X)], axis=1)
    covariance = np.linalg.inv(np.eye(2) + design.T @ design / NOISE**2)
    mean = covariance @ design.T @ Y / NOISE**2
    post = approximated(line)
    drawn = draws_of(post, "slope", "intercept")
    # Standard normals, if it is this law: two means, and two variances and a covariance.
    z = np.linalg.solve(np.linalg.cholesky(covariance), (drawn - mean).T).T
    products = np.stack([z[:, 0] ** 2 - 1, z[:, 1] ** 2 - 1, z[:, 0] * z[:, 1]], axis=1)
    average, error = mean_and_error(np.concatenate([z, products], axis=1))
    assert_within(average / error)
    np.testing.assert_allclose(draws_of(post, "at_two")[:, 0], drawn @ [2, 1], rtol=1e-12)


def test_a_skewed_posterior_has_a_larger_k():
    # Weights of a normal posterior are all the same; those of one with heavier tails have no bound.
    assert approximated(line).attrs["pareto_k"] < 0 < approximated(scale).attrs["pareto_k"]


@pytest.mark.slow
def test_weights_make_draws_of_nuts():
    """Means and variances of the posterior: importance weights turn draws of the normal law into those of NUTS."""
    model, V0 = si.models.full_path, si.equicorrelated(tokens=3, correlation=0.2, norm=1.2)
    truth = si.ResidualFeedForward(0.6, 2.0, -2.0)
    data = si.sample_networks(truth, V0, width=128, depth=16, networks=256, key=jr.key(3))
    pooled = model.pool(si.prepare(model, data, law="limit", largest_logit=np.inf))
    normal = posterior_mode(model, pooled)
    drawn, _, log_weights = jax.tree.map(np.asarray, draw(model, pooled, normal, draws=DRAWS, key=jr.key(1)))
    assert pareto_k(log_weights) < 0.7
    weights = np.exp(log_weights - log_weights.max())
    weights /= weights.sum()
    chains = NUTS(chains=2, draws=1000, warmup=300).sample(model, pooled, key=jr.key(2)).samples
    estimates, expected, errors = [], [], []
    for name in ("gamma", "c_gap", "c_mean"):
        centre = chains[name].mean()
        for power in (1, 2):
            x, y = (drawn[name] - centre) ** power, (np.asarray(chains[name]) - centre) ** power
            estimates.append(weights @ x)
            expected.append(y.mean())
            of_weights = np.sqrt(weights**2 @ (x - estimates[-1]) ** 2)
            errors.append(np.hypot(of_weights, y.std() / np.sqrt(array_stats.ess(y, method="mean"))))
    assert_estimate(estimates, expected, errors)


def test_the_result_is_a_small_fit(fitted, networks):
    post = si.approximate(si.models.full_path, networks, draws=200, key=jr.key(0))
    assert set(post.children) == {"posterior", "layers", "observed_data", "constant_data"}
    assert set(post["posterior"].data_vars) == set(fitted["posterior"].data_vars)
    assert dict(post["posterior"].sizes) == {"chain": 1, "draw": 200}
    for group in ("observed_data", "constant_data"):
        xr.testing.assert_identical(post[group].to_dataset(), fitted[group].to_dataset())
    same = set(fitted.attrs) - {"created_at"}
    assert {name: post.attrs[name] for name in same} == {name: fitted.attrs[name] for name in same}
    assert set(post.attrs) == {*fitted.attrs, "pareto_k"}
    verdicts = si.check(post).to_frame()
    assert verdicts.loc["Pareto k", "value"] == post.attrs["pareto_k"]
    assert "R-hat" not in verdicts.index
    assert list(si.distance(post, fitted).index) == ["gamma", "tau0", "c_gap", "c_plus", "c_minus"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"law": "both"}, "law: must be one of finite-width, limit, got 'both'"),
        ({"draws": 99}, "draws: at least 100 are needed for the Pareto k, got 99"),
        ({"architecture": "rnn"}, "architecture: must be one of transformer"),
        ({"largest_logit": 0.0}, "largest_logit: must be positive"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_approximated_is_refused(networks, options, message):
    with pytest.raises(ValueError, match=message):
        si.approximate(si.models.full_path, networks, key=jr.key(0), **options)


def test_latent_layers_groups_and_a_posterior_without_curvature_are_refused(networks):
    with pytest.raises(si.InputError, match="model: thinned_path has latent layers, .* use fit"):
        si.approximate(si.models.thinned_path, networks, key=jr.key(0))
    grouped = NAMELESS.assign_coords(group=("network", [0, 1]))
    with pytest.raises(si.InputError, match="model: hierarchical samples gamma_offset, .*, several numbers each; use"):
        si.approximate(si.models.hierarchical, grouped, architecture="feedforward", law="limit", key=jr.key(0))
    with pytest.raises(si.InputError, match="the posterior is not concave at its mode"):
        si.approximate(program(unbounded), NAMELESS, key=jr.key(0))
