"""Results as ArviZ sees them: its functions of predictions, posteriors that were cut, and files."""

import dataclasses

import arviz as az
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import xarray as xr
from arviz_stats.base.array import array_stats
from helpers.fits import AtTheMode
from helpers.internals import last_layer, summary
from matplotlib import pyplot

import sdeinfer as si
from sdeinfer.diagnostics import at_last_layer
from sdeinfer.observation import read_posterior
from sdeinfer.report import figures

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::RuntimeWarning", "ignore::FutureWarning")


@pytest.fixture(scope="module")
def data():
    layer = si.ResidualFeedForward(gamma=0.6, c_plus=1.0, c_minus=-1.0)
    V0 = si.equicorrelated(tokens=2, correlation=0.2, norm=1.0)
    return si.sample_networks(layer, V0, width=48, depth=3, networks=12, key=jr.key(0))


@pytest.fixture(scope="module")
def post(data):
    sampler = AtTheMode(chains=2, draws=130)
    return si.fit(si.models.full_path, data, sampler=sampler, predictions=40, key=jr.key(1))


@pytest.fixture(scope="module")
def by_network(post):
    return at_last_layer(post)


FUNCTIONS = {
    "plot_ppc_pit": lambda tree: az.plot_ppc_pit(tree, backend="none"),
    "plot_ppc_dist": lambda tree: az.plot_ppc_dist(tree, backend="none"),
    "plot_loo_pit": lambda tree: az.plot_loo_pit(tree, backend="none"),
    "plot_loo_interval": lambda tree: az.plot_loo_interval(tree, backend="none"),
    "loo_pit": az.loo_pit,
    "loo_expectations": lambda tree: az.loo_expectations(tree, var_name="mean_correlation"),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_predictions_take_the_last_layer(name, by_network):
    assert FUNCTIONS[name](by_network) is not None


@pytest.mark.parametrize("name", ["plot_ppc_pit", "plot_ppc_dist"])
def test_functions_without_densities_take_the_fit_as_it_is(name, post):
    assert FUNCTIONS[name](post) is not None


def test_functions_of_covariances_take_the_draws_with_predictions(post, data):
    """Selected, or with predictions at all draws; covariances are made variables."""
    sampler = AtTheMode(chains=2, draws=25)
    every = si.fit(si.models.full_path, data, sampler=sampler, predictions=None, key=jr.key(1))
    assert all(every[group].sizes["draw"] == 25 for group in ("posterior", "posterior_predictive", "prior_predictive"))
    predicted = post["posterior_predictive"]["draw"]
    for tree in (every, post.sel(draw=predicted)):
        few = tree.isel(network=[0, 1])
        for group in ("observed_data", "posterior_predictive"):
            few[group] = xr.DataTree(few[group].to_dataset().reset_coords("covariance"))
        assert az.loo_expectations(few, var_name="covariance") is not None
        assert FUNCTIONS["plot_loo_interval"](few) is not None


def test_functions_of_densities_take_the_fit(post):
    assert az.loo(post).elpd < np.inf
    assert len(az.compare({"one": post, "same": post})) == 2
    assert {"gamma", "c_gap"} <= set(az.psense_summary(post, var_names=["gamma", "c_gap"]).index)


def test_the_last_layer_is_at_the_draws_that_were_predicted_at(post, by_network):
    predicted = post["posterior_predictive"].to_dataset()
    assert dict(predicted.sizes)["chain"] == 2
    # 40 predictions by two chains: every sixth of the 120 draws of each.
    np.testing.assert_array_equal(predicted["draw"], np.arange(0, 120, 6))
    for group in ("posterior", "log_likelihood", "posterior_predictive"):
        np.testing.assert_array_equal(by_network[group]["draw"], predicted["draw"])
    expected = last_layer(predicted["covariance"])["mean correlation"]
    np.testing.assert_array_equal(by_network["posterior_predictive"]["mean_correlation"], expected)


def test_posteriors_that_were_cut_are_checked(post, data):
    """To some of the draws of one chain, which is compared with itself."""
    whole, part = (si.check(tree, data) for tree in (post, post.sel(draw=slice(0, 80), chain=[0])))
    assert list(whole.to_frame().index) == list(part.to_frame().index)
    one_chain = "agreement of chains: there is one, and R-hat compares its halves; run two chains or more"
    assert (one_chain in whole.skipped, one_chain in part.skipped) == (False, True)


def test_posteriors_without_some_groups_are_checked(post):
    """What needs a group is not tested; without the layers there is one line, and ArviZ's thinning is named."""
    less = post.drop_nodes(["log_likelihood", "sample_stats", "log_prior"])
    found = si.check(less)
    assert "gamma, sds from truth" in found.to_frame().index
    assert "networks left out and distance from predictions: there are no log likelihoods" in found.skipped
    assert "divergences and energies: there is no group sample_stats" in found.skipped
    with pytest.raises(si.InputError, match="post: a result of `fit` is needed; this one has no group layers"):
        si.check(post.drop_nodes("layers"))
    with pytest.raises(si.InputError, match=r"a DataTree without the group posterior, as of az.thin; post.isel\(draw"):
        si.check(az.thin(post, factor=2))


@dataclasses.dataclass(frozen=True)
class RandomWalk(si.infer.AbstractMarkovChain):
    """A sampler without divergences and energies."""

    def start(self, posterior, key):
        return posterior.initial_position(key), key

    def step(self, posterior, state):
        here, key = state
        key, key_move, key_choice = jr.split(key, 3)
        there = jax.tree.map(lambda x: x + jr.normal(key_move), here)
        accept = -jr.exponential(key_choice) < posterior.log_density(there) - posterior.log_density(here)
        here = jax.tree.map(lambda old, new: jnp.where(accept, new, old), here, there)
        return (here, key), here, {}


def test_statistics_that_a_sampler_lacks_are_named(post, data, tmp_path):
    fitted = si.fit(si.models.full_path, data, sampler=RandomWalk(chains=2, draws=20), predictions=2, key=jr.key(1))
    si.write(fitted, tmp_path / "p.nc")
    bare = read_posterior(tmp_path / "p.nc")
    found = si.check(bare)
    assert not {"divergences", "BFMI"} & set(found.to_frame().index)
    assert {"divergences: the sampler has no statistic diverging", "BFMI: the sampler has no statistic energy"} <= set(
        found.skipped
    )
    assert summary(bare, found)["divergences"] is None
    whole = si.check(post)
    assert {"divergences", "BFMI"} <= set(whole.to_frame().index)
    assert not any("the sampler has no" in reason for reason in whole.skipped)


@pytest.mark.filterwarnings("error")
@pytest.mark.one_case
@pytest.mark.parametrize(
    ("cut", "predicted"),
    [
        (lambda tree: tree.isel(draw=slice(65, None)), False),
        (lambda tree: tree.isel(draw=slice(None, None, 3)), True),
        (lambda tree: tree.isel(chain=0), True),
        (lambda tree: tree.isel(chain=slice(1, 2)), True),
    ],
    ids=["second half", "every third draw", "a chain", "chains, none of the prior"],
)
def test_posteriors_that_were_cut_by_position_are_checked(cut, predicted, post):
    """Of groups with fewer draws, such as predictions and the prior, the same positions are other draws, or none."""
    part = cut(post)
    found = si.check(part)
    left_out = "networks left out and distance from predictions: no draw that is left has predictions; select by sel"
    assert (left_out not in found.skipped) == predicted
    assert np.isfinite(found.to_frame().loc[["R-hat", "bulk ESS"], "value"].astype(float)).all()
    assert np.isfinite(si.summarise(part)["mean"]).all()
    assert "posterior" in figures(part)
    pyplot.close("all")


def test_a_single_chain_is_compared_with_itself(post):
    one = post.isel(chain=[0])
    gamma = one["posterior"]["gamma"].values
    expected = array_stats.rhat(gamma.reshape(2, -1))
    assert si.summarise(one).loc["gamma", "rhat"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("cut", [{"draw": slice(0, 3)}, {"draw": 0}])
def test_few_draws_are_refused(cut, post):
    for function in (si.check, si.summarise):
        with pytest.raises(si.InputError, match="post: a chain of at least 4 draws is needed, got"):
            function(post.isel(cut))


@pytest.mark.parametrize("function", [at_last_layer, si.check])
def test_a_tree_of_another_origin_is_refused(function, post):
    other = xr.DataTree.from_dict({"posterior": post["posterior"].to_dataset()})
    with pytest.raises(si.InputError, match="a result of `fit` is needed; this one has no group observed_data"):
        function(other)
