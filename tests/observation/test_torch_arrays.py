"""Tensors of PyTorch that NumPy does not read by itself."""

import numpy as np
import pytest
from helpers.torch_models import TORCH, torch

import sdeinfer as si
from sdeinfer import meanfield

pytestmark = TORCH

X = torch.randn(3, 4, 2, 8, generator=torch.Generator().manual_seed(0))


def test_tensors_with_gradients_and_sparse_ones():
    expected = si.observe(X.numpy())
    for layers in (X.to_sparse(), [X[:, layer].to_sparse() for layer in range(4)], X.clone().requires_grad_()):
        assert si.observe(layers).identical(expected)
    tokens = meanfield.tokens_dataset(X.numpy())
    for values, error in (
        (X, 1e-6),
        (list(X), 1e-6),
        (X.double(), 1e-6),
        (X.bfloat16(), 1e-2),
        (list(X.bfloat16()), 1e-2),
    ):
        assert np.abs(meanfield.tokens_dataset(values) - tokens)["tokens"].max() < error


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (si.observe, "hidden_states: layer 0"),
        (lambda X: si.observe([X[:, 0], X[:, 1]]), "hidden_states: layer 0"),
        (meanfield.tokens_dataset, "tokens"),
    ],
)
def test_tensors_of_no_device_are_refused(make, name):
    with pytest.raises(
        si.InputError, match=f"^{name}: a tensor on the device meta has a shape and no values: run the net"
    ):
        make(X.to("meta"))
