"""Models that are initialised by a recipe: what is drawn, for each library, and what is refused."""

import dataclasses
import math

import equinox as eqx
import equinox_transformer as small
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from budget import assert_estimate
from flax import nnx

import sdeinfer as si
from sdeinfer.auditing import Recipe, declared, describe, recipe_for, standard_deviations
from sdeinfer.auditing._initialise import initialise

VALUES = {"attention.strength": 0.3, "attention.temperature": 0.5, "mlp.strength": 0.6, "mlp.gain": 2.0}
BLOCKS = small.blocks().with_parameters(VALUES)
RECIPE = recipe_for(BLOCKS)


class FlaxLayer(nnx.Module):
    def __init__(self, rngs):
        n = small.WIDTH
        self.norms = nnx.List([nnx.LayerNorm(n, use_bias=False, use_scale=False, rngs=rngs) for _ in range(2)])
        self.attn = nnx.MultiHeadAttention(small.HEADS, n, decode=False, use_bias=False, rngs=rngs)
        self.linear1 = nnx.Linear(n, 4 * n, use_bias=False, rngs=rngs)
        self.linear2 = nnx.Linear(4 * n, n, use_bias=False, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.norms[0](x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.linear2(nnx.gelu(self.linear1(self.norms[1](x))))


class FlaxTransformer(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([FlaxLayer(rngs) for _ in range(small.LAYERS)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def biased(variance):
    """The blocks with biases of every matrix."""
    return si.Stack(
        tuple(
            dataclasses.replace(block, bias=variance, branch=dataclasses.replace(block.branch, bias=variance))
            for block in BLOCKS.layers
        )
    )


SDS = {
    "query": math.sqrt(1 / (0.5 * small.WIDTH)),
    "key": math.sqrt(1 / (0.5 * small.WIDTH)),
    "value": math.sqrt(1 / small.WIDTH),
    "attention output": 0.3 / math.sqrt(small.WIDTH),
    "up": math.sqrt(2 / small.WIDTH),
    "mlp output": 0.6 / math.sqrt(4 * small.WIDTH),
}
"""Standard deviations of `BLOCKS`: √(w/(τ n)) of queries and keys, √(w/n), and g/√u of last matrices."""


def assert_drawn(arrays):
    """Arrays of normals have the standard deviations of their matrices."""
    for role, values in arrays.items():
        flat = np.ravel(values)
        assert_estimate(flat.std() / SDS[role], 1, 1 / math.sqrt(2 * flat.size))
        assert_estimate(flat.mean() / SDS[role], 0, 1 / math.sqrt(flat.size))


def weights_of_equinox(layer):
    attn, mlp = layer.attn, layer.mlp.layers
    modules = (attn.query_proj, attn.key_proj, attn.value_proj, attn.output_proj, *mlp)
    return [module.weight for module in modules]


def weights_of_flax(layer):
    modules = (layer.attn.query, layer.attn.key, layer.attn.value, layer.attn.out, layer.linear1, layer.linear2)
    return [module.kernel[...] for module in modules]


@pytest.mark.parametrize(
    ("library", "before", "prompt", "weights"),
    [
        ("equinox", small.Transformer(jr.key(0)), small.prompt(), weights_of_equinox),
        ("flax", FlaxTransformer(nnx.Rngs(0)), small.prompt()[None], weights_of_flax),
    ],
    ids=["equinox", "flax"],
)
def test_a_model_is_drawn_and_passes(library, before, prompt, weights):
    first = weights(before.layers[0])
    found = initialise(before, RECIPE, prompt, architecture=small.blocks(), width=small.WIDTH, seed=1)
    assert found.audit is not None
    assert found.audit.passed, found.audit
    assert str(found).startswith(f"{6 * small.LAYERS} matrices drawn; passed: ")
    assert all(np.array_equal(a, b) for a, b in zip(first, weights(before.layers[0]), strict=True))
    drawn = zip(*(weights(layer) for layer in found.model.layers), strict=True)
    assert_drawn(dict(zip(SDS, map(np.array, drawn), strict=True)))
    table = found.matrices
    assert table[table["layer"] == 0].set_index("matrix")["sd"].to_dict() == pytest.approx(SDS)
    described = describe(found.model, architecture=small.blocks())
    assert described.library == library
    assert [kind for kind, *_ in described.branches(found.model)] == ["attention", "mlp"] * small.LAYERS
    assert all(a is b for a, b in zip(described.layers(found.model), found.model.layers, strict=True))
    second = {"equinox": ["layers.1.attn", "layers.1.mlp"], "flax": ["layers.1.attn", "layers.1.linear1"]}[library]
    assert found.audit.data["name"].values.tolist()[2:4] == second


def test_the_recipe_of_blocks_declares_them():
    """`declared` is the inverse, with biases too."""
    attention = si.blocks.SelfAttention(temperature=0.7, gain=1.5, heads=4, key_value_heads=2, bias=0.2)
    mlp = si.blocks.MLP(gain=0.8, activation="silu", gated=True, bias=0.1)
    blocks = si.Stack((si.blocks.Block(attention, strength=0.3, bias=0.05), si.blocks.Block(mlp, strength=0.6)))
    again = declared(blocks, recipe_for(blocks), width=64, layers=5)
    assert {name: float(x) for name, x in again.parameters().items()} == pytest.approx(
        {name: float(x) for name, x in blocks.parameters().items()}
    )
    for one, other in zip(again.layers, blocks.layers, strict=True):
        assert float(one.branch.gain) == pytest.approx(float(other.branch.gain))
        assert (one.bias, one.branch.bias) == pytest.approx((other.bias, other.branch.bias))
    post = si.Stack(tuple(si.blocks.Block(b.branch, skip=2.0, position="post") for b in blocks.layers))
    assert {block.skip for block in declared(post, recipe_for(post), width=64, layers=5).layers} == {2.0}


class Layers(eqx.Module):
    layers: list

    def __call__(self, x):
        for each in self.layers:
            x = x + each(x)
        return x


class Fused(eqx.Module):
    """Attention with one array for queries, keys and values, in order or interleaved by head."""

    qkv: eqx.nn.Linear | None
    query_key_value: eqx.nn.Linear | None
    out_proj: eqx.nn.Linear

    def __init__(self, *, interleaved, outputs=12):
        fused = eqx.nn.Linear(4, outputs, key=jr.key(0))
        self.qkv, self.query_key_value = (None, fused) if interleaved else (fused, None)
        self.out_proj = eqx.nn.Linear(4, 4, key=jr.key(0))

    def __call__(self, x):
        return x


def test_arrays_of_several_matrices():
    """Queries, keys and values have their own standard deviations."""
    sds = {"query": 1.0, "key": 1e3, "value": 1e6, "attention output": 1.0}
    recipe = Recipe("by matrix", "test", lambda matrix: sds[matrix.role], lambda matrix: sds[matrix.role])
    architecture = si.blocks.Block(si.blocks.SelfAttention(heads=2))
    arguments = {"branches": {"attention": "layers.*"}, "architecture": architecture, "audited": False}
    model = Layers([Fused(interleaved=each) for each in (False, True)])
    plain, interleaved = initialise(model, recipe, **arguments).model.layers
    for linear, expected in (
        (plain.qkv, [0] * 4 + [1] * 4 + [2] * 4),
        (interleaved.query_key_value, [0, 0, 1, 1, 2, 2] * 2),
    ):
        assert np.rint(np.log10(np.abs(linear.weight).max(axis=1)) / 3).tolist() == expected
        assert linear.weight.dtype == jnp.zeros(()).dtype
        assert np.abs(linear.bias).max() > 1e4
    # Falcon's groups of keys have another layout.
    grouped = si.blocks.Block(si.blocks.SelfAttention(heads=2, key_value_heads=1))
    with pytest.raises(si.InputError, match="model: the layout of layers.0.query_key_value is not known"):
        initialise(Layers([Fused(interleaved=True, outputs=8)]), recipe, **arguments | {"architecture": grouped})


def test_a_recipe_for_each_layer():
    """Strengths that differ between layers are audited each by its own."""
    recipes = [recipe_for(BLOCKS.with_parameters({"mlp.strength": 0.3 * (layer + 1)})) for layer in range(small.LAYERS)]
    arguments = {"architecture": small.blocks(), "inputs": small.prompt()}
    found = initialise(small.Transformer(jr.key(0)), recipes, **arguments)
    assert found.audit is not None
    assert found.audit.passed, found.audit
    last = found.matrices[found.matrices["matrix"] == "mlp output"]["sd"].to_numpy()
    np.testing.assert_allclose(last / last[0], [1, 2, 3])
    table = standard_deviations(BLOCKS, recipes, width=small.WIDTH)
    np.testing.assert_allclose(table[table["matrix"] == "mlp output"]["sd"], last)
    assert standard_deviations(BLOCKS, [RECIPE] * 3, width=small.WIDTH)["layer"].unique().tolist() == ["all"]


def test_biases_are_drawn_where_there_are_any():
    """Attention of Flax has biases of (heads, size)."""
    attention = si.blocks.Block(BLOCKS.layers[0].branch, bias=0.3, strength=0.3)
    attention = dataclasses.replace(attention, branch=dataclasses.replace(attention.branch, bias=0.2))

    class Layers(nnx.Module):
        def __init__(self):
            self.attn = nnx.List([nnx.MultiHeadAttention(4, 64, decode=False, rngs=nnx.Rngs(0)) for _ in range(9)])

    arguments = {"branches": {"attention": "attn.*"}, "architecture": attention, "audited": False}
    layers = initialise(Layers(), recipe_for(attention), **arguments).model.attn
    for name, variance in (("query", 0.4), ("value", 0.2), ("out", 0.3)):
        found = np.ravel([getattr(layer, name).bias[...] for layer in layers])
        assert_estimate(found.std() / math.sqrt(variance), 1, 1 / math.sqrt(2 * found.size))


def test_roles_may_be_given():
    class Unusual(eqx.Module):
        first: eqx.nn.Linear
        second: eqx.nn.Linear

        def __call__(self, x):
            return jax.vmap(self.second)(jax.nn.gelu(jax.vmap(self.first)(x)))

    def linear(a, b):
        return eqx.nn.Linear(a, b, use_bias=False, key=jr.key(0))

    model = Layers([Unusual(linear(8, 32), linear(32, 8)) for _ in range(2)])
    arguments = {"branches": {"mlp": "layers.*"}, "architecture": si.blocks.Block(si.blocks.MLP()), "audited": False}
    with pytest.raises(si.InputError, match=r"model: what layers.0.first is in its branch is not known; name it, as"):
        initialise(model, RECIPE, **arguments)
    found = initialise(model, RECIPE, roles={"*.first": "up", "*.second": "mlp output"}, **arguments)
    assert found.audit is None
    assert found.matrices["fan_in"].tolist() == [8, 32] * 2
    assert jnp.abs(found.model.layers[0].first.weight).max() > 1


PLAIN = si.audit.recipes.normal()
UNUSABLE = [
    ({role: 0.02 for role in ("query", "key", "value")}, "attention output, got none"),
    ({"query": "small"}, "needed for query, got 'small'"),
    (si.audit.recipes.gpt2(0.0), "standard deviation of the query must be positive, and is 0.0 in gpt2"),
    (dataclasses.replace(PLAIN, multiplier=lambda layers: 0.0), "multiplier must be positive"),
    (dataclasses.replace(PLAIN, bias_sd=lambda matrix: float(matrix.role == "key")), "not in proportion to their"),
    ("gpt3", "one of gpt2, normal, pytorch"),
    ("mup", r"mup needs base_width: pass si\.audit\.recipes\.mup\(base_width=256\)"),
    ("completep", r"base_width and base_layers: pass .*completep\(base_width=256, base_layers=2\)"),
    ("shaped", "si.fit"),
    (0.02, "a name, a Recipe or a dict"),
]


def shared():
    """A model two of whose layers have one array."""
    model = small.Transformer(jr.key(0))
    first, second = (lambda each, layer=layer: each.layers[layer].mlp.layers[0].weight for layer in (0, 1))
    return eqx.tree_at(second, model, first(model))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model": shared()}, "layers.0.mlp.layers.0 and layers.1.mlp.layers.0 are one array"),
        *(({"recipe": recipe}, message) for recipe, message in UNUSABLE),
        ({"recipe": [RECIPE] * 2}, "recipe: 2 were given for 3 layers"),
        ({"width": 64}, "width: Transformer has 32, and 64 is needed"),
        (
            {"recipe": [recipe_for(BLOCKS.with_parameters({"mlp.gain": x})) for x in (1.0, 2.0, 3.0)]},
            "recipe: those of",
        ),
        ({"architecture": si.Stack(BLOCKS.layers[:1])}, "model: layers.0.mlp is of the kind mlp, which the given "),
        (
            {"architecture": si.Stack((BLOCKS.layers[0], si.blocks.Block(si.blocks.MLP(expansion=2))))},
            r"model: layers.0.mlp.layers.0 has the shape \(128, 32\), where its blocks have 32 inputs and 64 outputs",
        ),
        (
            {"architecture": si.Stack((BLOCKS.layers[0], si.blocks.Block(si.blocks.MLP(gated=True))))},
            "model: the mlp branch at layers.0.mlp has 0 arrays for the gate, where its block has 1",
        ),
        ({"recipe": recipe_for(biased(0.1))}, "model: layers.0.attn.query_proj has no bias, where the recipe has one"),
        (
            {"recipe": [recipe_for(biased(0.1).with_parameters({"mlp.strength": x})) for x in (1.0, 2.0, 3.0)]},
            "recipe: those of layers may differ in strengths alone, not in gains, temperatures or biases",
        ),
        ({"roles": {"*.upproj": "up"}}, r"roles: '\*.upproj' matches no module"),
        ({"roles": {"*.attn": "upp"}}, r"roles: one of query, .* is needed for '\*.attn', got 'upp'"),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_bad_input_is_refused_in_one_line(changed, message):
    arguments = {"model": small.Transformer(jr.key(0)), "recipe": RECIPE, "architecture": small.blocks()} | changed
    with pytest.raises(si.InputError, match=message) as caught:
        initialise(**arguments, audited=False)
    assert "\n" not in str(caught.value)
