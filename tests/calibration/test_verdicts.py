"""What `check` says of data that break each assumption, and how often it is wrong about data that break none."""

import collections
import warnings

import jax.random as jr
import pytest
from budget import share
from scipy import stats

import sdeinfer as si
from sdeinfer.check._check import LEVEL
from sdeinfer.networks import Baseline, sample_baseline

SEEDS, GOOD = 20, 100
OFTEN = 0.05
"""No verdict should be wrong about more good data sets than this part."""

SIZES = {"width": 128, "depth": 16, "networks": 64}
FIT = {"chains": 4, "draws": 250, "warmup": 250, "predictions": 100}
V0 = si.equicorrelated(tokens=3, correlation=0.2, norm=1.5)
TRANSFORMER = si.ShapedTransformer(gamma=0.5, tau0=1.0, c_plus=1.0, c_minus=-1.0)
FEEDFORWARD = si.ResidualFeedForward(gamma=0.5, c_plus=1.0, c_minus=-1.0)


def baseline(**switches):
    return lambda key: sample_baseline(Baseline(**switches), V0, **SIZES, key=key)


def shaped(layer, V0=V0):
    return lambda key: si.sample_networks(layer, V0, **SIZES, key=key)


VANILLA = {"identity": False, "centred": False, "temperature": "usual", "c": None}
FAILURES = {
    "Pre-LN": (baseline(**VANILLA, layer_norm=True), "transformer", {}, "calibrated"),
    "usual temperature": (baseline(temperature="usual"), "transformer", {}, "calibrated"),
    "not centred": (baseline(centred=False), "transformer", {}, "calibrated"),
    "no identity": (baseline(identity=False), "transformer", {}, "calibrated"),
    "weights of sd 1.1": (baseline(weights=1.1), "transformer", {}, "calibrated"),
    "shared weights": (baseline(shared=True), "transformer", {}, "calibrated"),
    "one token": (
        shaped(
            si.ResidualFeedForward(gamma=0.5, c_plus=1.0, c_minus=-1.0),
            si.equicorrelated(tokens=1, correlation=0.0, norm=1.5),
        ),
        "feedforward",
        {},
        "identified",
    ),
    "unit norms, τ0 = 5": (
        shaped(
            si.ShapedTransformer(gamma=0.5, tau0=5.0, c_plus=1.0, c_minus=-1.0),
            si.equicorrelated(tokens=3, correlation=0.2),
        ),
        "transformer",
        {},
        "identified",
    ),
    "ten draws": (shaped(TRANSFORMER), "transformer", {"draws": 10}, "converged"),
    "MLP as transformer": (shaped(si.ShapedMLP(c_plus=1.0, c_minus=-1.0)), "transformer", {}, "calibrated"),
    "transformer as MLP": (shaped(TRANSFORMER), "mlp", {}, "calibrated"),
}
"""How the data are made, what is fitted to them and how, and which topic should fail."""


def checked(sample, architecture, options, key):
    """The verdicts of one data set; None where it is refused."""
    data = sample(jr.fold_in(key, 0))
    try:
        post = si.fit(si.models.full_path, data, architecture=architecture, **FIT | options, key=jr.fold_in(key, 1))
    except si.InputError:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return si.check(post)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAILURES)
def test_planted_failures_are_flagged(name, key):
    sample, architecture, options, topic = FAILURES[name]
    failed, reasons, refused, right = collections.Counter(), collections.Counter(), 0, 0
    for seed in range(SEEDS):
        found = checked(sample, architecture, options, jr.fold_in(key, seed))
        if found is None:
            refused += 1
            continue
        right += found.failed(topic)
        failed.update(verdict.name for verdict in found.verdicts if not verdict.passed)
        reasons.update(v.advice.split(":")[0] for v in found.verdicts if v.name.startswith("one-step") and not v.passed)
    print(f"\n{name}: {right} of {SEEDS} not {topic}; {refused} refused; {dict(failed)}; {dict(reasons)}")
    assert right + refused == SEEDS


@pytest.mark.slow
def test_good_data_raise_no_more_alarms_than_stated(key):
    failed = collections.Counter()
    for seed in range(GOOD):
        found = checked(shaped(TRANSFORMER), "transformer", {}, jr.fold_in(key, 1000 + seed))
        assert found is not None
        failed.update(verdict.name for verdict in found.verdicts if not verdict.passed)
    print(f"\nalarms in {GOOD} data sets: {dict(failed)}")
    for name in ("one-step innovations, p", "networks left out, p"):
        assert stats.binomtest(failed[name], GOOD, LEVEL).pvalue >= share(), name
    assert [name for name in failed if failed[name] > OFTEN * GOOD] == []
