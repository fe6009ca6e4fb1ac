"""Residual branches of PyTorch's and Hugging Face's models, against the inputs of the norms around them.

`SDEINFER_TORCH_PYTHON` names an interpreter with torch, transformers and the dependencies of this package; its default
is the one that runs the tests.
"""

import json
from pathlib import Path

import numpy as np
import pytest
import torch_interpreter
import xarray as xr
from branch_references import assert_branches

import sdeinfer as si
from sdeinfer.observation import validate_branches

pytestmark = pytest.mark.torch

NAMES = {
    "gpt2": ("h.0.attn", "h.1.mlp"),
    "llama": ("layers.0.self_attn", "layers.1.mlp"),
    "gemma3": ("layers.0.self_attn", "layers.1.mlp"),
    "bert": ("encoder.layer.0.attention.self", "encoder.layer.1.intermediate.dense"),
    "vit": ("layers.0.attention", "layers.1.mlp"),
    "encoder": ("encoder.layers.0.self_attn", "encoder.layers.1.linear1"),
}
"""The first and the last branch of each model."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """What the script writes."""
    out = tmp_path_factory.mktemp("branches")
    torch_interpreter.run("torch_branches.py", out, JAX_ENABLE_X64="1")
    return out


@pytest.mark.parametrize("name", NAMES)
def test_branches_are_what_is_between_the_norms(name, folder):
    with xr.open_dataset(folder / f"{name}.nc", engine="h5netcdf") as file:
        data = validate_branches(file.load())
    with np.load(folder / f"{name}.npz") as found:
        assert_branches(data, found["U"], found["D"])
    assert data["kind"].values.tolist() == ["attention", "mlp"] * 2
    assert (data["name"].values[0], data["name"].values[-1]) == NAMES[name]
    pattern = {"encoder": {"prompts": "3,3"}, "vit": {}, "bert": {}}.get(name, {"causal": 1.0})
    assert data.attrs == pattern | {"reads": "branch"}


def test_increments_of_hooks_are_differences_of_the_stream(folder):
    with xr.open_dataset(folder / "gpt2.nc", engine="h5netcdf") as file:
        data = file.load()
    with np.load(folder / "gpt2.npz") as found:
        stream = si.observe_branches(found["stream"], ("attention", "mlp"), pattern=si.CAUSAL)
    for name in ("increment", "between", "kurtosis"):
        np.testing.assert_allclose(stream[name], data[name], rtol=1e-9, atol=1e-12)


MESSAGES = {
    "layer not called": "layers: network 0, layer 3 (?): its output is not seen: the model does not call the module, "
    "or a fused kernel replaces it",
    "layers out of order": "layers: network 0, layer 2 (h.0): is called twice or out of order",
    "a layer twice": "layers: at least one module, and each only once, is needed, got 2",
    "no layer": "layers: at least one module, and each only once, is needed, got 0",
    "twice": "branches: network 0, branch 0 (a): is called twice or out of order",
    "order": "branches: network 0, branch 1 (b): is called twice or out of order",
    "shape": "branches: network 0, branch 0 (wide): reads shape (1, 5, 32) and adds (1, 5, 64): one shape is needed",
    "unused": "branches: network 0, branch 0 (encoder.layers.0.self_attn.out_proj): its input is not seen: the model "
    "does not call the module, or a fused kernel replaces it",
    "none": "branches: no branch was given",
    "entry": "branches: (kind, module) or (kind, reader, writer) is needed, got Linear(in_features=32, "
    "out_features=32, bias=True)",
    "several": "networks: a module is one network, got 2: pass a function that draws them",
    "half": "input: network 0, branch 0 (encoder.layers.0.self_attn): bfloat16 rounds the sums inside the branch: run "
    "the network in float32",
    "batch": "branches: self_attn takes (tokens, batch, width): make it with batch_first=True",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_is_wrong_is_said_in_one_line(name, folder):
    assert json.loads((folder / "errors.json").read_text())[name] == MESSAGES[name]


def test_the_model_and_pytorch_are_left_as_they_were(folder):
    states = json.loads((folder / "states.json").read_text())
    assert len(states) == 7
    assert all(states.values()), states
