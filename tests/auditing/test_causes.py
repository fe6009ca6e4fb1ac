"""Causes of factors that wrong recipes make, and how many a random factor finds."""

import dataclasses
import math

import numpy as np
import pytest
from budget import share
from scipy import stats

import sdeinfer as si
from sdeinfer.auditing._causes import candidates, causes
from sdeinfer.auditing._in_words import Found, in_words
from sdeinfer.auditing._lookup import recipe_of
from sdeinfer.auditing._recipe import Recipe, declared
from sdeinfer.auditing._recipes import (
    completep,
    deepnet,
    gpt2,
    kaiming,
    lecun,
    mup,
    normal,
    pytorch,
    pytorch_linear,
    xavier,
)
from sdeinfer.blocks import MLP, Block, SelfAttention

WIDTH, LAYERS = 768, 12
ATTENTION = Block(SelfAttention(heads=12), norm="layer")
GQA = Block(SelfAttention(heads=12, key_value_heads=4), norm="layer")
GELU = Block(MLP(activation="gelu"), norm="layer")
SWIGLU = Block(MLP(activation="silu", gated=True, expansion=8 / 3), norm="rms")


def sd_times(recipe: Recipe, factor: float) -> Recipe:
    return dataclasses.replace(recipe, sd=lambda matrix: factor * recipe.sd(matrix))


def ratio(parameter: str, block: Block, built: Recipe, said: Recipe) -> float:
    """What a fit finds that assumes the declared gain, over the declared value."""
    (one,), (other,) = (declared(si.Stack((block,)), each, width=WIDTH, layers=LAYERS).layers for each in (built, said))
    gains = float(one.branch.gain / other.branch.gain)
    match parameter:
        case "strength":
            return float(one.strength / other.strength) * math.sqrt(gains)
        case "temperature":
            return float(one.branch.temperature / other.branch.temperature) / gains
        case _:
            return gains


MUP = mup(base_width=192)
MISTAKES = [
    ("strength", GELU, normal(), gpt2(), "√(2L) = 4.90: the factor 1/√(2L) of the mlp output matrix is missing"),
    ("strength", ATTENTION, normal(), gpt2(), "√(2L) = 4.90: the factor 1/√(2L) of the attention output matrix"),
    ("strength", GELU, gpt2(), normal(), "1/√(2L) = 0.204: the mlp output matrix: a scale of 1/√(2L) that"),
    ("strength", SWIGLU, pytorch_linear(biases=False), gpt2(), "up and mlp output matrices: the default 1/√(3 fan_in)"),
    ("strength", ATTENTION, pytorch_linear(biases=False), normal(), "value and attention output matrices: the default"),
    ("gain", GELU, pytorch_linear(biases=False), normal(), "1.09: the up matrix: the default 1/√(3 fan_in)"),
    ("strength", ATTENTION, sd_times(gpt2(), 3**-0.5), gpt2(), "1/3 = 0.333: the value and attention output matrices"),
    ("strength", GELU, normal(), xavier(), "a standard deviation of 0.02, the default of many configurations"),
    ("strength", GELU, normal(), MUP, "4.00: the factor √(base_width/n) of the up and mlp output matrices is missing"),
    ("strength", GELU, lecun(), kaiming(), "0.500: the factor gain of the up and mlp output matrices is missing"),
    ("strength", GELU, kaiming(), lecun(), "2.00: the up and mlp output matrices: a gain √2, as for ReLU"),
    ("strength", ATTENTION, xavier(), deepnet(), "9.80: the factor β = (8L)^−¼ of the value and attention output"),
    (
        "strength",
        GELU,
        mup(base_width=192, base_head_size=1),
        completep(base_width=192, base_layers=2),
        "6.00: the factor (L/base_layers)^−1 of the mlp output matrix is missing",
    ),
    (
        "strength",
        SWIGLU,
        dataclasses.replace(lecun(), sd=lambda matrix: (matrix.fan_out if matrix.last else matrix.fan_in) ** -0.5),
        lecun(),
        "σ of exchanged fans/σ = 1.63: the mlp output matrix: fan_in and fan_out are exchanged",
    ),
    (
        "strength",
        GQA,
        dataclasses.replace(lecun(), sd=lambda matrix: (256 if matrix.last else 768) ** -0.5),
        lecun(),
        "σ of grouped heads/σ = 1.73: the attention output matrix: fan_in is that of the keys",
    ),
    (
        "strength",
        ATTENTION,
        pytorch(),
        dataclasses.replace(
            pytorch(), sd=lambda matrix: xavier().sd(matrix) if not matrix.last else pytorch().sd(matrix)
        ),
        "0.707: queries, keys and values are initialised as one matrix",
    ),
    ("temperature", ATTENTION, pytorch(), xavier(), "2.00: queries, keys and values are initialised as one matrix"),
    (
        "temperature",
        ATTENTION,
        dataclasses.replace(normal(), temperature=lambda size: size**-0.5),
        normal(),
        "1/√d_k = 0.125: 1/√d_k of the logits is missing",
    ),
    (
        "temperature",
        ATTENTION,
        normal(),
        dataclasses.replace(normal(), temperature=MUP.temperature),
        "1/8.00 = 0.125: logits are divided by √d_k",
    ),
]


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: f"{case[0]} {case[2].name} for {case[3].name}")
def test_mistakes_are_found(case):
    parameter, block, built, said, sentence = case
    factor = ratio(parameter, block, built, said)
    found = causes(factor, 0.003, parameter=parameter, block=block, recipe=said, width=WIDTH, layers=LAYERS)
    assert any(sentence in each.sentence for each in found), (factor, found)
    for each in found:
        assert abs(math.log(each.factor / factor)) <= 0.009


