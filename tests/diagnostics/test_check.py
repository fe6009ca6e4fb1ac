import dataclasses

import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
import xarray as xr
from helpers.budget import assert_mean, assert_within
from helpers.fits import AtTheMode
from helpers.internals import (
    EXACT_DISTANCE,
    IN_RANGE,
    QUESTIONS,
    Alternative,
    Residuals,
    at_least,
    at_most,
    check_candidates,
    check_range,
    excluded_layers,
    logit_scale,
    with_used,
)

import sdeinfer as si
from sdeinfer.diagnostics import Check, known_truth, summarise
from sdeinfer.layers import template


def test_a_good_fit_passes(checked):
    rows = checked.to_frame()
    assert {"R-hat", "bulk ESS", "tail ESS", "divergences", "gamma, sds from truth"} <= set(rows.index)
    # So short a fit has not converged (one divergence of 800 is too many), and so few networks say little of τ0 and of
    # the gap.
    weak = ["bulk ESS", "tail ESS", "R-hat", "divergences", "tau0 contraction", "c_gap contraction"]
    assert rows.drop(weak)["passed"].all()
    assert set(rows["topic"]) == set(QUESTIONS) - {"declared"}  # which is asked by audits
    assert any("means and intervals are rough" in note for note in checked.notes)


def test_what_the_data_do_not_tell_is_said_apart(checked):
    assert set(checked.unidentified) <= {"tau0", "c_gap"}
    assert {each.split(" ±")[0] for each in checked.identified} == {"gamma", "tau0", "c_gap"} - set(
        checked.unidentified
    )
    converged = dataclasses.replace(checked, verdicts=tuple(v for v in checked.verdicts if v.topic != "converged"))
    assert converged.passed
    assert converged.state == "conditional"
    assert converged.verdict.startswith("conditional: gamma ± ")
    weak = dataclasses.replace(converged, unidentified=("tau0", "c_gap"))
    assert "these data do not identify tau0, c_gap" in weak.verdict
    # So few networks do not identify the sizes of the layer either.
    assert ", if these are right, which the data do not tell: " in converged.verdict
    assert any(note.startswith("these data do not exclude transformer, ") for note in checked.notes)


@pytest.mark.long
def test_nothing_is_claimed_of_a_fit_that_identifies_nothing():
    layer, V0 = (
        si.ShapedTransformer(gamma=0.5, tau0=0.6, c_plus=0.0, c_minus=-1.5),
        si.equicorrelated(tokens=3, correlation=0.2, norm=2.0),
    )
    data = si.sample_networks(layer, V0, width=64, depth=3, networks=2, key=jr.key(0))
    narrow = {"gamma": dist.Uniform(0.49, 0.51)}
    short = si.NUTS(chains=4, draws=200, warmup=200)
    post = si.fit(si.models.full_path, data, prior=narrow, sampler=short, predictions=4, key=jr.key(1))
    found = si.check(post)
    assert found.unidentified == ("gamma", "tau0", "c_gap")
    assert found.state == "good"
    assert found.verdict == "good: these data do not identify gamma, tau0, c_gap"


def test_layers_out_of_range_are_compared_with_exact_ones(fitted, networks):
    kind = template("transformer")
    used = np.broadcast_to(np.arange(networks.sizes["layer"] - 1) < 2, (networks.sizes["network"], 10))
    spread = logit_scale(networks)
    found = excluded_layers(Residuals(fitted, with_used(networks, used), kind), spread)
    assert found is not None
    assert list(found) == ["log trace", "log volume"]
    assert_within(np.array([*found.values()]))
    swollen = networks.copy(deep=True)
    swollen["covariance"] = networks["covariance"] * 1.2 ** networks["layer"]
    found = excluded_layers(Residuals(fitted, with_used(swollen, used), kind), spread)
    assert found is not None
    assert found["log trace"] > EXACT_DISTANCE
    assert excluded_layers(Residuals(fitted, networks, kind), spread) is None


def test_a_law_that_does_not_hold_is_named_first(fitted, networks):
    """The sampler diverges too, and γ is neither the truth nor that of hidden states."""
    tree, swollen = fitted.copy(), networks.copy(deep=True)
    tree["sample_stats"] = tree["sample_stats"].to_dataset().assign(diverging=lambda s: xr.ones_like(s["diverging"]))
    swollen["covariance"] = networks["covariance"] * 1.2 ** networks["layer"]
    kept = ("network", "layer"), np.ones(swollen["covariance"].shape[:2])
    covariance = swollen["covariance"].assign_coords(shortcut=kept)
    tree["observed_data"] = tree["observed_data"].to_dataset().assign(covariance=covariance)
    tree.attrs["truth_gamma"] = 0.9
    found = si.check(tree)
    assert found.cause is not None
    assert found.cause.name == "misfit of the layers"
    assert found.verdict.startswith(
        "do not trust yet: misfit of the layers: not layers of a shaped transformer, by growth"
    )
    assert "divergences" in found.verdict
    failed = next(v for v in found.verdicts if v.name == "divergences")
    assert failed.value == 1.0
    assert failed.advice
    # It has nothing to identify.
    assert "identified" not in {verdict.topic for verdict in found.verdicts}
    assert not found.to_frame().loc[["gamma, sds from truth", "gamma by hidden states, sds"], "passed"].any()


def test_large_covariances_leave_the_range_of_the_law(fitted, networks):
    exploded = with_used(networks, np.ones((24, 10), bool)).copy(deep=True)
    exploded["covariance"][3, 4:] *= 100
    rows = {row.name: row for row in check_range(Residuals(fitted, exploded, template("transformer"))).verdicts}
    assert not rows["logit spread, mean"].passed


