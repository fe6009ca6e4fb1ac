"""Recipes against the weights of the libraries that they are from.

`SDEINFER_TORCH_PYTHON` names an interpreter with torch, and with transformers for its recipes;
its default is the one that runs the tests. Versions 5.0 to 5.14 of transformers do not scale GPT-2's last matrices.
"""

import json

import budget
import numpy as np
import pytest
import torch_interpreter

from sdeinfer.auditing._recipe import matrices
from sdeinfer.auditing._recipes import gpt2, kaiming, normal, pytorch, pytorch_linear, xavier
from sdeinfer.blocks import MLP, Block, SelfAttention

pytestmark = pytest.mark.torch

WIDTH, LAYERS = 256, 4
ALIKE = (Block(SelfAttention(heads=4)), Block(MLP()))
GROUPED = (Block(SelfAttention(heads=4, key_value_heads=2)), Block(MLP(gated=True)))
RECIPES = {
    "pytorch": (pytorch(), ALIKE),
    "pytorch_linear": (pytorch_linear(), GROUPED),
    "xavier": (xavier(0.5), GROUPED),
    **{
        f"kaiming {kind} {mode}": (kaiming(kind, mode), GROUPED)
        for kind in ("relu", "tanh", "selu")
        for mode in ("fan_in", "fan_out")
    },
    "gpt2": (gpt2(), ALIKE),
    "llama": (normal(), GROUPED),
    "bert": (normal(), ALIKE),
}


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, list[float]]]:
    """Standard deviations and their errors, by model and matrix."""
    return json.loads(torch_interpreter.run("torch_recipes.py", libraries="torch"))


@pytest.mark.parametrize("name", RECIPES)
def test_weights_have_the_standard_deviations_of_the_recipe(name, found):
    recipe, blocks = RECIPES[name]
    known = {role: each for block in blocks for role, each in matrices(block, width=WIDTH, layers=LAYERS).items()}
    models = [found[label] for label in (name, f"{name} normal", f"{name} uniform") if label in found]
    if not models:
        pytest.skip(f"{torch_interpreter.PYTHON}: has no library for {name}")
    for estimates in models:
        values, errors = np.transpose(list(estimates.values()))
        expected = [
            recipe.bias_sd(known[role.removesuffix(" bias")]) if role.endswith(" bias") else recipe.sd(known[role])
            for role in estimates
        ]
        budget.assert_estimate(values, expected, errors)
