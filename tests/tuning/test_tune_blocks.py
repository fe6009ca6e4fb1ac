"""Tuning of blocks in use, which have no limit: exact laws, names of several parts, and what is refused."""

import math
from typing import Any

import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_estimate
from helpers.internals import with_shapes

import sdeinfer as si
from sdeinfer import criteria as of

WIDTH, DEPTH = 8, 4
MLP = si.blocks.Block(si.blocks.MLP(activation="relu"), norm="rms")
PRE_LN = si.Stack((si.blocks.Block(si.blocks.SelfAttention(heads=2, pattern=si.CAUSAL), norm="rms"), MLP))
V0 = np.asarray(si.equicorrelated(tokens=3, correlation=0.2, norm=1.0))


def size(paths):
    """The squared norm of the first token."""
    return paths.last[:, 0, 0]


ARGUMENTS: dict[str, Any] = {
    "width": WIDTH,
    "depth": DEPTH,
    "paths": 2048,
    "maximise": "strength",
    "subject_to": of.expectation(size) <= 2,
    "fixed": {"gain": 1.0, "temperature": 1.0},
    "key": jr.key(0),
}


@pytest.fixture(scope="module")
def tuned():
    return si.tune(si.Stack((MLP,)), np.eye(1), **ARGUMENTS | {"fixed": {"gain": 1.0}})


def test_the_gains_of_a_model_are_fixed_unless_stated_or_free():
    assert with_shapes(PRE_LN, {}, free=[]) == {"attention.temperature": 1.0, "mlp.gain": 1.0}
    assert with_shapes(PRE_LN, {"gain": 2.0}, free=[]) == {"attention.temperature": 1.0, "gain": 2.0}
    assert with_shapes(PRE_LN, {}, free=["mlp.gain", "temperature"]) == {}


def test_the_exact_mean_of_one_token(tuned):
    """E V′ = V + g² w/2 for ReLU, at every width."""
    exact = math.sqrt(1 / (DEPTH * 0.5))
    row = tuned.parameters.loc["strength"]
    assert_estimate(row["value"], exact, row["error"])
    assert tuned.law == "finite-width"
    assert tuned.layer.parameters()["mlp.strength"] == pytest.approx(row["value"])
    # dg/db of g = √((b − 1)/(d/2)) at b = 2.
    assert tuned.criteria["multiplier"].iloc[0] == pytest.approx(exact / 2, rel=0.1)
    value, error = tuned.criteria[["value", "error"]].iloc[0]
    assert_estimate(value, 1 + DEPTH * row["value"] ** 2 / 2, error)
    assert not tuned.notes
    assert "g, strength" in tuned.parameter_rows()[0]["meaning"]


@pytest.mark.long
def test_networks_with_weights_keep_it(tuned, key):
    found = si.transfer(tuned, widths=[2 * WIDTH], depths=[DEPTH], networks=512, with_weights=256, key=key)
    (row,) = found.criteria.to_dict("records")
    for source in ("promised", "chain", "weights"):
        assert_estimate(row[source], 1 + DEPTH * tuned.values["strength"] ** 2 / 2, row[f"{source}_error"])


@pytest.mark.long
def test_parts_over_depth(key):
    """A strength of both branches by knots: their squares add up, and a mean is largest where they are equal."""
    found = si.tune(PRE_LN, V0, **ARGUMENTS | {"knots": {"strength": 2}, "paths": 128, "key": key})
    assert isinstance(found.layer, si.OverDepth)
    assert set(found.layer.profiles) == {"attention.strength", "mlp.strength"}
    assert list(found.values) == ["strength[0]", "strength[1]"]
    value, error = found.criteria[["value", "error"]].iloc[0]
    assert_estimate(value, 2, math.hypot(error, error))


@pytest.mark.long
def test_parts_with_values_of_their_own(key):
    """The strength of attention is fixed by its own name, and the other is tuned by its own."""
    fixed = {"attention.strength": 0.1, "gain": 1.0, "temperature": 1.0}
    found = si.tune(PRE_LN, V0, **ARGUMENTS | {"maximise": "mlp.strength", "fixed": fixed, "paths": 128, "key": key})
    assert list(found.values) == ["mlp.strength"]
    assert found.layer.parameters()["attention.strength"] == 0.1
    assert found.layer.parameters()["mlp.strength"] == pytest.approx(found.values["mlp.strength"])


@pytest.mark.long
def test_a_criterion_that_cannot_pass_one(key):
    """Correlations are flat beyond the answer, where the scan of the box has points too."""
    goal = of.expectation(of.MeanCorrelation()) <= 0.9
    sizes = {"depth": 20, "paths": 128, "subject_to": goal, "key": key}
    found = si.tune(PRE_LN, V0, **ARGUMENTS | sizes)
    value, error = found.criteria[["value", "error"]].iloc[0]
    assert_estimate(value, 0.9, math.hypot(error, error))
    assert found.values["strength"] > 1


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"law": "limit"}, "law: that of the limit needs the layer's limit, and Stack has none"),
        ({"subject_to": of.spread(of.LogGradientNorm()) <= 1}, "subject_to: a statistic of gradients needs"),
        ({"width": 4}, "width: 3 tokens need a width of at least 6"),
        ({"bounds": {"mlp.strength": (0.1, 1.0)}}, "mlp.strength: it has the value of strength, which is given as "),
        ({"fixed": {"size": 1.0}}, "fixed: Stack has no parameter size; it has attention.strength"),
        ({"maximise": "mlp.temperature"}, "objective: mlp.temperature is not free; free are attention.strength, mlp"),
        ({"fixed": {"strength": 1.0}, "knots": {"strength": 2}}, "knots: strength is not free; free are"),
    ],
)
def test_bad_input_is_refused_in_one_line(changed, message):
    with pytest.raises(si.InputError, match=message) as caught:
        si.tune(PRE_LN, V0, **ARGUMENTS | changed)
    assert "\n" not in str(caught.value)
