"""Causes of factors that wrong recipes make, and how many a random factor finds."""

import dataclasses
import math

import numpy as np
import pytest

import sdeinfer as si
from sdeinfer.auditing import Recipe, declared
from sdeinfer.auditing._causes import candidates, causes
from sdeinfer.auditing._estimates import Likelihood
from sdeinfer.auditing._judge import Found, in_words
from sdeinfer.blocks import MLP, Block, SelfAttention
from sdeinfer.blocks._coefficients import LOG_FACTORS

completep, deepnet, gpt2, kaiming, lecun, mup, normal, pytorch, pytorch_linear, xavier = (
    getattr(si.audit.recipes, name)
    for name in "completep deepnet gpt2 kaiming lecun mup normal pytorch pytorch_linear xavier".split()
)
WIDTH, LAYERS, DECLARED = 768, 12, 0.3
ATTENTION = Block(SelfAttention(heads=12), norm="layer")
GQA = Block(SelfAttention(heads=12, key_value_heads=4), norm="layer")
GELU = Block(MLP(activation="gelu"), norm="layer")
SWIGLU = Block(MLP(activation="silu", gated=True, expansion=8 / 3), norm="rms")


def of_roles(recipe: Recipe, other: Recipe, *roles: str) -> Recipe:
    """A recipe with the standard deviations of another for some matrices."""
    return dataclasses.replace(recipe, sd=lambda matrix: (other if matrix.role in roles else recipe).sd(matrix))


def of_fans(fan) -> Recipe:
    """Variance 1/fan."""
    return dataclasses.replace(lecun(), sd=lambda matrix: fan(matrix) ** -0.5)


def sd_times(recipe: Recipe, factor: float) -> Recipe:
    return dataclasses.replace(recipe, sd=lambda matrix: factor * recipe.sd(matrix))


def parameters(block: Block, built: Recipe, said: Recipe) -> tuple[float, float]:
    """Strength and shape of a block over the declared ones."""
    (one,), (other,) = (declared(si.Stack((block,)), each, width=WIDTH, layers=LAYERS).layers for each in (built, said))
    strength, gain = float(one.strength / other.strength), float(one.branch.gain / other.branch.gain)
    if isinstance(one.branch, MLP):
        return strength, gain
    # The gain of attention is not free: that of the values is a factor of the strength, the others of the temperature.
    return strength * math.sqrt(gain), float(one.branch.temperature / other.branch.temperature) / gain


def likelihood(strength: float, shape: float, *, sd: float = 0.003, shape_sd: float = 0.02) -> Likelihood:
    """Normal in the logs of both."""
    quadratic, log_shape = -1 / (8 * sd**2), LOG_FACTORS - math.log(shape)
    linear = -4 * quadratic * math.log(strength * DECLARED)
    row = [linear**2 / (4 * quadratic), linear, quadratic]
    return Likelihood(DECLARED, np.stack([[*row, -((x / shape_sd) ** 2) / 2] for x in log_shape]))


NORMAL, XAVIER, LINEAR, MUP = normal(), xavier(), pytorch_linear(biases=False), mup(base_width=192)
DEEP = mup(base_width=192, base_head_size=1), completep(base_width=192, base_layers=2)
NO_ROOT = dataclasses.replace(NORMAL, temperature=lambda size: size**-0.5)
BY_SIZE = dataclasses.replace(NORMAL, temperature=MUP.temperature)
FAN_OUT = of_fans(lambda matrix: matrix.fan_out)
LAST_FAN_OUT = of_fans(lambda matrix: matrix.fan_out if matrix.last else matrix.fan_in)


def first_and_last(first: int, last: int) -> Recipe:
    return of_fans(lambda matrix: last if matrix.last else first)


QUERY_KEY = ("query", "key")
MISTAKES = [
    (GELU, NORMAL, gpt2(), "√(2L) = 4.90: the factor 1/√(2L) of the mlp output matrix is missing"),
    (ATTENTION, NORMAL, gpt2(), "√(2L) = 4.90: the factor 1/√(2L) of the attention output matrix"),
    (GELU, gpt2(), NORMAL, "1/√(2L) = 0.204: the mlp output matrix: a scale of 1/√(2L) that"),
    (SWIGLU, LINEAR, gpt2(), "all matrices: the default 1/√(3 fan_in)"),
    (ATTENTION, LINEAR, NORMAL, "all matrices: the default 1/√(3 fan_in)"),
    (GELU, of_roles(NORMAL, LINEAR, "mlp output"), NORMAL, "the mlp output matrix: the default"),
    (ATTENTION, sd_times(gpt2(), 3**-0.5), gpt2(), "1/3 = 0.333: all matrices: the standard deviation is taken for"),
    (ATTENTION, of_roles(NORMAL, sd_times(NORMAL, 3**0.5), *QUERY_KEY), NORMAL, "0.333: the query and key"),
    (GELU, NORMAL, XAVIER, "a standard deviation of 0.02, the default of many configurations"),
    (GELU, NORMAL, MUP, "4.00: the factor √(base_width/n) of the up and mlp output matrices is missing"),
    (GELU, lecun(), kaiming(), "0.500: the factor gain of the up and mlp output matrices is missing"),
    (GELU, kaiming(), lecun(), "2.00: the up and mlp output matrices: a gain √2, as for ReLU"),
    (ATTENTION, XAVIER, deepnet(), "9.80: the factor β = (8L)^−¼ of the value and attention output"),
    (GELU, *DEEP, "6.00: the factor (L/base_layers)^−1 of the mlp output matrix is missing"),
    (SWIGLU, FAN_OUT, lecun(), "0.375: all matrices: fan_in and fan_out are exchanged"),
    (SWIGLU, LAST_FAN_OUT, lecun(), "σ of exchanged fans/σ = 1.63: the mlp output matrix: fan_in and fan_out are"),
    (GQA, first_and_last(768, 256), lecun(), "σ of grouped heads/σ = 1.73: the attention output matrix: fan_in is"),
    (ATTENTION, first_and_last(64, 768), lecun(), "σ of d_k/σ = 3.46: the query, key and value matrices: fan_in is"),
    (ATTENTION, first_and_last(3 * 768, 768), lecun(), "0.577: queries, keys and values are initialised as one matr"),
    (ATTENTION, of_roles(XAVIER, pytorch(), *QUERY_KEY, "value"), XAVIER, "0.707: queries, keys and values are ini"),
    (ATTENTION, NO_ROOT, NORMAL, "1/√d_k = 0.125: 1/√d_k of the logits is missing"),
    (ATTENTION, NORMAL, BY_SIZE, "1/8.00 = 0.125: logits are divided by √d_k"),
]


