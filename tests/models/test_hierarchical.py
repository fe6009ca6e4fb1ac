"""Partial pooling: networks in groups that have parameters of their own."""

import functools
from typing import Any

import jax
import jax.random as jr
import numpy as np
import pytest
import xarray as xr
from helpers.budget import assert_distribution, assert_mean, assert_within
from helpers.fits import AtTheMode
from helpers.internals import (
    Assumptions,
    densities_at,
    groups_of,
    layer_at,
    log_likelihoods,
    observed_path,
    path_layout,
    posterior_mode,
    problem_of,
)
from numpyro.infer import Predictive
from scipy.special import logit
from scipy.stats import halfnorm, lognorm, norm, uniform

import sdeinfer as si
from sdeinfer.infer import predict
from sdeinfer.layers import template
from sdeinfer.observation import read_posterior

MODEL = si.models.hierarchical


def group_of(layer, label, *, width=64, depth=8, networks=6, seed=0) -> xr.Dataset:
    V0 = si.equicorrelated(tokens=3, correlation=0.1, norm=1.0)
    data = si.sample_networks(layer, V0, width=width, depth=depth, networks=networks, key=jr.key(seed))
    return data.assign_coords(group=("network", [label] * networks))


def together(parts) -> xr.Dataset:
    data = xr.concat(parts, "network", combine_attrs="drop_conflicts")
    return data.assign_coords(network=np.arange(data.sizes["network"]))


def feedforward(gamma: float) -> si.ResidualFeedForward:
    return si.ResidualFeedForward(gamma=gamma, c_plus=0.0, c_minus=-2.0)


def feedforwards(*gammas: float, seed: int, **sizes: int) -> xr.Dataset:
    return together(group_of(feedforward(x), f"run {i}", seed=seed + i, **sizes) for i, x in enumerate(gammas))


def of_two_groups(b, a) -> xr.Dataset:
    """Two groups of networks of two widths, in no order."""
    kinds = [("b", b, 64), ("a", a, 64), ("b", b, 96), ("a", a, 96)]
    parts = [
        group_of(layer, label, width=width, networks=4, seed=i, depth=6)
        for i, (label, layer, width) in enumerate(kinds)
    ]
    return together(parts).isel(network=np.random.default_rng(0).permutation(16))


@functools.cache
def mixed() -> xr.Dataset:
    return of_two_groups(*(si.ShapedTransformer(gamma, tau0, 0.0, -2.0) for gamma, tau0 in ((0.4, 0.9), (0.7, 0.6))))


@functools.cache
def without_attention() -> xr.Dataset:
    return of_two_groups(feedforward(0.4), feedforward(0.7))


def assumed(data: xr.Dataset, law: Any = "finite-width") -> Assumptions:
    return Assumptions(template(data.attrs["architecture"]), law)


@functools.cache
def prepared(law: str):
    problem, data = problem_of(MODEL, assumed(mixed(), law)), mixed()
    return problem.reduced(data, problem.transitions(data))


@functools.cache
def draws_of(law: str) -> dict[str, np.ndarray]:
    """Draws from the prior, of all sites but the data's."""
    names = ["gamma", "tau0", "c_gap", "c_mean"]
    names += [f"{name}_{part}" for name in names[:3] for part in ("sd", "offset")]
    names += [f"group_{name}" for name in ("gamma", "tau0", "c_gap", "c_plus", "c_minus")]
    draw = Predictive(MODEL, num_samples=4000, return_sites=names, parallel=True)
    return {name: np.asarray(value) for name, value in draw(jr.key(0), prepared(law).pooled()).items()}


