"""Recipes on sizes by hand, and the blocks that follow from them against networks with these weights."""

import dataclasses
import math

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from block_references import rotated
from budget import assert_mean
from conftest import random_covariance
from flax import nnx
from references import packed
from scipy import special

import sdeinfer as si
from sdeinfer.auditing import Matrix, Recipe, declared, standard_deviations
from sdeinfer.blocks import MLP, Block, SelfAttention

completep, deepnet, gpt2, kaiming, lecun, mup, normal, pytorch, pytorch_linear, t_fixup, xavier = (
    getattr(si.audit.recipes, name)
    for name in "completep deepnet gpt2 kaiming lecun mup normal pytorch pytorch_linear t_fixup xavier".split()
)
WIDTH, LAYERS = 64, 8
LAYER = si.Stack((Block(SelfAttention(heads=4, key_value_heads=2), norm="layer"), Block(MLP(), norm="layer")))
"""Queries are 64 × 64, keys and values 64 × 32, the MLP 64 × 256 and 256 × 64; d_k is 16."""

BY_HAND = {
    # query, key, value, attention output, up, mlp output
    "gpt2": (gpt2(), [0.02, 0.02, 0.02, 0.005, 0.02, 0.005]),
    "gpt2 of another sd": (gpt2(0.1), [0.1, 0.1, 0.1, 0.025, 0.1, 0.025]),
    "normal": (normal(), [0.02] * 6),
    "pytorch": (pytorch(), [128**-0.5] * 3 + [192**-0.5, 192**-0.5, 768**-0.5]),
    "pytorch_linear": (pytorch_linear(), [192**-0.5] * 5 + [768**-0.5]),
    "lecun": (lecun(), [0.125] * 5 + [0.0625]),
    "xavier": (xavier(), [0.125, 48**-0.5, 48**-0.5, 0.125, 160**-0.5, 160**-0.5]),
    "xavier of gain ½": (xavier(0.5), [0.0625, 192**-0.5, 192**-0.5, 0.0625, 640**-0.5, 640**-0.5]),
    "kaiming": (kaiming(), [32**-0.5] * 5 + [128**-0.5]),
    "kaiming of fan_out": (kaiming("linear", "fan_out"), [0.125, 32**-0.5, 32**-0.5, 0.125, 0.0625, 0.125]),
    "mup": (mup(base_width=16), [0.01] * 6),
    "completep": (completep(base_width=16, base_layers=2), [0.01] * 6),
    # β = 64^−¼ = 8^−½
    "deepnet": (deepnet(), [0.125, 48**-0.5, 384**-0.5, 512**-0.5, 1280**-0.5, 1280**-0.5]),
    "t_fixup": (t_fixup(), [0.125, 0.144338, 0.0575019, 0.0497981, 0.0314951, 0.0314951]),
    "t_fixup of a decoder": (t_fixup(decoder=True), [0.125, 0.144338, 0.0495502, 0.0429117, 0.0271398, 0.0271398]),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_standard_deviations_are_those_by_hand(name):
    recipe, expected = BY_HAND[name]
    table = standard_deviations(LAYER, [recipe] * LAYERS, width=WIDTH)
    assert table["matrix"].tolist() == ["query", "key", "value", "attention output", "up", "mlp output"]
    np.testing.assert_allclose(table["sd"], expected, rtol=1e-5)


def matrix(role, fan_in=64, fan_out=64):
    return Matrix(role, fan_in, fan_out, WIDTH, LAYERS)


DEEP = completep(base_width=16, base_layers=2)
UP, OUT, LAST = matrix("up", 64, 256), matrix("mlp output", 256, 64), matrix("attention output")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([pytorch().bias_sd(each) for each in (UP, OUT, LAST)], [192**-0.5, 768**-0.5, 0]),
        ([pytorch_linear().bias_sd(each) for each in (UP, OUT, LAST)], [192**-0.5, 768**-0.5, 192**-0.5]),
        ([pytorch_linear(biases=False).bias_sd(LAST), pytorch(biases=False).bias_sd(UP)], [0, 0]),
        (deepnet(pytorch_linear()).bias_sd(UP), (192 * 8) ** -0.5),
        (deepnet().skip(LAYERS), 2),
        (mup(base_width=16).temperature(16), 4),
        (mup(base_width=16, base_head_size=4).temperature(16), 2),
        ([DEEP.multiplier(8), DEEP.temperature(16)], [0.25, 4]),
        (completep(base_width=16, base_layers=2, alpha=0.5).multiplier(8), 0.5),
        (t_fixup(query_key_gain=math.sqrt(0.5)).sd(matrix("query")), 128**-0.5),
    ],
)
def test_what_beside_weights_a_recipe_gives(found, expected):
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("recipe", "kernel"),
    [
        (lecun(), lambda: nnx.Linear(64, 256, rngs=nnx.Rngs(0)).kernel[...]),
        (pytorch_linear(), lambda: eqx.nn.Linear(64, 256, key=jr.key(0)).weight),
    ],
    ids=["flax", "equinox"],
)
def test_the_defaults_of_libraries(recipe, kernel):
    assert_mean(np.ravel(kernel()) ** 2, recipe.sd(UP) ** 2)


# Mean increments, against networks with weights and biases of these standard deviations.

