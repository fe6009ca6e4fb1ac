import dataclasses
import warnings

import arviz_stats
import jax
import jax.random as jr
import numpy as np
import pytest
import xarray as xr
from conftest import WARMUP
from likelihood.paths import log_prob

import sdeinfer as si
from sdeinfer.infer import NUTS, predict, problem_of
from sdeinfer.layers import Architecture
from sdeinfer.likelihood import USED, Assumptions, observed_path, path_statistics
from sdeinfer.observation import covariance_dataset

FULL_PATH = si.models.full_path
TRANSFORMER = Assumptions(Architecture("transformer"))


def prepared_as_in(post, data):
    """The statistics of the transitions that a fit of a transformer used."""
    assumptions = dataclasses.replace(TRANSFORMER, law=post.attrs["law"])
    return problem_of(FULL_PATH, assumptions).prepare(data.assign({USED: post["constant_data"][USED]})).each


def test_the_result_has_every_group_that_arviz_looks_for(fitted, networks):
    assert set(fitted.children) == {
        "posterior",
        "prior",
        "posterior_predictive",
        "prior_predictive",
        "sample_stats",
        "log_likelihood",
        "adjusted_log_likelihood",
        "log_prior",
        "layers",
        "observed_data",
        "constant_data",
    }
    names = {"gamma", "tau0", "c_gap", "c_mean", "c_plus", "c_minus"}
    assert set(fitted["posterior"].data_vars) == set(fitted["prior"].data_vars) == names
    assert fitted["log_likelihood"]["covariance"].dims == ("chain", "draw", "network")
    assert fitted["log_likelihood"].sizes == fitted["adjusted_log_likelihood"].sizes
    assert fitted["log_likelihood"].sizes["network"] == networks.sizes["network"]
    assert fitted.attrs["architecture"] == "transformer"
    assert fitted.attrs["truth_gamma"] == 0.6
    xr.testing.assert_equal(
        fitted["observed_data"]["covariance"].drop_vars("width", errors="ignore"),
        networks["covariance"].drop_vars("width"),
    )


def test_leave_one_network_out_and_power_scaling_work(fitted):
    # The weights are those of the likelihood that was sampled, the densities those of the data.
    adjusted = fitted.assign({"log_likelihood": fitted["adjusted_log_likelihood"]})
    log_weights, pareto_k = adjusted["log_likelihood"]["covariance"].azstats.psislw(dim=["chain", "draw"])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Estimated shape parameter of Pareto", UserWarning)
        assert np.isfinite(arviz_stats.loo(fitted, log_weights=log_weights, pareto_k=pareto_k).elpd)
    assert np.isfinite(arviz_stats.psense(fitted)["gamma"].values).all()


def test_log_likelihood_and_prior_are_those_of_the_draws(fitted, networks):
    path = prepared_as_in(fitted, networks)
    draw = fitted["posterior"].to_dataset().isel(chain=1, draw=7)
    drawn = {name: draw[name].item() for name in ("gamma", "tau0", "c_plus", "c_minus")}
    of_data = path.adjustment.of_densities()
    for adjustment, group in ((of_data, "log_likelihood"), (path.adjustment, "adjusted_log_likelihood")):
        layer, prepared = adjustment(si.ShapedTransformer(**drawn)), path.with_adjustment(adjustment)
        expected = log_prob(layer, prepared, "finite-width")
        np.testing.assert_allclose(fitted[group]["covariance"].isel(chain=1, draw=7), expected, rtol=1e-10)
    tau0 = draw["tau0"].item()
    log_normal = -np.log(tau0) - np.log(tau0) ** 2 / 2 - np.log(2 * np.pi) / 2
    np.testing.assert_allclose(fitted["log_prior"]["tau0"].isel(chain=1, draw=7), log_normal, rtol=1e-10)


def test_slopes_come_ordered_with_their_gap(fitted):
    post = fitted["posterior"]
    assert (post["c_plus"] >= post["c_minus"]).all()
    np.testing.assert_allclose(post["c_plus"] - post["c_minus"], post["c_gap"], rtol=1e-10)


