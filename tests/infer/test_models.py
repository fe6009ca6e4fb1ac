"""Models as NumPyro sees them: what they take, what they refuse, and that a program of a user is one of them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from helpers.budget import assert_estimate, assert_same_distribution, mean_and_error
from helpers.internals import (
    Assumptions,
    architecture_of,
    as_model,
    layer_at,
    observed_path,
    path_statistics,
    posterior_mode,
    potential_and_slope,
)
from numpyro import handlers
from numpyro.infer import MCMC, NUTS, Predictive
from numpyro.infer.inspect import render_model
from numpyro.infer.util import log_density

import sdeinfer as si
from sdeinfer.likelihood import CovariancePath
from sdeinfer.models import full_path

FEEDFORWARD = si.layers.template("feedforward")
LAYER = {"gamma": 0.6, "c_plus": 1.0, "c_minus": -1.0}


@pytest.fixture(scope="module")
def data():
    V0 = si.equicorrelated(tokens=2, correlation=0.2, norm=1.0)
    layer = si.ResidualFeedForward(**LAYER)
    return si.sample_networks(layer, V0, width=48, depth=6, networks=5, key=jr.key(0))


@pytest.fixture(scope="module", params=["limit", "finite-width"])
def path(request, data):
    return path_statistics(observed_path(data), assumptions=Assumptions(FEEDFORWARD, request.param))


@functools.partial(jax.jit, static_argnums=0)
def density(model, path, at):
    return log_density(model, (path,), {}, at)[0]


def own_program(path):
    gamma = numpyro.sample("gamma", dist.Uniform(0, 1))
    c_gap = numpyro.sample("c_gap", dist.HalfNormal(np.sqrt(8)))
    c_mean = numpyro.sample("c_mean", dist.Normal(0, np.sqrt(2)))
    with numpyro.plate("network", path.networks):
        layer = si.ResidualFeedForward(gamma=gamma, c_plus=c_mean + c_gap / 2, c_minus=c_mean - c_gap / 2)
        numpyro.sample("covariance", CovariancePath(layer, path), obs=path.observed)


@pytest.mark.one_case("finite-width")
def test_a_program_of_a_user_has_the_density_of_the_packages_model(path):
    at = {"gamma": 0.5, "c_gap": 2.5, "c_mean": 0.3}
    ours, theirs = (density(model, path, at) for model in (full_path, own_program))
    np.testing.assert_allclose(theirs, ours, rtol=1e-12)


@pytest.mark.one_case("finite-width")
def test_one_layer_for_each_network_is_the_sum_over_networks_alone(path, data):
    gammas = np.linspace(0.3, 0.8, path.networks)

    @jax.jit
    def log_prob(gamma):
        layer = si.ResidualFeedForward(gamma=gamma, c_plus=1.0, c_minus=-1.0)
        return CovariancePath(layer, path).log_prob(path.weights)

    alone = [log_prob(gamma)[number] for number, gamma in enumerate(gammas)]
    np.testing.assert_allclose(log_prob(gammas), alone, rtol=1e-12)


def test_a_layer_of_another_number_of_networks_is_refused(path):
    layers = si.ResidualFeedForward(gamma=jnp.full(3, 0.5), c_plus=1.0, c_minus=-1.0)
    with pytest.raises(si.InputError, match="gamma: one value, or one for each of 5 networks, is needed"):
        CovariancePath(layers, path)


@pytest.mark.usefixtures("unchecked")
def test_what_is_no_model_of_paths_is_refused(data):
    with pytest.raises(si.InputError, match="full_path takes prepared data, not a Dataset"):
        MCMC(NUTS(full_path), num_warmup=1, num_samples=1, progress_bar=False).run(jr.key(0), data)
    with pytest.raises(si.InputError, match="a NumPyro program is needed, .* got 'full_path'"):
        as_model("full_path")  # pyright: ignore[reportArgumentType]

    def nothing_observed(path):
        numpyro.sample("gamma", dist.Uniform(0, 1))

    with pytest.raises(si.InputError, match="nothing_observed must observe one si.likelihood.CovariancePath"):
        si.fit(nothing_observed, data, key=jr.key(0))
    for options in ({"architecture": "mlp"}, {"prior": {"gamma": 0.5}}):
        with pytest.raises(si.InputError, match="own_program is your own program, which"):
            si.fit(own_program, data, **options, key=jr.key(0))


@pytest.mark.long
def test_networks_are_sampled_from_their_first_covariances(path, data):
    """As the chain draws them: mean and variance of log det V after the last layer, of 400 replicates a network."""
    layer = si.ResidualFeedForward(**LAYER)
    drawn = CovariancePath(layer, path).sample(jr.key(1), (400,))
    assert drawn.shape == (400, 5, 7, 2, 2)
    np.testing.assert_allclose(
        drawn[:, :, 0], np.broadcast_to(data["covariance"].values[:, 0], (400, 5, 2, 2)), rtol=1e-6
    )
    many = si.sample_networks(layer, data["covariance"].values[0, 0], width=48, depth=6, networks=2000, key=jr.key(2))
    expected = np.linalg.slogdet(many["covariance"].values[:, -1])[1]
    found = np.linalg.slogdet(np.asarray(drawn[:, :, -1]))[1].ravel()
    assert_same_distribution(found, expected)
    (one, its_error), (other, error) = (mean_and_error((x - x.mean()) ** 2) for x in (found, expected))
    assert_estimate(one, other, np.hypot(its_error, error))


@pytest.mark.one_case("finite-width")
def test_numpyros_predictive_samples_what_is_hidden(path):
    replicates = Predictive(full_path, num_samples=3)(jr.key(0), path.unobserved())
    assert replicates["covariance"].shape == (3, 5, 7, 2, 2)
    seen = Predictive(full_path, num_samples=3)(jr.key(0), path)
    assert seen["covariance"].shape == (3, *path.weights.shape)
    with pytest.raises(si.InputError, match="not from pooled statistics"):
        Predictive(full_path, num_samples=1)(jr.key(0), path.pooled().unobserved())


@pytest.mark.one_case("finite-width")
def test_sites_of_each_network_have_modes_of_their_own(path):
    """A random effect of each network: the slope of the potential is zero in all of them, at different values."""

    def effects(path):
        gamma = numpyro.sample("gamma", dist.Uniform(0, 1))
        with numpyro.plate("network", path.networks):
            effect = numpyro.sample("effect", dist.Normal(0, 0.5))
            layer = si.ResidualFeedForward(gamma=gamma * jnp.exp(-(effect**2)), c_plus=jnp.exp(effect), c_minus=-1.0)
            numpyro.sample("covariance", CovariancePath(layer, path), obs=path.observed)

    model = si.models.each_network(effects)
    own = dataclasses.replace(path.by_network(), assumptions=Assumptions(None, path.assumptions.law))
    mode = posterior_mode(model, own)
    at = mode.by_site(mode.x)
    assert at["effect"].shape == (5,)
    assert np.ptp(at["effect"]) > 1e-3
    _, slope = potential_and_slope(model, own, at)
    np.testing.assert_allclose(slope["effect"], 0.0, atol=1e-2)
    assert layer_at(model, own, mode).u.shape == (5, 3)


def test_networks_are_pooled_where_a_program_allows_it(path):
    assert as_model(own_program).pool(path).networks == 1
    declared = si.models.each_network(own_program)
    assert declared.pool(path) is path
    assert as_model(functools.partial(declared)).pool(path) is path


@pytest.mark.one_case("finite-width")
def test_render_model_and_handlers_see_the_sites(path):
    for program in (full_path, own_program):
        source = render_model(program, model_args=(path,)).source
        assert all(name in source for name in ("gamma", "c_gap", "covariance", "network"))
    trace = handlers.trace(handlers.seed(full_path, jr.key(0))).get_trace(path)
    assert list(trace) == ["gamma", "c_gap", "c_mean", "c_plus", "c_minus", "network", "covariance"]
    with handlers.do(data={"gamma": 0.25}):
        moved = handlers.trace(handlers.seed(full_path, jr.key(0))).get_trace(path)
    assert float(moved["covariance"]["fn"].layer.gamma) == 0.25


@pytest.mark.parametrize(
    "given", ["transformer", si.layers.template("transformer", heads=2), si.ShapedTransformer(**LAYER, tau0=1.0)]
)
def test_the_attention_pattern_is_that_of_the_data_unless_an_architecture_has_its_own(given, data):
    masked = data.assign_attrs(si.CAUSAL.attributes())
    assert architecture_of(masked, given).pattern == si.CAUSAL
    assert architecture_of(data, given).pattern.everything
    own = si.Pattern(prompts=(1, 1))
    assert architecture_of(masked, si.layers.template("attention", pattern=own)).pattern == own
    assert architecture_of(masked, FEEDFORWARD) == FEEDFORWARD