TOKENS, SMALL = 3, 8
DRAWS = 20_000
V3 = np.asarray(random_covariance(TOKENS))


@dataclasses.dataclass(frozen=True)
class Case:
    block: Block
    sds: dict[str, float]
    bias_sds: dict[str, float] = dataclasses.field(default_factory=dict)
    multiplier: float = 1.0
    temperature: float = 1.0

    @property
    def recipe(self) -> Recipe:
        return Recipe(
            "case",
            "this test",
            lambda matrix: self.sds[matrix.role],
            lambda matrix: self.bias_sds.get(matrix.role, 0.0),
            multiplier=lambda layers: self.multiplier,
            temperature=lambda size: self.temperature,
        )


GQA = SelfAttention(heads=2, key_value_heads=1, head_size=4, pattern=si.CAUSAL)
ATTENTION_SDS = {"query": 0.5, "key": 0.3, "value": 0.7, "attention output": 0.2}
MLP_SDS = {"gate": 0.6, "up": 0.3, "mlp output": 0.2}
CASES = {
    "queries, keys and values of three variances": Case(Block(GQA), ATTENTION_SDS, multiplier=0.5, temperature=0.4),
    "biases of attention": Case(
        Block(GQA),
        ATTENTION_SDS | {"key": 1.0},
        # In proportion to the weights; those of the last matrix are free.
        {"query": 0.4, "key": 0.8, "value": 0.56, "attention output": 0.3},
        multiplier=1.5,
    ),
    "rotations and a head size that does not divide n": Case(
        Block(dataclasses.replace(GQA, rope=10.0, head_size=6)), ATTENTION_SDS | {"key": 1.0}
    ),
    "MLP with biases": Case(Block(MLP(expansion=2.0)), MLP_SDS, {"up": 0.5, "mlp output": 0.3}, multiplier=0.5),
    "gate and what it multiplies of two variances": Case(
        Block(MLP(activation="silu", gated=True, expansion=1.5)), MLP_SDS
    ),
    "biases of a gated MLP": Case(
        Block(MLP(activation="silu", gated=True, expansion=1.5)), MLP_SDS, {"gate": 0.8, "up": 0.4, "mlp output": 0.1}
    ),
}


def drawn(case: Case, X: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Increments of networks with these weights, of shape (draws, m, n); sizes are written out here once more."""

    def linear(x, role, outputs):
        W = case.sds[role] * rng.standard_normal((DRAWS, x.shape[-1], outputs))
        return x @ W + case.bias_sds.get(role, 0.0) * rng.standard_normal((DRAWS, 1, outputs))

    branch = case.block.branch
    if isinstance(branch, MLP):
        units = {2.0: 16, 1.5: 12}[branch.expansion]
        if branch.gated:
            gate = linear(X, "gate", units)
            h = gate * special.expit(gate) * linear(X, "up", units)
        else:
            z = linear(X, "up", units)
            h = z * special.ndtr(z)
        return case.multiplier * linear(h, "mlp output", SMALL)
    size = branch.head_size
    q, k, v = linear(X, "query", 2 * size), linear(X, "key", size), linear(X, "value", size)
    turned = (lambda x: rotated(x, branch.rope)) if branch.rope else (lambda x: x)
    heads = []
    for q_of_head in (q[..., :size], q[..., size:]):
        logits = turned(q_of_head) @ turned(k).transpose(0, 2, 1) / (case.temperature * math.sqrt(size))
        heads.append(special.softmax(np.where(np.tri(TOKENS) > 0, logits, -np.inf), axis=-1) @ v)
    return case.multiplier * linear(np.concatenate(heads, axis=-1), "attention output", SMALL)


@pytest.mark.parametrize("name", CASES)
def test_declared_blocks_have_the_mean_increments_of_these_weights(name):
    case = CASES[name]
    (block,) = declared(si.Stack((case.block,)), case.recipe, width=SMALL, layers=1).layers
    rng = np.random.default_rng(0)
    X = np.linalg.cholesky(V3) @ np.linalg.qr(rng.standard_normal((SMALL, TOKENS)))[0].T * math.sqrt(SMALL)
    increments = drawn(case, X, rng)
    nodes = block.branch.nodes(TOKENS, SMALL, log2=14)
    hidden = block.branch.moments(jnp.asarray(V3), nodes, width=SMALL)
    mean = block.strength**2 * hidden.mean + block.bias
    a, b = np.triu_indices(TOKENS)
    found = np.einsum("dac,dbc->dab", increments, increments)[:, a, b] / SMALL
    assert_mean(found, packed(mean))


SHAPED = si.Stack((si.ShapedAttention(gamma=0.5, tau0=1.0),))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kaiming("gelu"), "nonlinearity: one of linear"),
        (lambda: kaiming(mode="fan"), "mode: 'fan_in' or 'fan_out'"),
        (lambda: mup(base_width=0), "base_width: a whole number of at least 1"),
        (lambda: completep(base_width=1, base_layers=0), "base_layers: a whole number of at least 1"),
        (lambda: declared(SHAPED, normal(), width=WIDTH, layers=1), "blocks of SelfAttention and MLP"),
        (lambda: declared(LAYER, normal(), width=63, layers=1), "not a multiple of 4"),
    ],
)
def test_unusable_arguments_of_recipes_are_refused(call, message):
    with pytest.raises(si.InputError, match=message):
        call()