def test_one_key_gives_one_posterior(networks):
    prepared = problem_of(FULL_PATH, TRANSFORMER).prepare(networks).each
    sampler = NUTS(chains=2, draws=30, warmup=WARMUP)
    first, second, other = (sampler.sample(FULL_PATH, prepared, key=jr.key(seed)) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.samples["gamma"], second.samples["gamma"])
    assert (first.samples["gamma"] != other.samples["gamma"]).all()


@pytest.mark.slow
def test_chunks_do_not_show(networks, monkeypatch):
    """Iterations run in chunks for the progress bar; the draws do not depend on where they end."""
    prepared, sampler = (
        path_statistics(observed_path(networks), assumptions=TRANSFORMER),
        NUTS(chains=2, draws=40, warmup=60),
    )
    whole = sampler.sample(FULL_PATH, prepared, key=jr.key(5))
    monkeypatch.setattr("sdeinfer.infer._samplers.CHUNK", 17)
    parts = sampler.sample(FULL_PATH, prepared, key=jr.key(5))
    np.testing.assert_array_equal(whole.samples["tau0"], parts.samples["tau0"])
    np.testing.assert_array_equal(whole.statistics["n_steps"], parts.statistics["n_steps"])


def test_a_second_fit_of_one_shape_compiles_nothing(networks, caplog):
    short = {"chains": 1, "draws": 20, "warmup": WARMUP, "predictions": 20}
    si.fit(si.models.full_path, networks, **short, key=jr.key(2))
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        si.fit(si.models.full_path, networks, **short, key=jr.key(3))
    compiled = [record.getMessage() for record in caplog.records if "advance_compiled" in record.getMessage()]
    assert not [message for message in compiled if "Compiling" in message]


@pytest.mark.parametrize(
    "architecture", ["feedforward", *(pytest.param(name, marks=pytest.mark.slow) for name in ("mlp", "attention"))]
)
def test_every_architecture_fits_its_own_networks(architecture):
    kind = si.layers.ARCHITECTURES[architecture]
    truth = {"gamma": 0.6, "tau0": 1.0, "c_plus": 1.0, "c_minus": -3.0}
    truth = {name: value for name, value in truth.items() if name in kind.__dataclass_fields__}
    V0 = si.equicorrelated(tokens=3, correlation=0.1, norm=1.4)
    data = si.sample_networks(kind(**truth), V0, width=96, depth=6, networks=8, key=jr.key(1))
    post = si.fit(si.models.full_path, data, chains=2, draws=50, warmup=WARMUP, predictions=4, key=jr.key(2))
    assert post.attrs["architecture"] == architecture
    assert set(truth) <= set(post["posterior"].data_vars)
    assert set(post["posterior"].data_vars) - set(truth) <= {"c_gap", "c_mean"}


def test_predictions_start_at_the_observed_covariances_of_networks_of_any_width(networks):
    mixed = networks.assign_coords(width=("network", np.where(np.arange(24) < 10, 96, 48)))
    parameters = {"gamma": np.array([0.3, 0.6]), "tau0": np.ones(2), "c_plus": np.zeros(2), "c_minus": -np.ones(2)}
    kind = Architecture("transformer")
    layers = np.moveaxis(kind.coordinates.unconstrained(parameters), 0, -1)
    predicted = predict(layers, mixed, architecture=kind, key=jr.key(1))
    start = predicted["covariance"].isel(layer=0)
    for draw in range(2):
        np.testing.assert_allclose(start.isel(draw=draw), networks["covariance"].isel(layer=0), atol=1e-12)
    assert predicted.attrs["exploded"] == 0
    spread = predicted["covariance"].isel(layer=-1, token_a=0, token_b=0).std(dim="network")
    assert spread[1] > spread[0]


def test_data_that_cannot_identify_tau0_are_refused():
    data = covariance_dataset(np.arange(1.0, 7.0).reshape(2, 3, 1, 1), width=64)
    with pytest.raises(ValueError, match="tau0, which one token cannot identify"):
        si.fit(si.models.full_path, data, architecture="transformer", key=jr.key(0))
    V0, alone = si.equicorrelated(tokens=2, correlation=0.2), si.Pattern(prompts=(1, 1))
    layer = si.ShapedAttention(gamma=0.5, tau0=1.0, pattern=alone)
    data = si.sample_networks(layer, V0, width=32, depth=2, networks=2, key=jr.key(0))
    with pytest.raises(ValueError, match="pattern: attention has tau0, which tokens that attend to one token each"):
        si.fit(si.models.full_path, data, key=jr.key(0))


