"""Fits with latent layers: their sampler against NUTS on all latent variables, and what fits of them say."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_same_posterior
from helpers.internals import (
    PROPOSAL_FREEDOM,
    Assumptions,
    Proposal,
    _log_t,
    bridges_of,
    latent_mode,
    latent_time,
    logit_scale,
    outputs_of,
    problem_of,
    spread_growth,
)
from helpers.ranges import selected
from numpyro.infer import MCMC, NUTS
from scipy.stats import multivariate_t

import sdeinfer as si
from sdeinfer.infer import Metropolis, predict
from sdeinfer.layers import template
from sdeinfer.likelihood import any_transitions

FEEDFORWARD, KEY = template("feedforward"), jr.key(0)
SIZES = {"chains": 2, "draws": 300, "warmup": 200}


@pytest.fixture(scope="module")
def data():
    truth = si.ResidualFeedForward(gamma=0.5, c_plus=2.0, c_minus=-2.0)
    V0 = si.equicorrelated(tokens=2, correlation=0.2)
    return si.sample_networks(truth, V0, width=64, depth=12, networks=16, key=jr.key(1))


def thinned(data, k: int):
    return data.isel(layer=slice(None, None, k))


@pytest.mark.slow
def test_metropolis_draws_from_the_posterior_that_nuts_draws_from(data):
    """NUTS moves all innovations at once with the parameters."""
    model = si.models.thinned_path
    prepared = bridges_of(any_transitions(thinned(data, 3).isel(network=slice(4))), Assumptions(FEEDFORWARD))
    ours = Metropolis(**SIZES).sample(model, prepared, key=jr.key(2)).samples
    sizes = {"num_warmup": SIZES["warmup"], "num_samples": SIZES["draws"], "num_chains": SIZES["chains"]}
    chains = MCMC(NUTS(model, dense_mass=True), **sizes, chain_method="sequential", progress_bar=False)
    chains.run(jr.key(3), prepared)
    theirs = chains.get_samples(group_by_chain=True)
    for name in ("gamma", "c_gap"):
        assert_same_posterior(ours[name], theirs[name])


@pytest.mark.slow
def test_k_of_one_is_the_full_path(data):
    """Both laws have one mean and variance; the full path's is a Gaussian quasi-likelihood, and adjusted."""
    settings = {**SIZES, "predictions": 4, "architecture": FEEDFORWARD, "key": jr.key(0)}
    full, thin = si.fit(si.models.full_path, data, **settings), si.fit(si.models.thinned_path, data, **settings)
    for name in ("gamma", "c_gap"):
        a, b = full["posterior"][name], thin["posterior"][name]
        assert abs(float(a.mean() - b.mean())) < 0.5 * float(a.std())
        assert 0.75 < float(b.std() / a.std()) < 1.33


@pytest.fixture
def short_chunks(monkeypatch):
    """Of one length in all tests: it is compiled in."""
    monkeypatch.setattr("sdeinfer.infer._metropolis.BAR_ITERATIONS", 20)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize(
    ("model", "reduce"),
    [
        pytest.param(si.models.thinned_path, lambda data: thinned(data, 4), marks=pytest.mark.long),
        pytest.param(si.models.thinned_path, lambda data: data.isel(layer=[0, 3, 4, 9]), marks=pytest.mark.slow),
        pytest.param(si.models.terminal, lambda data: data, marks=pytest.mark.slow),
        pytest.param(si.models.outputs, lambda data: of_outputs(data, outputs=8), marks=pytest.mark.long),
    ],
    ids=["every-4th", "irregular", "terminal", "outputs"],
)
def test_a_fit_has_all_groups_and_is_judged(data, model, reduce, tmp_path):
    seen = reduce(data)
    short = {"chains": 1, "draws": 20, "warmup": 20, "predictions": 4}
    post = si.fit(model, seen, prior={"c_mean": 0.5}, **short, key=jr.key(0))
    expected = {"posterior", "sample_stats", "log_likelihood", "log_prior", "prior", "prior_predictive"}
    assert expected | {"posterior_predictive", "layers", "observed_data", "constant_data"} == set(post.children)
    assert set(post["posterior"].data_vars) == {"gamma", "c_gap", "c_mean", "c_plus", "c_minus"}
    assert post["log_likelihood"]["covariance"].sizes == {"chain": 1, "draw": 20, "network": 16}
    assert np.isfinite(post["log_likelihood"]["covariance"]).all()
    assert post.attrs["model"] == model.name
    assert 0.3 < float(post["sample_stats"]["acceptance_latent"].mean()) <= 1
    assert "innovations" not in post["posterior"]
    si.write(post, tmp_path / "post.nc")
    assert si.check(post).to_frame().shape[0] > 3
    if model is si.models.terminal:
        assert post["observed_data"].sizes["layer"] == 2


def test_independence_moves_have_the_density_of_a_t_law():
    rng, zero = np.random.default_rng(0), jnp.zeros(())
    mean, factor, points = rng.normal(size=3), np.tril(rng.normal(size=(3, 3))) + 2 * np.eye(3), rng.normal(size=(4, 3))
    proposal = Proposal(jnp.asarray(mean), jnp.asarray(factor), zero, zero, jnp.zeros(3), jnp.zeros((3, 3)))
    found = jax.jit(jax.vmap(_log_t, (None, 0)))(proposal, jnp.asarray(points))
    expected = multivariate_t(mean, factor @ factor.T, df=PROPOSAL_FREEDOM).logpdf(points)
    np.testing.assert_allclose(found - found[0], expected - expected[0], rtol=1e-10, atol=1e-12)