def test_logit_scale_is_that_of_sampled_logits(networks):
    """The variance about the mean of a row of Y/τ is V_αα (tr V − 1ᵀV1/m)/((m − 1) τ0² n)."""
    data = networks.isel(network=[0])
    V = data["covariance"].values[0, 2]
    factor, width, key_width, tau0 = np.linalg.cholesky(V), 96, 400, 0.7
    G = np.random.default_rng(0).normal(size=(2, 500, 3, key_width))
    Y = (factor @ G[0]) @ np.swapaxes(factor @ G[1], -1, -2) / (tau0 * np.sqrt(width * key_width))
    samples = Y[:, np.argmax(np.diagonal(V))].var(axis=1, ddof=1)
    assert_mean(samples, (logit_scale(data)[0, 2] / tau0) ** 2)


def test_summary_knows_the_truth_in_the_order_in_which_slopes_are_sampled(fitted):
    table = summarise(fitted)
    assert list(table.index) == ["gamma", "tau0", "c_gap", "c_plus", "c_minus"]
    assert table.loc["c_gap", "truth"] == 4.0
    swapped = fitted.copy()
    swapped.attrs |= {"truth_c_plus": -3.0, "truth_c_minus": 1.0}
    assert known_truth(swapped) == known_truth(fitted)
    assert ((table["hdi_low"] < table["mean"]) & (table["mean"] < table["hdi_high"])).all()


def test_the_verdict_says_when_few_transitions_were_fitted():
    def overall(share, *others):
        found = at_least("true", IN_RANGE, share, 0.01, "advice")
        return Check((found, *others), identified=("gamma ± 1 %",)).verdict

    assert overall(0.9) == "good: trust gamma ± 1 %"
    assert overall(0.12) == "good: trust gamma ± 1 %; only 12% of the transitions are in range and were fitted"
    compared = at_most("calibrated", "layers out of range, sds", 1.0, 6.0, "")
    assert overall(0.04, compared).endswith("only 4% of the transitions are in range and were fitted")


def test_a_verdict_is_good_or_conditional_or_does_not_trust():
    failed = at_most("calibrated", "misfit of the layers", 1.0, 0.2, "check the variance of the weights")
    known = ("gamma ± 1 %", "tau0 ± 5 %")
    assumed = {"1 head": "4 heads: tau0 0.86 in place of 1.08", "mlp.gain": ""}
    checks = {
        "good: trust gamma ± 1 %, tau0 ± 5 %": Check((), identified=known),
        "conditional: gamma ± 1 %, tau0 ± 5 %, if these are right, which the data do not tell: 1 head (4 heads: tau0 "
        "0.86 in place of 1.08), mlp.gain": Check((), identified=known, assumed=assumed),
        "conditional: gamma ± 6 % by the prior of tau0; these data do not identify tau0": Check(
            (), unidentified=("tau0",), conditional="gamma ± 6 % by the prior of tau0"
        ),
        "do not trust yet: misfit of the layers: check the variance of the weights": Check(
            (failed,), identified=known, assumed=assumed
        ),
        "good": Check(()),
    }
    for verdict, check in checks.items():
        assert check.verdict == verdict
        assert verdict.startswith(check.state)
        assert check.passed == (check.state != "do not trust")


def test_what_is_assumed_is_named_against_the_fit():
    """The best alternative of each size; an architecture without γ where γ is known; none that moves nothing known."""
    kind = template("attention")
    values = {"gamma": 0.5, "tau0": 1.08}
    found = [
        Alternative(kind, 0.0, values),
        Alternative(template("attention", heads=2), -0.5, {"gamma": 0.5, "tau0": 0.91}),
        Alternative(template("attention", heads=4), -1.0, {"gamma": 0.5, "tau0": 0.86}),
        Alternative(template("mlp"), -2.0, {"c_gap": 1.0}),
        Alternative(template("attention", output_projection=True), -9.0, {"gamma": 0.4, "tau0": 1.0}),
    ]
    sd = {"gamma": 0.01, "tau0": 0.05}
    check = check_candidates(found, kind, sd=sd, known={"gamma", "tau0"})
    assert check.verdicts[0].passed
    assert check.assumed == {"1 head": "2 heads: tau0 0.91 in place of 1.08", "attention": "mlp: without gamma"}
    assert check.notes[1] == "these data do not exclude attention, 4 heads (tau0 0.86 in place of 1.08)"
    assert check_candidates(found, kind, sd=sd, known={"gamma"}).assumed == {"attention": "mlp: without gamma"}
    assert check_candidates(found, kind, sd=sd, known=set()).assumed == {}
    better = [Alternative(template("attention", heads=4), 9.0, {"gamma": 0.5, "tau0": 0.86}), *found[:1]]
    assert "fits better" in check_candidates(better, kind, sd=sd, known={"gamma"}).verdicts[0].advice


def test_a_check_prints_its_verdict_and_its_notes():
    found = Check(
        (), skipped=("predictions: no draws",), identified=("gamma ± 1 %",), notes=("2 heads are not excluded",)
    )
    assert str(found).splitlines() == [
        "good: trust gamma ± 1 %",
        "note: 2 heads are not excluded",
        "not tested: predictions: no draws",
    ]


@pytest.mark.long
def test_a_wrong_tight_prior_is_named(networks, checked):
    """It leaves scores that all have one sign, as of a law that does not hold or of layers that are not independent."""
    settings = {"sampler": AtTheMode(chains=2, draws=100), "predictions": 2, "key": jr.key(0)}
    post = si.fit(si.models.full_path, networks, prior={"gamma": dist.Beta(2000, 18000)}, **settings)
    found = si.check(post)
    assert found.cause is not None
    assert found.cause.advice.startswith("the prior of gamma, about 0.1, contradicts the data, which pull it up from")
    assert found.cause.name not in checked.to_frame().index