def test_unnamed_and_unknown_architectures_are_refused(networks):
    nameless = networks.copy()
    del nameless.attrs["architecture"]
    with pytest.raises(ValueError, match="architecture: the data do not name it"):
        si.fit(si.models.full_path, nameless, key=jr.key(0))
    with pytest.raises(ValueError, match="architecture: must be one of transformer"):
        si.fit(si.models.full_path, networks, architecture="rnn", key=jr.key(0))


def test_skipped_layers_and_singular_covariances_are_refused(networks):
    with pytest.raises(ValueError, match="the full path needs every layer, got layers 0, 2, 4, 6"):
        si.fit(si.models.full_path, networks.isel(layer=slice(None, None, 2)), key=jr.key(0))
    singular = networks.copy(deep=True)
    singular["covariance"][5, 3] = np.ones((3, 3))
    with pytest.raises(ValueError, match="network 5, layer 3: singular"):
        si.fit(si.models.full_path, singular, key=jr.key(0))
    huge = networks.copy(deep=True)
    huge["covariance"] *= 1e200
    with pytest.raises(ValueError, match=r"network \d+: too large or too small for its law"):
        si.fit(si.models.full_path, huge, key=jr.key(0))


def test_a_fit_says_by_which_law_and_of_which_layer_it_is(fitted, networks):
    assert fitted.attrs["law"] == "finite-width"
    kind = Architecture("transformer", heads=2, output_projection=True, expansion=4)
    short = {"chains": 2, "draws": 20, "warmup": 20, "predictions": 2}
    post = si.fit(si.models.full_path, networks, architecture=kind, law="limit", **short, key=jr.key(2))
    assert post.attrs["law"] == "limit"
    assert {name: post.attrs[name] for name in kind.attributes()} == kind.attributes()
    path = prepared_as_in(post, networks)
    draw = post["posterior"].to_dataset().isel(chain=0, draw=3)
    expected = log_prob(kind.layer(**{name: draw[name].item() for name in kind.parameters}), path)
    np.testing.assert_allclose(post["log_likelihood"]["covariance"].isel(chain=0, draw=3), expected, rtol=1e-10)


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_law_is_refused(networks):
    with pytest.raises(ValueError, match="law: must be one of finite-width, limit"):
        si.fit(si.models.full_path, networks, law="exact", key=jr.key(0))


def test_networks_of_several_widths_are_fitted_together(networks):
    """Each network's own likelihood, though networks of one width are pooled while sampling."""
    mixed = networks.assign_coords(width=("network", np.where(np.arange(24) % 3 == 0, 48, 96)))
    path = path_statistics(observed_path(mixed), assumptions=TRANSFORMER)
    np.testing.assert_array_equal(path.widths, [48, 96])
    result = NUTS(chains=2, draws=20, warmup=20).sample(FULL_PATH, path, key=jr.key(3))
    parameters = [result.samples[name][1, 5] for name in ("gamma", "tau0", "c_plus", "c_minus")]
    layer = si.ShapedTransformer(*map(float, parameters))
    expected = log_prob(layer, path, "finite-width")
    np.testing.assert_allclose(result.log_likelihood["covariance"][1, 5], expected, rtol=1e-10)
    # The joint density of the sampler is that of the pooled data.
    prior = sum(float(result.log_prior[name][1, 5]) for name in result.log_prior)
    gap, gamma, tau0 = (float(result.samples[name][1, 5]) for name in ("c_gap", "gamma", "tau0"))
    volume = np.log(gap) + np.log(gamma) + np.log1p(-gamma) + np.log(tau0)  # of the unconstrained parameters
    np.testing.assert_allclose(result.statistics["lp"][1, 5], expected.sum() + prior + volume, rtol=1e-10)