@pytest.mark.long
@pytest.mark.parametrize("law", ["limit", "finite-width"])
def test_the_likelihood_of_a_group_is_that_of_a_full_path(law):
    """The program of networks that are all alike gives it, at the group's parameters; pooled data have the sum."""
    data, grouped = mixed(), prepared(law)
    layout, groups, assumptions = path_layout(observed_path(data)), groups_of(data), assumed(data, law)
    sites = {name: value[None, :3] for name, value in draws_of(law).items()}
    found = log_likelihoods(MODEL, grouped, sites, None)["covariance"][0]
    pooled = log_likelihoods(MODEL, MODEL.pool(grouped), sites, None)["covariance"][0]
    assert (found.shape[-1], pooled.shape[-1]) == (16, 4)
    np.testing.assert_allclose(pooled.sum(axis=-1), found.sum(axis=-1), rtol=1e-12)
    for number in range(len(groups)):
        path = observed_path(data.isel(network=groups.members(number)))
        alike = MODEL.ungrouped
        problem = problem_of(alike, assumptions)
        one = problem.adjusted(problem.statistics(path, layout, pooled=False), path)
        at = {name: sites[f"group_{name}"][..., number] for name in ("gamma", "tau0", "c_gap", "c_plus", "c_minus")}
        expected = log_likelihoods(alike, one, at | {"c_mean": sites["c_mean"]}, None)["covariance"][0]
        np.testing.assert_allclose(found[:, groups.members(number)], expected, rtol=1e-11)


@pytest.mark.long
def test_each_group_has_the_adjustment_that_it_has_alone():
    data = without_attention()
    grouped, groups, layout = si.prepare(MODEL, data), groups_of(data), path_layout(observed_path(data))
    for number in range(len(groups)):
        members = groups.members(number)
        problem, path = problem_of(MODEL.ungrouped, assumed(data)), observed_path(data.isel(network=members))
        alone = problem.adjusted(problem.statistics(path, layout, pooled=False), path)
        places = grouped.width[members]  # of groups and widths
        own = jax.tree.map(lambda x, places=places: x[places], grouped.adjustment)
        for found, expected in zip(jax.tree.leaves(own), jax.tree.leaves(alone.adjustment), strict=True):
            np.testing.assert_allclose(found, np.broadcast_to(expected, np.shape(found)), rtol=1e-6, atol=1e-8)


@pytest.mark.one_case
@pytest.mark.parametrize("law", ["limit", "finite-width"])
def test_estimates_change_no_prior(law):
    """Where the sampler's coordinates are laid, groups are still normal about the population."""
    drawn, squares = draws_of(law), []
    for name, transform in {"gamma": logit, "tau0": np.log, "c_gap": np.log}.items():
        for number in range(prepared(law).groups):
            moved = (transform(drawn[f"group_{name}"][:, number]) - transform(drawn[name])) / drawn[f"{name}_sd"]
            assert_distribution(moved, norm.cdf)
            squares.append(moved**2)
    assert_mean(np.concatenate(squares), 1.0)  # 5 % of a group's standard deviation are not seen group by group
    assert_distribution(drawn["gamma"], uniform.cdf)
    assert_distribution(drawn["tau0"], lognorm(1).cdf)
    assert_distribution(drawn["c_gap"], halfnorm(scale=2 * np.sqrt(2)).cdf)
    assert_distribution(drawn["c_mean"], norm(scale=np.sqrt(2)).cdf)


def test_estimates_are_the_modes_of_groups_alone():
    data, options = without_attention(), {"architecture": template("feedforward", expansion=4), "law": "limit"}
    groups, estimates = groups_of(data), si.prepare(MODEL, data, **options).estimates
    for number in range(len(groups.labels)):
        own = data.isel(network=groups.members(number))
        alone = si.prepare(si.models.full_path, own, **options).pooled()
        layer = layer_at(si.models.full_path, alone, posterior_mode(si.models.full_path, alone))
        np.testing.assert_allclose(estimates.centre[number], layer.u, atol=1e-3)
        np.testing.assert_allclose(estimates.precision[number], np.maximum(layer.sd**-2.0 - 4, 0), rtol=1e-2)


@pytest.mark.slow
def test_different_groups_are_recovered_and_alike_ones_shrink():
    spreads = []
    for truth, seed in ((np.array([0.2, 0.4, 0.6, 0.8]), 10), (np.full(4, 0.5), 20)):
        data = feedforwards(*truth, seed=seed, networks=12, depth=12)
        draws = si.fit(MODEL, data, chains=2, draws=300, warmup=300, predictions=1, key=jr.key(5))["posterior"]
        u = logit(draws["group_gamma"].values)
        assert_within((u.mean(axis=(0, 1)) - logit(truth)) / u.std(axis=(0, 1)), "logit gamma of groups")
        spreads.append(draws["gamma_sd"].values)
    different, alike = spreads
    alone = 1 / np.sqrt(si.prepare(MODEL, data).estimates.precision[:, 0] + 4.0)
    print(f"sd between groups: {different.mean():.2f} for {logit(truth).std():.2f}, {alike.mean():.3f} for 0")
    print(f"sd of a group's logit gamma: {alone.mean():.3f} alone, {u.std(axis=(0, 1)).mean():.3f} with the others")
    assert np.quantile(different, 0.01) > np.quantile(alike, 0.99)
    # An sd of 600 draws has an error of 5 %, and their mean one of 2.5 %.
    assert u.std(axis=(0, 1)).mean() < alone.mean()


