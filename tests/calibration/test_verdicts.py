"""What `check` says of data that break each assumption, and how often it is wrong about data that break none."""

import collections
import warnings

import jax.random as jr
import pytest
from budget import share
from scipy import stats

import sdeinfer as si
from sdeinfer.diagnostics import LEVEL, Check
from sdeinfer.networks import Baseline, sample_baseline

SEEDS, GOOD = 20, 100
MISSED = 0.1
"""A failure near a threshold, as a usual temperature or a τ0 that is hardly told, may be seen otherwise so often."""

OFTEN = 0.05
"""No verdict should be wrong about more good data sets than this part."""

SIZES = {"width": 128, "depth": 16, "networks": 128}
MANY = 512
"""Networks that know every parameter. Of data sets of 128, one in six leaves the gap or τ0 open, and most do not tell
two architectures apart, since the noise of one is that of the other at another γ."""

V0 = si.equicorrelated(tokens=3, correlation=0.2, norm=1.5)
TRANSFORMER = si.ShapedTransformer(gamma=0.5, tau0=1.0, c_plus=2.0, c_minus=-2.0)
FEEDFORWARD = si.ResidualFeedForward(gamma=0.5, c_plus=2.0, c_minus=-2.0)


def baseline(**switches):
    return lambda key: sample_baseline(Baseline(**switches), V0, **SIZES, key=key)


def shaped(layer, V0=V0, **sizes):
    return lambda key: si.sample_networks(layer, V0, **SIZES | sizes, key=key)


VANILLA = {"identity": False, "centred": False, "temperature": "usual", "c": None}
FAILURES = {
    "Pre-LN": (baseline(**VANILLA, layer_norm=True), "transformer", {}, "calibrated"),
    "usual temperature": (baseline(temperature="usual"), "transformer", {}, "agrees with the theory"),
    "not centred": (baseline(centred=False), "transformer", {}, "calibrated"),
    "no identity": (baseline(identity=False), "transformer", {}, "calibrated"),
    "weights of sd 1.1": (baseline(weights=1.1), "transformer", {}, "calibrated"),
    "shared weights": (baseline(shared=True), "transformer", {}, "calibrated"),
    "one token": (
        shaped(FEEDFORWARD, si.equicorrelated(tokens=1, correlation=0.0, norm=1.5)),
        "feedforward",
        {},
        "identified",
    ),
    "unit norms, τ0 = 5": (
        shaped(
            si.ShapedTransformer(gamma=0.5, tau0=5.0, c_plus=2.0, c_minus=-2.0),
            si.equicorrelated(tokens=3, correlation=0.2),
        ),
        "transformer",
        {},
        "identified",
    ),
    "ten draws": (shaped(TRANSFORMER, networks=MANY), "transformer", {"draws": 10}, "converged"),
    "feed-forward as attention": (shaped(FEEDFORWARD, networks=MANY), "attention", {}, "calibrated"),
    "transformer as MLP": (shaped(TRANSFORMER, networks=MANY), "mlp", {}, "calibrated"),
    "transformer as feed-forward": (shaped(TRANSFORMER, networks=MANY), "feedforward", {}, "calibrated"),
}
"""How the data are made, what is fitted to them and how, and the topic of the cause that should be named."""


def checked(sample, architecture, options, key) -> Check:
    """The verdicts on one data set."""
    data = sample(jr.fold_in(key, 0))
    post = si.fit(si.models.full_path, data, architecture=architecture, **options, key=jr.fold_in(key, 1))
    with warnings.catch_warnings():
        # ArviZ's, of diagnostics that few draws do not allow.
        warnings.simplefilter("ignore")
        return si.check(post)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_planted_failures_are_flagged(name, key):
    sample, architecture, options, topic = FAILURES[name]
    causes, failed, reasons = collections.Counter(), collections.Counter(), collections.Counter()
    for seed in range(SEEDS):
        found = checked(sample, architecture, options, jr.fold_in(key, seed))
        causes[found.cause.topic if found.cause else "good"] += 1
        failed.update(verdict.name for verdict in found.verdicts if not verdict.passed)
        if found.cause:
            reasons[found.cause.advice.split(":")[0].split(";")[0]] += 1
    print(f"\n{name}: {dict(causes)}; {dict(reasons)}; all that failed: {dict(failed)}", flush=True)
    assert causes[topic] >= (1 - MISSED) * SEEDS


@pytest.mark.slow
def test_good_data_raise_no_more_alarms_than_stated(key):
    failed, good = collections.Counter(), 0
    for seed in range(GOOD):
        found = checked(shaped(TRANSFORMER, networks=MANY), "transformer", {}, jr.fold_in(key, 1000 + seed))
        good += found.passed
        failed.update(verdict.name for verdict in found.verdicts if not verdict.passed)
    print(f"\n{good} of {GOOD} data sets good; alarms: {dict(failed)}", flush=True)
    for name in ("one-step innovations, p", "networks left out, p"):
        assert stats.binomtest(failed[name], GOOD, LEVEL).pvalue >= share(), name
    assert [name for name in failed if failed[name] > OFTEN * GOOD] == []
