"""Tensors of PyTorch that NumPy does not read by itself.

`SDEINFER_TORCH_PYTHON` names an interpreter with torch and the dependencies of this package; its default is the one
that runs the tests.
"""

import pytest
import torch_interpreter

pytestmark = pytest.mark.torch

PROGRAM = """
import numpy as np, torch
import sdeinfer as si
from sdeinfer import meanfield

X = torch.randn(3, 4, 2, 8, generator=torch.Generator().manual_seed(0))
expected = si.observe(X.numpy())
for layers in (X.to_sparse(), [X[:, layer].to_sparse() for layer in range(4)], X.requires_grad_()):
    assert si.observe(layers).identical(expected)
for make in (si.observe, lambda X: si.observe([X[:, 0], X[:, 1]]), meanfield.tokens_dataset):
    try:
        make(X.to("meta"))
    except si.InputError as error:
        print(error)
tokens = meanfield.tokens_dataset(X.detach().numpy())
for values in (X, list(X), X.double()):
    assert np.abs(meanfield.tokens_dataset(values) - tokens)["tokens"].max() < 1e-6
for values in (X.bfloat16(), list(X.bfloat16())):
    assert np.abs(meanfield.tokens_dataset(values) - tokens)["tokens"].max() < 1e-2
"""


def test_tensors_with_gradients_sparse_ones_and_those_of_no_device():
    printed = torch_interpreter.run("-c", PROGRAM, libraries="torch").splitlines()
    message = "a tensor on the device meta has a shape and no values: run the network on another"
    assert printed == [f"{name}: {message}" for name in ("hidden_states: layer 0", "hidden_states: layer 0", "tokens")]
