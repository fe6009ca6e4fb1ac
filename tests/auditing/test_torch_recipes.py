"""Recipes against the weights of the libraries that they are from.

Versions 5.0 to 5.14 of transformers do not scale GPT-2's last matrices.
"""

import numpy as np
import pytest
from budget import assert_estimate
from torch_models import TORCH, bert, encoder, gpt2, llama, nn, torch

from sdeinfer.auditing._recipe import matrices
from sdeinfer.auditing._recipes import gpt2 as gpt2_recipe
from sdeinfer.auditing._recipes import kaiming, normal, pytorch, pytorch_linear, xavier
from sdeinfer.blocks import MLP, Block, SelfAttention

pytestmark = TORCH

WIDTH, LAYERS, UNITS = 256, 4, 1024
ALIKE = (Block(SelfAttention(heads=4)), Block(MLP()))
GROUPED = (Block(SelfAttention(heads=4, key_value_heads=2)), Block(MLP(gated=True)))
OF_KEYS = WIDTH // 2
SHAPES = {
    "query": (WIDTH, WIDTH),
    "key": (OF_KEYS, WIDTH),
    "value": (OF_KEYS, WIDTH),
    "attention output": (WIDTH, WIDTH),
    "gate": (UNITS, WIDTH),
    "up": (UNITS, WIDTH),
    "mlp output": (WIDTH, UNITS),
}
"""(fan_out, fan_in) of `GROUPED`."""


def assert_drawn_by(recipe, blocks, layers) -> None:
    """The root mean square of the entries of each matrix, with the error that their fourth moment gives."""
    known = {role: each for block in blocks for role, each in matrices(block, width=WIDTH, layers=LAYERS).items()}
    found, errors, expected = [], [], []
    for role in layers[0]:
        x = torch.cat([layer[role].detach().flatten() for layer in layers]).double().numpy()
        found.append(np.sqrt(np.square(x).mean()))
        errors.append(np.square(x).std() / np.sqrt(len(x)) / (2 * found[-1]))
        sd = recipe.bias_sd if role.endswith(" bias") else recipe.sd
        expected.append(sd(known[role.removesuffix(" bias")]))
    assert_estimate(found, expected, errors)


def of_gpt2(block):
    q, k, v = block.attn.c_attn.weight.chunk(3, dim=1)
    attention = {"query": q, "key": k, "value": v, "attention output": block.attn.c_proj.weight}
    return attention | {"up": block.mlp.c_fc.weight, "mlp output": block.mlp.c_proj.weight}


def of_llama(block):
    attention, mlp = block.self_attn, block.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj)
    each = (*projections, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return {role: linear.weight for role, linear in zip(SHAPES, each, strict=True)}


def of_bert(block):
    own = block.attention.self
    attention = {"query": own.query.weight, "key": own.key.weight, "value": own.value.weight}
    attention |= {"attention output": block.attention.output.dense.weight}
    return attention | {"up": block.intermediate.dense.weight, "mlp output": block.output.dense.weight}


def of_encoder(layer):
    q, k, v = layer.self_attn.in_proj_weight.chunk(3)
    assert layer.self_attn.in_proj_bias.abs().max() == layer.self_attn.out_proj.bias.abs().max() == 0
    attention = {"query": q, "key": k, "value": v, "attention output": layer.self_attn.out_proj.weight}
    mlp = {"up": layer.linear1.weight, "mlp output": layer.linear2.weight}
    return attention | mlp | {"up bias": layer.linear1.bias, "mlp output bias": layer.linear2.bias}


MODELS = {
    "gpt2": (gpt2_recipe(), ALIKE, lambda: map(of_gpt2, gpt2(WIDTH, LAYERS).h)),
    "llama": (normal(), GROUPED, lambda: map(of_llama, llama(WIDTH, LAYERS).layers)),
    "bert": (normal(), ALIKE, lambda: map(of_bert, bert(WIDTH, LAYERS).encoder.layer)),
    "pytorch": (pytorch(), ALIKE, lambda: (of_encoder(encoder(WIDTH, 1).layers[0]) for _ in range(LAYERS))),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_standard_deviations_of_the_recipe(name):
    torch.manual_seed(0)
    recipe, blocks, layers = MODELS[name]
    assert_drawn_by(recipe, blocks, list(layers()))


def test_linear_layers_have_the_default_of_pytorch():
    torch.manual_seed(0)
    linears = {role: nn.Linear(fan_in, fan_out) for role, (fan_out, fan_in) in SHAPES.items()}
    weights = {role: linear.weight for role, linear in linears.items()}
    biases = {f"{role} bias": linear.bias for role, linear in linears.items()}
    assert_drawn_by(pytorch_linear(), GROUPED, [weights | biases])


@pytest.mark.parametrize("law", ["normal", "uniform"])
def test_functions_of_torch_nn_init(law):
    torch.manual_seed(0)
    fill, fill_kaiming = (getattr(nn.init, f"{kind}_{law}_") for kind in ("xavier", "kaiming"))

    def drawn(fill, **options):
        return [{role: fill(torch.empty(shape), **options) for role, shape in SHAPES.items()}]

    assert_drawn_by(xavier(0.5), GROUPED, drawn(fill, gain=0.5))
    for kind in ("relu", "tanh", "selu"):
        for mode in ("fan_in", "fan_out"):
            assert_drawn_by(kaiming(kind, mode), GROUPED, drawn(fill_kaiming, mode=mode, nonlinearity=kind))