@pytest.mark.long
def test_a_fit_has_groups_by_their_labels_and_survives_a_file(tmp_path):
    data, kind, settings = without_attention(), template("feedforward", expansion=4), {"law": "limit", "predictions": 3}
    sampler, groups = AtTheMode(chains=2, draws=20), groups_of(data)
    post = si.fit(MODEL, data, architecture=kind, sampler=sampler, **settings, key=jr.key(3))
    labels = list(groups.labels)
    for name in ("group_gamma", "group_c_gap", "group_c_plus"):
        for group in ("posterior", "prior"):
            assert post[group][name].dims == ("chain", "draw", "group")
            assert list(post[group]["group"].values) == labels
    assert {"gamma", "c_gap", "gamma_sd", "c_gap_sd", "c_mean"} <= set(post["posterior"].data_vars)
    np.testing.assert_array_equal(post["log_likelihood"]["network"], data["network"])
    # The densities are those of a full path at the parameters of the group.
    path, draw = si.prepare(si.models.full_path, data, architecture=kind, law="limit"), post["posterior"].isel(draw=7)
    for number, label in enumerate(labels):
        own = {name: draw[f"group_{name}"].sel(group=label).values for name in ("gamma", "c_plus", "c_minus")}
        expected = densities_at(path, kind, kind.coordinates.unconstrained(own).T)[:, groups.members(number)]
        found = post["log_likelihood"]["covariance"].isel(draw=7, network=groups.members(number))
        np.testing.assert_allclose(found, expected, rtol=1e-9)
    si.write(post, tmp_path / "posterior.nc")
    again = read_posterior(tmp_path / "posterior.nc")
    xr.testing.assert_equal(again["posterior"].to_dataset(), post["posterior"].to_dataset())
    rows = si.summarise(again)
    assert {"gamma", "gamma_sd", *(f"group_c_gap[{label}]" for label in labels)} <= set(rows.index)
    verdicts = [si.check(again), si.check(post, data)]
    assert verdicts[0].to_frame().equals(verdicts[1].to_frame())


def test_predictions_of_a_network_are_made_at_the_parameters_of_its_group():
    data, groups = mixed(), groups_of(mixed())
    kind = template("transformer")
    parameters = {"gamma": [0.01, 0.99], "tau0": [1.0, 1.0], "c_plus": [1 + 1e-9] * 2, "c_minus": [1 - 1e-9] * 2}
    of_groups = kind.coordinates.unconstrained(parameters).T
    layers = np.tile(of_groups[groups.group], (2, 1, 1))
    predicted = predict(layers, data, architecture=kind, key=jr.key(1))
    np.testing.assert_array_equal(predicted["network"], data["network"])
    V = predicted["covariance"].values
    np.testing.assert_allclose(V[0, :, 0], data["covariance"][:, 0], atol=1e-6)
    moved = np.abs(V[:, :, -1] - V[:, :, 0]).mean(axis=(0, 2, 3))
    assert moved[groups.group == 1].min() > moved[groups.group != 1].max()


def test_bad_groups_are_refused():
    data = mixed()
    labels = np.where(np.arange(16) == 3, np.nan, 1.0)
    used = xr.ones_like(data["covariance"][:, :, 0, 0], bool) & (data["group"] != "a")
    for changed, message in (
        (data.drop_vars("group"), "group: a coordinate on network with the label"),
        (data.assign_coords(group=("layer", data["layer"].values)), "group: must be one label per network, got dimens"),
        (data.assign_coords(group=("network", ["a"] * 16)), "at least 2 groups are needed, got a alone; use models"),
        (data.assign_coords(group=("network", labels)), f"group: network {data['network'].values[3]} has no label"),
        (data.assign(used=used), "group a: used: no transition is left"),
    ):
        with pytest.raises(si.InputError, match=message):
            si.fit(MODEL, changed, law="limit", key=jr.key(0))
