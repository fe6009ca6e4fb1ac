"""Estimates and verdicts of audits, on Datasets of networks with known strengths."""

import functools
import math

import jax.random as jr
import numpy as np
import pytest
from budget import assert_estimate

import sdeinfer as si
from sdeinfer.auditing import Recipe
from sdeinfer.blocks import MLP, Block, SelfAttention

WIDTH, LAYERS, TOKENS, SD = 64, 6, 3, 0.1
DECLARED = {"attention.strength": math.sqrt(WIDTH) * SD, "mlp.strength": math.sqrt(4 * WIDTH) * SD}
GAIN = WIDTH * SD**2
RECIPE = Recipe("normal weights", "this test", lambda matrix: SD)


def blocks(attention: float = 1.0, mlp: float = 1.0, temperature: float = 1.0) -> si.Stack:
    """One layer, with factors of the declared values."""
    of_attention = SelfAttention(gain=GAIN, temperature=temperature, heads=4, pattern=si.CAUSAL)
    return si.Stack(
        (
            Block(of_attention, attention * DECLARED["attention.strength"], "layer"),
            Block(MLP(GAIN, "gelu_tanh"), mlp * DECLARED["mlp.strength"], "layer"),
        )
    )


@functools.cache
def sampled(seed: int = 0, **factors: float):
    V0 = si.equicorrelated(tokens=TOKENS, correlation=0.2)
    data = si.sample_branches(blocks(**factors), V0, width=WIDTH, depth=LAYERS, key=jr.key(seed))
    return data.assign_coords(network=[seed])


def audited(data=None, **settings):
    data = sampled() if data is None else data
    return si.audit(data, recipe=RECIPE, architecture=blocks(), **settings)


def test_a_correct_network_passes():
    found = audited()
    assert found.passed, found
    assert found.layers == LAYERS
    assert found.assumed == ("attention.temperature", "mlp.gain") or len(found.shapes)
    for each in found.strengths:
        assert abs(each.log_ratio) < 4 * each.sd
        assert each.declared == pytest.approx(DECLARED[each.name])
    assert list(found.to_frame().index[:2]) == ["all attention", "all mlp"]


def test_strengths_are_those_of_a_fit():
    found = audited()
    post = si.fit(si.models.branches, sampled(), architecture=blocks(), chains=2, draws=2000, key=jr.key(1))
    table = si.summarise(post)
    for each in found.strengths:
        mean, sd = table.loc[each.name, ["mean", "sd"]]
        # The prior of a fit is flat over these widths; the error is that of its draws.
        assert abs(mean - each.value) < 0.15 * sd
        # 4,000 draws give an sd to 1.5 %.
        assert sd == pytest.approx(each.value * each.sd, rel=0.05)


def test_a_factor_in_one_kind_is_named():
    found = audited(sampled(mlp=1.3))
    assert not found.passed
    assert [each.name for each in found.failed] == ["ratio of mlp.strength to the declared one"]
    assert found.verdict.startswith("failed: Dataset: mlp.strength is 1.")
    with pytest.raises(AssertionError, match=r"failed: Dataset: mlp.strength is 1\.\d+ ±"):
        assert found.passed, repr(found)
    assert not any(math.isnan(row["ratio"]) for row in found.to_dict()["branches"])


def test_a_temperature_and_a_strength_are_in_one_sentence():
    found = audited(sampled(mlp=1.3, temperature=0.15))
    temperature = next(each for each in found.shapes if each.name == "attention.temperature")
    assert temperature.interval[0] < 0.15 < temperature.interval[1]
    mlp = found.strengths[1]
    expected = f"attention.temperature is {temperature} and mlp.strength is {mlp} times what normal weights declares"
    assert expected in found.verdict
    assert "prior" not in found.verdict


def test_without_a_recipe_nothing_is_declared():
    found = si.audit(sampled(mlp=1.3), architecture=blocks())
    assert found.passed
    assert found.recipe is None


def test_errors_of_ratios_are_those_that_are_stated():
    """Those of one increment, whose errors are independent given what their branches read."""
    tables = [audited(sampled(seed)).branches for seed in range(10)]
    for block in ("attention", "mlp"):
        own = [table[table["block"] == block] for table in tables]
        ratios = np.concatenate([np.log(table["ratio"]) / table["sd"] for table in own])
        assert_estimate(ratios.mean(), 0.0, 1 / math.sqrt(len(ratios)))
        assert_estimate(np.square(ratios).mean(), 1.0, math.sqrt(2 / len(ratios)))


def test_a_dataset_needs_an_architecture():
    with pytest.raises(si.InputError, match=r"architecture: the blocks of one layer are needed"):
        si.audit(sampled(), recipe=RECIPE)
