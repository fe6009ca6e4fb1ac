"""Branches and blocks of models, found by names and told by configurations, against those written by hand."""

from types import SimpleNamespace

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import pytest

import sdeinfer as si
from sdeinfer.auditing._describe import describe, drawn
from sdeinfer.auditing._find import find, module_at, modules
from sdeinfer.auditing._inputs import check_inputs, default_inputs
from sdeinfer.auditing._structure import of_configuration
from sdeinfer.blocks import MLP, Block, SelfAttention

TOKENS, WIDTH = 3, 8
X = jr.normal(jr.key(1), (TOKENS, WIDTH))
DECLARED = si.Stack((Block(SelfAttention(heads=2), norm="layer"), Block(MLP(activation="relu"), norm="layer")))


class Tree:
    """A module of a library with `named_children`."""

    def __init__(self, /, **inside):
        self.inside = inside

    def named_children(self):
        yield from self.inside.items()

    def __getattr__(self, name):
        try:
            return self.__dict__["inside"][name]
        except KeyError as error:
            raise AttributeError(name) from error

    def __call__(self):
        raise NotImplementedError


class ModuleDict(Tree):
    """A container of PyTorch: a module that is never called."""


class OtherLayer(Tree):
    pass


class MultiheadAttention(Tree):
    pass


class LayerScale(Tree):
    pass


def tree(*paths):
    """A tree with modules at these paths."""
    inside = {}
    for path in paths:
        name, _, rest = path.partition(".")
        inside.setdefault(name, []).extend([rest] if rest else [])
    return Tree(**{name: tree(*rest) for name, rest in inside.items()})


LAYERS = {
    "gpt2": (("ln_1", "attn.c_proj", "mlp.c_proj"), ("attn", "attn"), ("mlp", "mlp")),
    "llama": (("self_attn", "mlp", "post_attention_layernorm"), ("self_attn", "self_attn"), ("mlp", "mlp")),
    "bert": (
        ("attention.self", "attention.output.dense", "intermediate.dense", "output.dense"),
        ("attention.self", "attention.output.dense"),
        ("intermediate.dense", "output.dense"),
    ),
    "vit of old": (
        ("attention.attention", "attention.output.dense", "intermediate.dense", "output.dense"),
        ("attention", "attention"),
        ("intermediate.dense", "output.dense"),
    ),
    "neox": (("attention.dense", "mlp"), ("attention", "attention"), ("mlp", "mlp")),
    "opt": (("self_attn", "fc1", "fc2"), ("self_attn", "self_attn"), ("fc1", "fc2")),
    "encoder": (("self_attn", "linear1", "linear2"), ("self_attn", "self_attn"), ("linear1", "linear2")),
    "distilbert": (("attention", "ffn.lin1"), ("attention", "attention"), ("ffn", "ffn")),
    "feed_forward": (("self_attention", "feed_forward"), ("self_attention",) * 2, ("feed_forward",) * 2),
}


@pytest.mark.parametrize("name", LAYERS)
def test_well_known_layers(name):
    names, attention, mlp = LAYERS[name]
    model = tree("embed", *(f"h.{layer}.{name}" for layer in range(2) for name in names), "head.mlp")
    branches, layers = find(model)
    expected = [
        (kind, *(module_at(model, f"h.{layer}.{end}") for end in ends))
        for layer in range(2)
        for kind, ends in (("attention", attention), ("mlp", mlp))
    ]
    assert branches(model) == expected
    assert layers(model) == [module_at(model, f"h.{layer}") for layer in range(2)]
    other = tree(*modules(model))
    assert branches(other)[3][2] is module_at(other, f"h.1.{mlp[1]}")


def test_attention_is_known_by_its_class_and_containers_are_not_called():
    layer = Tree(mixer=MultiheadAttention(), mlp=ModuleDict(c_fc=Tree(), c_proj=Tree()))
    branches, layers = find(layer)
    mlp = layer.mlp
    assert branches(layer) == [("attention", layer.mixer, layer.mixer), ("mlp", mlp.c_fc, mlp.c_proj)]
    assert layers(layer) == [layer]


def test_a_layer_in_two_places_is_found_once():
    layer = tree("attn", "mlp")
    _, layers = find(Tree(h=Tree(first=layer, second=layer)))
    assert len(layers(Tree(h=Tree(first=layer)))) == 1


def test_patterns_name_branches_in_the_order_of_layers():
    model = tree(*(f"h.{layer}.{name}" for layer in range(12) for name in ("mix", "fc1", "fc2")))
    branches, layers = find(model, {"mixer": "h.*.mix", "mlp": ("h.*.fc1", "h.*.fc2")})
    expected = [
        (kind, *(module_at(model, f"h.{layer}.{end}") for end in ends))
        for layer in range(12)
        for kind, ends in (("mixer", ("mix", "mix")), ("mlp", ("fc1", "fc2")))
    ]
    assert branches(model) == expected
    assert layers(model) == []