def test_outputs_are_predicted_as_what_is_observed_of_them(data):
    """The sample covariance of few outputs scatters about V by far more than V does."""
    seen = of_outputs(data)
    # (c₊, c₋) = (1, 1), which have no gap.
    parameters = {"gamma": 0.2, "c_plus": 1 + 1e-9, "c_minus": 1 - 1e-9}
    layers = np.tile(FEEDFORWARD.coordinates.unconstrained(parameters), (200, 1))
    predicted, of_layer = (
        predict(layers, shown, architecture=FEEDFORWARD, key=KEY)["covariance"].values[:, :, -1, 0, 0]
        for shown in (seen, seen.assign_attrs({"outputs": 1000}))
    )
    # χ²₃/3 has variance 2/3.
    assert 0.5 < predicted.var() - of_layer.var() < 0.85


@pytest.fixture
def attention(monkeypatch):
    """Networks whose modes are those at latent layers of zero: normals of one precision are not those of the other."""
    monkeypatch.setattr(
        "sdeinfer.infer._latent_densities.draw_latent",
        lambda model, prepared, key: jnp.zeros((len(prepared), *prepared.innovations)),
    )
    V0 = si.equicorrelated(tokens=2, correlation=0.0, norm=1.1)
    truth = si.ShapedAttention(gamma=0.6, tau0=0.5)
    return si.sample_networks(truth, V0, width=128, depth=16, networks=16, key=jr.key(1))


@pytest.mark.long
def test_single_precision_finds_the_same_mode(attention):
    model, modes = si.models.thinned_path, []
    for x64 in (True, False):
        with jax.enable_x64(x64):
            prepared = bridges_of(any_transitions(thinned(attention, 8)), Assumptions(template("attention")))
            modes.append(latent_mode(model, prepared, np.ones(len(prepared), bool), key=jr.key(0)))
    double, single = modes
    assert (np.abs(single.x - double.x) < 0.3 * double.sd).all()


def test_the_range_counts_what_the_spread_may_grow_to(attention):
    """By two standard deviations of log V over the latent layers; the rule still looks at the start alone."""
    data, seen = attention, thinned(attention, 8)
    problem = problem_of(si.models.thinned_path, Assumptions(template("attention")))
    assert (spread_growth(latent_time(problem.transitions(data)), 0.9) == 1.0).all()
    growth = spread_growth(latent_time(problem.transitions(seen)), 0.9)
    np.testing.assert_allclose(growth, np.exp(2 * np.sqrt(2 * 0.9 * 7 / 128)))
    path, found, _ = selected(problem, seen, 0.3)
    used, scale = path.used, logit_scale(seen)
    np.testing.assert_array_equal(used, scale <= scale[used].max())
    assert scale[used].max() < 0.3 * found["pilot_tau0"]


def test_the_last_layer_alone_is_a_thinned_path(data):
    found = si.prepare(si.models.terminal, data, architecture=FEEDFORWARD)
    expected = si.prepare(si.models.thinned_path, data.isel(layer=[0, -1]), architecture=FEEDFORWARD)
    assert len(found) == 16
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(x, y)


def test_outputs_are_reduced_to_their_covariance():
    rng = np.random.default_rng(0)
    X, V0 = rng.normal(size=(5, 3, 7)), np.eye(3)
    data = si.observe_outputs(X, V0, width=32, depth=9, architecture="mlp", truth={"c_plus": 1.0, "c_minus": 0.0})
    assert outputs_of(data) == 7
    np.testing.assert_array_equal(data["layer"], [0, 9])
    np.testing.assert_allclose(data["covariance"].values[2, 1], X[2] @ X[2].T / 7)
    assert data.attrs["truth_c_plus"] == 1.0


def of_outputs(data, **changes):
    return si.sample_outputs(data, **{"outputs": 3, "key": KEY} | changes)


def observed(X, tokens: int = 3):
    return si.observe_outputs(X, np.eye(tokens), width=9, depth=2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda data: si.fit(si.models.full_path, thinned(data, 2), key=KEY), "layer: the full path needs every"),
        (lambda data: si.fit(si.models.outputs, data, key=KEY), "outputs: the data are not of outputs"),
        (lambda data: si.fit(si.models.terminal, of_outputs(data), key=KEY), "outputs: the data hold covariances of"),
        (lambda data: of_outputs(data, outputs=0), "outputs: a whole number of at least 1 is needed, got 0"),
        (lambda data: of_outputs(data.isel(layer=slice(1, 3))), "layer: the initial"),
        (lambda data: observed(np.ones((2, 3))), "outputs: shape"),
        (lambda data: observed(np.ones((2, 3, 4)), 2), "initial: shape"),
        (lambda data: observed(np.full((2, 3, 4), np.nan)), "24 entries"),
    ],
)
def test_bad_input_is_named(data, call, message):
    with pytest.raises(si.InputError, match=message):
        call(data)