def test_the_candidates_of_gpt2_are_those_by_hand():
    """u = 3072, σ = .02/√24 of the last matrix and σ = .02 of the first; d_k = 64 and n/d_k = 12."""
    sigma, cut = 0.02 / math.sqrt(24), 0.8796
    default, first = 1 / math.sqrt(3 * 3072) / sigma, 1 / math.sqrt(3 * 768) / 0.02
    arguments = {"recipe": gpt2(), "width": WIDTH, "layers": LAYERS}
    strength = [each.factor for each in candidates(parameter="strength", block=GELU, **arguments)]
    of_laws = [sigma, 0.02 * sigma, 3**-0.5, 1 / 3, 3**0.5, 3, cut, cut**2]
    assert strength == pytest.approx([24**0.5, 24**-0.5, 2**0.5, default, default * first, *of_laws], rel=1e-4)
    temperature = [each.factor for each in candidates(parameter="temperature", block=ATTENTION, **arguments)]
    of_laws = [2500, 3, 1 / 3, cut**-2]
    assert temperature == pytest.approx([1 / 8, 8, 12**0.5, first**-2, *of_laws], rel=1e-4)


def of_gpt2(ratio, sd_log):
    return causes(ratio, sd_log, parameter="strength", block=GELU, recipe=gpt2(), width=WIDTH, layers=LAYERS)


def test_a_factor_is_explained_within_its_error_and_three_percent():
    root = math.sqrt(24)
    assert len(of_gpt2(root * math.exp(0.0089), 0.003)) == 1
    assert not of_gpt2(root * math.exp(0.0091), 0.003)
    assert len(of_gpt2(root * math.exp(0.029), 0.1)) == 1
    assert not of_gpt2(root * math.exp(0.031), 0.1)
    assert not of_gpt2(1.02, 0.01)
    assert not of_gpt2(math.sqrt(2), 0.2)


def test_unusable_factors_are_refused():
    with pytest.raises(si.InputError, match="ratio: a positive number"):
        of_gpt2(0.0, 0.01)
    with pytest.raises(si.InputError, match="gain of attention"):
        causes(2.0, 0.01, parameter="gain", block=ATTENTION, recipe=gpt2(), width=WIDTH, layers=LAYERS)


def test_own_standard_deviations_have_the_scale_of_gpt2_if_they_have_it():
    sds = {"up": 0.02, "mlp output": 0.00408}
    (found,) = causes(4.9, 0.003, parameter="strength", block=GELU, recipe=recipe_of(sds), width=WIDTH, layers=LAYERS)
    assert "the factor 1/√(2L) of the mlp output matrix is missing" in found.sentence


@pytest.mark.parametrize(
    ("block", "parameter", "recipe", "highest"),
    [
        (ATTENTION, "strength", gpt2(), 0.15),
        (GELU, "strength", gpt2(), 0.15),
        (ATTENTION, "temperature", gpt2(), 0.11),
        (GQA, "strength", xavier(), 0.21),
    ],
)
def test_few_random_factors_have_a_cause(block, parameter, recipe, highest):
    """The share of factors between 1/10 and 10, at an error of 1 %, that are within 3 % of a candidate's."""
    known = candidates(parameter=parameter, block=block, recipe=recipe, width=WIDTH, layers=LAYERS)
    grid = np.linspace(-math.log(10), math.log(10), 100_001)
    near = np.abs(grid[:, None] - np.log([each.factor for each in known])) <= 0.03
    assert near.any(axis=1).mean() < highest


# In words.

E = np.full(LAYERS, 0.01)


def of_last(kind, sds, units):
    return Found(kind, math.sqrt(units) * np.broadcast_to(sds, LAYERS), E, units, gain=WIDTH * 0.0004)


@pytest.mark.parametrize(
    ("sds", "words"),
    [
        (0.02, "0.0200 = 0.02: not scaled with depth, all layers alike"),
        (0.02 / math.sqrt(24), "0.00408 = 0.02/√24, all layers alike"),
        (0.02 / math.sqrt(12), "0.00577 = 0.02/√12, all layers alike"),
        ((3 * 3072) ** -0.5, "0.0104 = 1/√(3 · 3072), the default of torch.nn.Linear: not scaled with depth"),
        (3072**-0.5 / math.sqrt(24), "0.00368 = 1/√3072, of fan_in, over √24, all layers alike"),
        (0.0123, "0.0123, all layers alike"),
        (0.02 / np.sqrt(np.arange(1, 13)), "0.0200 in the first layer, times (layer + 1)^(-0.50 ± 0.00)"),
        (np.where(np.arange(12) == 3, 0.03, 0.02), "0.0200 in layer 0 to 0.0300 in layer 3: layers differ"),
    ],
)
def test_last_matrices_in_words(sds, words):
    found = in_words([of_last("mlp", sds, 3072)], width=WIDTH, sd=0.02)
    assert found.startswith(f"mlp branches {words}"), found


def test_both_kinds_in_words():
    both = [of_last("attention", 0.02 / math.sqrt(24), 768), of_last("mlp", 0.02, 3072)]
    assert in_words(both, width=WIDTH) == (
        "attention branches 0.00408 = 0.02/√24, all layers alike; mlp branches 0.0200 = 0.02: not scaled with depth,"
        " all layers alike (if first matrices have 0.0200)"
    )


def test_layers_that_differ_by_chance_are_alike():
    rng = np.random.default_rng(0)
    alike = sum(
        "all layers alike" in in_words([of_last("mlp", 0.02 * np.exp(E * rng.standard_normal(12)), 3072)], width=WIDTH)
        for _ in range(200)
    )
    assert stats.binom.cdf(alike, 200, 0.99) >= share()