@pytest.mark.parametrize(
    ("model", "patterns", "message"),
    [
        (tree("h.0.mlp"), None, "branches: no residual branch found in Tree: no module has attention and an MLP"),
        (tree("attn", "mlp", "post_feedforward_layernorm"), None, "branches: the layer of Tree has a norm after a br"),
        (
            Tree(attn=Tree(), mlp=Tree(), ls1=LayerScale()),
            None,
            r"branches: the layer of Tree has LayerScale \(ls1\): inc",
        ),
        (tree("h.0.attn", "h.0.mlp", "h.0.crossattention"), None, "branches: h.0 of Tree has cross-attention"),
        (
            Tree(a=tree("attn", "mlp"), b=OtherLayer(attn=Tree(), mlp=Tree())),
            None,
            "branches: Tree has layers of Tree and OtherLayer: one kind of layers is needed",
        ),
        (
            tree("model.h.0.attn"),
            {"attention": "h.*.attn"},
            r"branches: attention: 'h.\*.attn' matches no module of Tree; there is 'model.h.0.attn'$",
        ),
        (tree("a"), {"mlp": "b"}, "branches: mlp: 'b' matches no module of Tree$"),
        (
            tree("h.0.fc1", "h.1.fc1", "h.0.fc2"),
            {"mlp": ("h.*.fc1", "h.*.fc2")},
            r"branches: mlp: 'h.\*.fc1' matches 2 modules and 'h.\*.fc2' 1: each reader needs a writer",
        ),
        (tree("a"), {"mlp": 1}, "branches: mlp: a glob of paths, or .reader, writer., is needed, got 1"),
    ],
)
def test_what_is_wrong_with_branches(model, patterns, message):
    with pytest.raises(si.InputError, match=f"^{message}"):
        find(model, patterns)


class Layer(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, key=key)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 16, 1, key=jr.fold_in(key, 1))

    def __call__(self, X):
        X = X + self.attention(X, X, X)
        return X + jax.vmap(self.mlp)(X)


class Network(eqx.Module):
    layers: dict

    def __init__(self, key):
        self.layers = {"main": [Layer(each) for each in jr.split(key, 2)]}

    def __call__(self, X):
        for layer in self.layers["main"]:
            X = layer(X)
        return X


def test_equinox():
    found = describe(Network, architecture=DECLARED)
    model = Network(jr.key(0))
    layers = model.layers["main"]
    kinds, readers, writers = zip(*found.branches(model), strict=True)
    by_hand = [module for layer in layers for module in (layer.attention, layer.mlp)]
    assert kinds == ("attention", "mlp") * 2
    for modules_found in (readers, writers):
        assert all(a is b for a, b in zip(modules_found, by_hand, strict=True))
    assert all(a is b for a, b in zip(found.layers(model), layers, strict=True))
    assert (found.library, found.name, found.sd) == ("equinox", "Network", None)
    assert eqx.tree_equal(found.architecture, DECLARED)
    data = si.observe_branches.equinox(model, X, found.branches)
    assert data["name"].values.tolist()[2:] == ["layers.main.1.attention", "layers.main.1.mlp"]
    ends = {"mlp": ("layers.main.*.mlp.layers.0", "layers.main.*.mlp.layers.1")}
    inside = describe(model, patterns=ends, architecture=DECLARED)
    np.testing.assert_array_equal(
        si.observe_branches.equinox(model, X, inside.branches)["increment"], data["increment"][:, [1, 3]]
    )


