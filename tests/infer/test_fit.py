import warnings

import arviz_stats
import jax
import jax.random as jr
import numpy as np
import pytest
import xarray as xr
from helpers.cases import layer_of
from helpers.fits import WARMUP, AtTheMode
from helpers.internals import USED, Assumptions, attributes_of_layer, problem_of
from likelihood.paths import log_prob

import sdeinfer as si
from sdeinfer.layers import template

FULL_PATH = si.models.full_path


def prepared_as_in(post, data):
    """The statistics of the transitions that a fit used."""
    assumptions = Assumptions(template(post.attrs["architecture"]), post.attrs["law"])
    problem, used = problem_of(FULL_PATH, assumptions), data.assign({USED: post["constant_data"][USED]})
    return problem.reduced(used, problem.transitions(used))


def test_the_result_has_every_group_that_arviz_looks_for(fitted, networks):
    of_draws = {"posterior", "sample_stats", "log_likelihood", "adjusted_log_likelihood", "log_prior", "layers"}
    predicted = {"prior", "prior_predictive", "posterior_predictive"}
    assert set(fitted.children) == of_draws | predicted | {"observed_data", "constant_data"}
    names = {"gamma", "tau0", "c_gap", "c_mean", "c_plus", "c_minus"}
    assert set(fitted["posterior"].data_vars) == set(fitted["prior"].data_vars) == names
    assert fitted["log_likelihood"]["covariance"].dims == ("chain", "draw", "network")
    assert fitted["log_likelihood"].sizes == fitted["adjusted_log_likelihood"].sizes
    assert fitted["log_likelihood"].sizes["network"] == networks.sizes["network"]
    assert fitted.attrs["architecture"] == "transformer"
    assert fitted.attrs["truth_gamma"] == 0.6
    xr.testing.assert_equal(
        fitted["observed_data"].to_dataset().reset_coords()["covariance"], networks["covariance"].drop_vars("width")
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
    prior = {name: values.item() for name, values in fitted["log_prior"].isel(chain=1, draw=7).data_vars.items()}
    gamma, tau0, gap = (draw[name].item() for name in ("gamma", "tau0", "c_gap"))
    np.testing.assert_allclose(prior["tau0"], -np.log(tau0) - np.log(tau0) ** 2 / 2 - np.log(2 * np.pi) / 2, rtol=1e-10)
    # The joint density of the sampler is that of the pooled data in the unconstrained parameters.
    volume = np.log(gamma * (1 - gamma) * tau0 * gap)
    joint = fitted["sample_stats"]["lp"].isel(chain=1, draw=7)
    np.testing.assert_allclose(joint, expected.sum() + sum(prior.values()) + volume, rtol=1e-10)


def test_one_key_gives_one_posterior_and_a_second_fit_of_one_shape_compiles_nothing(fitted, networks, caplog):
    """The second fit has fewer chains and draws: chains do not depend on each other, nor on the chunks they run in."""
    short = {"chains": 1, "draws": 20, "warmup": WARMUP, "predictions": 20}
    si.fit(FULL_PATH, networks, **short | {"draws": 1}, key=jr.key(4))  # other tests may have cleared JAX's caches
    with jax.log_compiles(), caplog.at_level("WARNING", "jax"):
        same = si.fit(FULL_PATH, networks, **short, key=jr.key(3))
    compiled = [record.getMessage() for record in caplog.records if "advance_compiled" in record.getMessage()]
    assert not [message for message in compiled if "Compiling" in message]
    first = fitted["posterior"]["gamma"].isel(chain=[0], draw=slice(20))
    np.testing.assert_array_equal(same["posterior"]["gamma"], first)


ALONE = si.Pattern(prompts=(1, 1, 1)).attributes()


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda data: data.isel(token_a=[0], token_b=[0]), {}, "tau0, which one token cannot identify"),
        (lambda data: data.assign_attrs(ALONE), {}, "pattern: transformer has tau0, which tokens that attend to one"),
        (lambda data: data.drop_attrs(), {}, "architecture: the data do not name it"),
        (lambda data: data, {"architecture": "rnn"}, "architecture: must be one of transformer"),
        (lambda data: data, {"law": "exact"}, "law: must be one of finite-width, limit"),
        (lambda data: data, {"predictive": "exact"}, "predictive: must be one of finite-width, limit, got 'exact'"),
        *((lambda data: data, {"largest_logit": x}, "largest_logit: must be positive") for x in (0.0, -1.0, np.nan)),
        (lambda data: data.isel(layer=slice(None, None, 2)), {}, "full path needs every layer, got layers 0, 2, 4, 6"),
        (
            lambda data: data.assign(covariance=data["covariance"].where((data.network != 5) | (data.layer != 0), 1.0)),
            {},
            "network 5, layer 0: singular",
        ),
        (
            lambda data: data.assign(covariance=1e200 * data["covariance"]),
            {},
            r"network \d+: too large or too small for its law",
        ),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_fitted_is_refused(networks, change, options, message):
    with pytest.raises(ValueError, match=message):
        si.fit(FULL_PATH, change(networks), key=jr.key(0), **options)


def test_a_fit_says_by_which_law_and_of_which_layer_it_is(fitted, networks):
    """Also of networks of several widths: each has its own likelihood, though those of one width are pooled."""
    assert fitted.attrs["law"] == "finite-width"
    mixed = networks.assign_coords(width=("network", np.where(np.arange(24) % 3 == 0, 48, 96)))
    kind = template("transformer")
    sampler = AtTheMode(chains=2, draws=20)
    post = si.fit(FULL_PATH, mixed, law="limit", sampler=sampler, predictions=2, key=jr.key(2))
    assert post.attrs["law"] == "limit"
    assert {name: post.attrs[name] for name in attributes_of_layer(kind)} == attributes_of_layer(kind)
    path = prepared_as_in(post, mixed)
    np.testing.assert_array_equal(path.widths, [48, 96])
    draw, densities = (post[group].to_dataset().isel(chain=1, draw=5) for group in ("posterior", "log_likelihood"))
    expected = log_prob(layer_of(kind, **{name: draw[name].item() for name in kind.declared()}), path)
    np.testing.assert_allclose(densities["covariance"], expected, rtol=1e-10)
