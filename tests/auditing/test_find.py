"""Branches and blocks of models, found by names and told by configurations, against those written by hand."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import pytest

import sdeinfer as si
from sdeinfer.auditing import default_inputs, describe
from sdeinfer.blocks import MLP, Block, SelfAttention

TOKENS, WIDTH = 3, 8
X = jr.normal(jr.key(1), (TOKENS, WIDTH))


def stack(attention, mlp, **settings):
    return si.Stack(tuple(Block(branch, **settings) for branch in (attention, mlp)))


DECLARED = stack(SelfAttention(heads=2), MLP(activation="relu"), norm="layer")


def module(kind="Tree", base=eqx.Module, **inside) -> Any:
    """A module of a class of this name."""
    fields = {"__annotations__": dict.fromkeys(inside, Any), "__call__": lambda self: None}
    return type(kind, (base,), fields)(**inside)


def tree(*paths):
    """A tree with modules at these paths."""
    inside = {}
    for path in paths:
        name, _, rest = path.partition(".")
        inside.setdefault(name, []).extend([rest] if rest else [])
    found = {name: tree(*rest) for name, rest in inside.items()}
    return list(found.values()) if found and all(name.isdigit() for name in found) else module(**found)


def at(model, path):
    for name in path.split("."):
        model = model[int(name)] if name.isdigit() else getattr(model, name)
    return model


def found_by_name(model, *, patterns=None):
    found = describe(model, patterns=patterns, architecture=DECLARED)
    return found.branches(model), found.layers(model)


def assert_same(found, model, expected):
    """Branches are modules at these paths."""
    assert [kind for kind, *_ in found] == [kind for kind, *_ in expected]
    for (_, *ends), (_, *paths) in zip(found, expected, strict=True):
        assert all(end is at(model, path) for end, path in zip(ends, paths, strict=True))


LAYERS = {
    "gpt2": (("ln_1", "attn.c_proj", "mlp.c_proj"), ("attn", "attn"), ("mlp", "mlp")),
    "llama": (("self_attn", "mlp", "post_attention_layernorm"), ("self_attn", "self_attn"), ("mlp", "mlp")),
    "bert": (
        ("attention.self", "attention.output.dense", "intermediate.dense", "output.dense"),
        ("attention.self", "attention.output.dense"),
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
    branches, layers = found_by_name(model)
    kinds = (("attention", attention), ("mlp", mlp))
    expected = [(kind, *(f"h.{layer}.{end}" for end in ends)) for layer in range(2) for kind, ends in kinds]
    assert_same(branches, model, expected)
    assert all(a is b for a, b in zip(layers, model.h, strict=True))


def test_attention_is_known_by_its_class_and_containers_are_not_called():
    attention = module("MultiheadAttention", num_heads=2)
    layer = module(mixer=attention, mlp=module("ModuleDict", c_fc=module(), c_proj=module()))
    branches, layers = found_by_name(layer)
    assert_same(branches, layer, [("attention", "mixer", "mixer"), ("mlp", "mlp.c_fc", "mlp.c_proj")])
    assert layers == [layer]


def test_patterns_name_branches_in_the_order_of_layers():
    model = tree(*(f"h.{layer}.{name}" for layer in range(12) for name in ("mix", "fc1", "fc2")))
    branches, layers = found_by_name(model, patterns={"attention": "h.*.mix", "mlp": ("h.*.fc1", "h.*.fc2")})
    kinds = (("attention", ("mix", "mix")), ("mlp", ("fc1", "fc2")))
    expected = [(kind, *(f"h.{layer}.{end}" for end in ends)) for layer in range(12) for kind, ends in kinds]
    assert_same(branches, model, expected)
    assert layers == []


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
    found, model = describe(Network, architecture=DECLARED), Network(jr.key(0))
    assert (found.library, found.name, found.sd) == ("equinox", "Network", None)
    assert eqx.tree_equal(found.architecture, DECLARED)
    data = si.observe_branches.equinox(model, X, found.branches)
    assert data["name"].values.tolist()[2:] == ["layers.main.1.attention", "layers.main.1.mlp"]
    ends = {"mlp": ("layers.main.*.mlp.layers.0", "layers.main.*.mlp.layers.1")}
    inside = describe(model, patterns=ends, architecture=DECLARED)
    by_ends = si.observe_branches.equinox(model, X, inside.branches)
    np.testing.assert_array_equal(by_ends["increment"], data["increment"][:, [1, 3]])


class Configuration(SimpleNamespace):
    def get_text_config(self):
        return self


@pytest.fixture
def configured(monkeypatch):
    """Makes a model of Hugging Face of a configuration, without their library."""
    library = ModuleType("transformers.modeling_utils")
    library.PreTrainedModel = type("PreTrainedModel", (eqx.Module,), {})  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, library.__name__, library)

    def model(kind, values):
        config = Configuration(model_type=kind, initializer_range=0.05, **values)
        return module("Model", library.PreTrainedModel, attn=module(), mlp=module(), config=config)

    return model


GPT2 = {"hidden_size": 32, "num_attention_heads": 4, "activation_function": "gelu_new", "n_inner": None}
LLAMA = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "hidden_act": "silu"}
LLAMA |= {"intermediate_size": 48, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
BERT = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64, "hidden_act": "gelu"}
NEOX = BERT | {"rotary_pct": 1.0, "rotary_emb_base": 100.0}
OPT = {"hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 64, "activation_function": "relu"}
CAUSAL = SelfAttention(heads=4, pattern=si.CAUSAL)
GROUPED = SelfAttention(heads=4, key_value_heads=2, head_size=16, pattern=si.CAUSAL, rope=5e5)
TURNED = SelfAttention(heads=4, pattern=si.CAUSAL, rope=100.0)
UNMASKED, WIDE = SelfAttention(heads=4), MLP(expansion=2.0)
OF_LLAMA, OF_OPT = MLP(activation="silu", expansion=1.5, gated=True), MLP(activation="relu", expansion=2.0)


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        ("gpt2", GPT2, stack(CAUSAL, MLP(activation="gelu_tanh"), norm="layer")),
        ("llama", LLAMA, stack(GROUPED, OF_LLAMA, norm="rms")),
        ("bert", BERT, stack(UNMASKED, WIDE, norm="layer", position="post")),
        ("bert", BERT | {"is_decoder": True}, stack(CAUSAL, WIDE, norm="layer", position="post")),
        ("gpt_neox", NEOX, stack(TURNED, WIDE, norm="layer")),
        ("opt", OPT | {"do_layer_norm_before": False}, stack(CAUSAL, OF_OPT, norm="layer", position="post")),
        ("vit", BERT, stack(UNMASKED, WIDE, norm="layer")),
    ],
)
def test_a_configuration_tells_its_blocks(kind, values, expected, configured):
    found = describe(configured(kind, values))
    assert eqx.tree_equal(found.architecture, expected)
    assert found.sd == 0.05


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        ("bloom", GPT2, "model: Model has ALiBi, for which there is no law of blocks"),
        ("bert", BERT | {"position_embedding_type": "relative_key"}, "model: Model has relative position biases"),
        ("gpt_neox", NEOX | {"rotary_pct": 0.25}, "model: Model has rotations of a part of each head"),
        ("llama", LLAMA | {"rope_parameters": {"rope_type": "yarn"}}, "model: Model has rescaled rotations"),
        ("gpt2", GPT2 | {"scale_attn_weights": False}, "model: Model has logits with another factor than 1/√d_k"),
        ("dinov2", BERT | {"layerscale_value": 1.0}, "model: Model has LayerScale"),
        ("mixtral", LLAMA | {"num_local_experts": 8}, "model: Model has experts"),
        ("vit", BERT | {"hidden_act": "quick_gelu"}, "model: Model has the activation 'quick_gelu', which is none of"),
        ("falcon", BERT, r"architecture: Model \(model type 'falcon'\) does not tell its blocks; give them, as arch"),
    ],
)
def test_configurations_without_a_law(kind, values, message, configured):
    with pytest.raises(si.InputError, match=f"^{message}"):
        describe(configured(kind, values))


MODEL = Network(jr.key(0))
GIVEN = {"architecture": DECLARED}


def named(**patterns):
    return GIVEN | {"patterns": patterns}


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (tree("h.0.mlp"), GIVEN, "branches: no residual branch found in Tree: no module has attention and an MLP"),
        (tree("attn", "mlp", "post_feedforward_layernorm"), GIVEN, "branches: the layer of Tree has a norm after a br"),
        (module(attn=module(), mlp=module(), ls1=module("LayerScale")), GIVEN, "branches: .* has LayerScale .ls1.: in"),
        (tree("h.0.attn", "h.0.mlp", "h.0.crossattention"), GIVEN, "branches: h.0 of Tree has cross-attention"),
        (
            module(a=tree("attn", "mlp"), b=module("OtherLayer", attn=module(), mlp=module())),
            GIVEN,
            "branches: Tree has layers of Tree and OtherLayer: one kind of layers is needed",
        ),
        (tree("model.h.0.attn"), named(attention="h.*.attn"), r"branches: attention: 'h.\*.attn' matches no module of"),
        (tree("h.0.fc1", "h.1.fc1", "h.0.fc2"), named(mlp=("h.*.fc1", "h.*.fc2")), r"branches: mlp: 'h.\*.fc1' matche"),
        (tree("a"), named(mlp=1), "branches: mlp: a glob of paths, or .reader, writer., is needed, got 1"),
        (3, {}, r"model: a module of PyTorch, Flax \(NNX\) or Equinox, or a function .* is needed, got 3"),
        (MODEL, {}, "architecture: Network does not tell its blocks; give them, as architecture=si.Stack"),
        (MODEL, {"architecture": si.ShapedMLP(c_plus=0.0, c_minus=-1.0)}, "architecture: a si.blocks.Block, or a"),
        (MODEL, {"architecture": stack(CAUSAL, MLP())}, "architecture: heads=4, where the model's MultiheadAttention"),
        (MODEL, GIVEN | {"pattern": si.CAUSAL}, "pattern: a causal mask, where the architecture has no mask: give bot"),
    ],
)
def test_what_is_wrong_with_models(model, settings, message):
    with pytest.raises(si.InputError, match=f"^{message}"):
        describe(model, **settings)


@pytest.mark.parametrize(
    ("inputs", "settings", "message"),
    [
        (np.zeros((20, WIDTH)), {}, "inputs: 20 tokens to observe, at most 12 are possible; without a causal mask all"),
        (
            np.zeros((5, 20), int),
            {"architecture": stack(SelfAttention(heads=2, pattern=si.CAUSAL), MLP())},
            "inputs: 5",
        ),
        ({"input_ids": X, "attention_mask": np.array([[1, 0]])}, {}, "inputs: attention_mask leaves tokens out"),
        (X, {"tokens": 0}, "tokens: a whole number of at least 1 is needed, got 0"),
    ],
)
def test_inputs_of_too_many_tokens_or_with_a_mask_are_refused(inputs, settings, message):
    with pytest.raises(si.InputError, match=f"^{message}"):
        si.audit(MODEL, inputs, **GIVEN | settings)


def test_there_is_no_default_input_for_other_models():
    with pytest.raises(si.InputError, match="^inputs: needed for Network: its argument, or a dict of keyword argum"):
        default_inputs(MODEL)