GPT2 = {"hidden_size": 32, "num_attention_heads": 4, "activation_function": "gelu_new", "n_inner": None}
LLAMA = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu"}
LLAMA |= {"intermediate_size": 48, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
BERT = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "hidden_act": "gelu"}
NEOX = BERT | {"rotary_pct": 1.0, "rotary_emb_base": 100.0}
OPT = {"hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 64, "activation_function": "relu"}


def stack(attention, mlp, **settings):
    return si.Stack(tuple(Block(branch, **settings) for branch in (attention, mlp)))


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("gpt2", GPT2, stack(SelfAttention(heads=4, pattern=si.CAUSAL), MLP(activation="gelu_tanh"), norm="layer")),
        (
            "llama",
            LLAMA,
            stack(
                SelfAttention(heads=4, key_value_heads=2, head_size=16, pattern=si.CAUSAL, rope=5e5),
                MLP(activation="silu", expansion=1.5, gated=True),
                norm="rms",
            ),
        ),
        ("bert", BERT, stack(SelfAttention(heads=4), MLP(expansion=2.0), norm="layer", position="post")),
        (
            "bert",
            BERT | {"is_decoder": True},
            stack(SelfAttention(heads=4, pattern=si.CAUSAL), MLP(expansion=2.0), norm="layer", position="post"),
        ),
        (
            "gpt_neox",
            NEOX,
            stack(SelfAttention(heads=4, pattern=si.CAUSAL, rope=100.0), MLP(expansion=2.0), norm="layer"),
        ),
        (
            "opt",
            OPT | {"do_layer_norm_before": False},
            stack(
                SelfAttention(heads=4, pattern=si.CAUSAL),
                MLP(activation="relu", expansion=2.0),
                norm="layer",
                position="post",
            ),
        ),
        ("vit", BERT, stack(SelfAttention(heads=4), MLP(expansion=2.0), norm="layer")),
    ],
)
def test_a_configuration_tells_its_blocks(kind, values, expected):
    assert eqx.tree_equal(of_configuration(SimpleNamespace(model_type=kind, **values), "Model"), expected)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("bloom", GPT2, "model: Model has ALiBi, for which there is no law of blocks"),
        ("bert", BERT | {"position_embedding_type": "relative_key"}, "model: Model has relative position biases"),
        ("gpt_neox", NEOX | {"rotary_pct": 0.25}, "model: Model has rotations of a part of each head"),
        (
            "llama",
            LLAMA | {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
            "model: Model has rescaled rotations",
        ),
        ("gpt2", GPT2 | {"scale_attn_weights": False}, "model: Model has logits with another factor than 1/√d_k"),
        ("dinov2", BERT | {"layerscale_value": 1.0}, "model: Model has LayerScale"),
        ("mixtral", LLAMA | {"num_local_experts": 8}, "model: Model has experts"),
        ("vit", BERT | {"hidden_act": "quick_gelu"}, "model: Model has the activation 'quick_gelu', which is none of"),
        ("falcon", BERT, r"architecture: Model \(model type 'falcon'\) does not tell its blocks; give them, as arch"),
    ],
)
def test_configurations_without_a_law(kind, values, message):
    with pytest.raises(si.InputError, match=f"^{message}"):
        of_configuration(SimpleNamespace(model_type=kind, **values), "Model")


def test_what_is_wrong_with_models_and_architectures():
    model = Network(jr.key(0))
    four = si.Stack((Block(SelfAttention(heads=4)), Block(MLP())))
    for given, options, message in (
        (3, {}, r"model: a module of PyTorch, Flax \(NNX\) or Equinox, or a function .* is needed, got 3"),
        (lambda key: 3, {}, "model: a module of .* is needed; .*equinox: it makes 3"),
        (model, {}, "architecture: Network does not tell its blocks; give them, as architecture=si.Stack"),
        (model, {"architecture": si.ShapedMLP(c_plus=0.0, c_minus=-1.0)}, "architecture: a si.blocks.Block, or a"),
        (model, {"architecture": four}, "architecture: heads=4, where the model's MultiheadAttention has 2"),
        (
            model,
            {"architecture": DECLARED, "pattern": si.CAUSAL},
            "pattern: a causal mask, where the architecture has no mask: give both the same si.Pattern",
        ),
    ):
        with pytest.raises(si.InputError, match=f"^{message}"):
            describe(given, **options)


def test_first_tokens_are_observed_where_those_after_them_do_not_matter():
    model = Network(jr.key(0))
    causal = si.Stack((Block(SelfAttention(heads=2, pattern=si.CAUSAL)), Block(MLP())))
    many = np.zeros((20, WIDTH))
    assert check_inputs(model, X, DECLARED) is None
    assert check_inputs(model, many, causal) == slice(0, 4)
    assert check_inputs(model, {"X": many}, si.Stack((Block(MLP()),)), tokens=9) == slice(0, 9)
    assert check_inputs(model, {"input_ids": np.zeros((3, 5), int)}, causal) == slice(0, 4)
    for inputs, architecture, tokens, message in (
        (many, DECLARED, 4, "inputs: 20 tokens to observe, at most 12 are possible; without a causal mask all are"),
        (np.zeros((4, 5), int), causal, 4, "inputs: 4 × 4 tokens to observe, at most 12 are possible; pass fewer, or"),
        ({"input_ids": X, "attention_mask": np.array([[1, 0]])}, causal, 4, "inputs: attention_mask leaves tokens out"),
        (X, causal, 0, "tokens: a whole number of at least 1 is needed, got 0"),
    ):
        with pytest.raises(si.InputError, match=f"^{message}"):
            check_inputs(model, inputs, architecture, tokens=tokens)
    with pytest.raises(si.InputError, match="^inputs: needed for Network: its argument, or a dict of keyword argum"):
        default_inputs(model)


def test_a_function_is_called_with_what_its_library_draws_from():
    network, library = drawn(lambda key: Network(jr.fold_in(key, 3)))
    assert (type(network), library) == (Network, "equinox")
    assert drawn(network)[0] is network