@pytest.mark.parametrize("case", MISTAKES, ids=lambda case: f"{case[1].name} for {case[2].name}")
def test_mistakes_are_found(case):
    block, built, said, sentence = case
    strength, shape = parameters(block, built, said)
    found = causes(likelihood(strength, shape), block=block, recipe=said, width=WIDTH, layers=LAYERS)
    assert any(sentence in each.sentence for each in found), (strength, shape, found)
    for each in found:
        assert abs(math.log(each.strength / strength)) <= 0.009
        assert abs(math.log(each.shape / shape)) <= 0.06


def of_gpt2(strength, sd, shape=1.0, **settings):
    found = likelihood(strength, shape, sd=sd, **settings)
    return causes(found, block=GELU, recipe=gpt2(), width=WIDTH, layers=LAYERS)


def test_a_factor_is_explained_within_its_error_and_three_percent():
    root = math.sqrt(24)
    assert len(of_gpt2(root * math.exp(0.0089), 0.003)) == 1
    assert not of_gpt2(root * math.exp(0.0091), 0.003)
    assert len(of_gpt2(root * math.exp(0.029), 0.012)) == 1
    assert not of_gpt2(root * math.exp(0.031), 0.012)
    assert len(of_gpt2(root * math.exp(0.039), 0.02)) == 1
    assert not of_gpt2(1.02, 0.01)
    # The shape that belongs to it.
    assert not of_gpt2(root, 0.003, shape=math.exp(0.07))
    assert of_gpt2(root, 0.003, shape=math.exp(0.05))


def test_gains_beyond_the_grid_are_factors_of_the_strength():
    """The factor of the increments where GELU is linear: g √w."""
    sigma, gain = 0.02 / math.sqrt(24), 0.0004
    within = math.exp(LOG_FACTORS[0])
    found = of_gpt2(sigma * math.sqrt(gain / within), 0.003, shape=within)
    assert any("the up and mlp output matrices: the variance is taken" in each.sentence for each in found)


@pytest.mark.parametrize(
    ("block", "recipe", "highest"),
    [(ATTENTION, gpt2(), 0.15), (GELU, gpt2(), 0.15), (ATTENTION, xavier(), 0.18), (GQA, xavier(), 0.21)],
)
def test_few_random_factors_have_a_cause(block, recipe, highest):
    """The share of strengths between 1/10 and 10, at an error of 1 % and the declared shape, that have a cause."""
    known = candidates(block=block, recipe=recipe, width=WIDTH, layers=LAYERS)
    grid = np.linspace(-math.log(10), math.log(10), 100_001)
    near = [np.abs(grid - math.log(each.strength)) <= 0.03 for each in known if abs(math.log(each.shape)) < 0.06]
    share_of_grid = np.any(near, axis=0).mean()
    assert 0 < share_of_grid < highest


# In words.

E = np.full(LAYERS, 0.01)


def of_last(kind, sds, units):
    return Found(kind, math.sqrt(units) * np.broadcast_to(sds, LAYERS), E, units, gain=WIDTH * 0.0004)


@pytest.mark.parametrize(
    ("sds", "words"),
    [
        (0.02, "0.0200 = 0.02: not scaled with depth, all layers alike"),
        (0.02 / math.sqrt(24), "0.00408 = 0.02/√24, all layers alike"),
        ((3 * 3072) ** -0.5, "0.0104 = 1/√(3 · 3072), the default of torch.nn.Linear: not scaled with depth"),
        (3072**-0.5 / math.sqrt(24), "0.00368 = 1/√3072, of fan_in, over √24, all layers alike"),
        (0.02 / np.sqrt(np.arange(1, 13)), "0.0200 in the first layer, times (layer + 1)^(-0.50 ± 0.00)"),
        (np.where(np.arange(12) == 3, 0.03, 0.02), "0.0200 in layer 0 to 0.0300 in layer 3: layers differ"),
    ],
)
def test_last_matrices_in_words(sds, words):
    found = in_words([of_last("mlp", sds, 3072)], width=WIDTH, sd=0.02)
    assert found.startswith(f"mlp branches {words}"), found
