"""Rounding of hidden states against what layers change."""

import warnings
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from helpers.internals import rounding_share

import sdeinfer as si

TYPES = [np.float16, ml_dtypes.bfloat16]


def residual_networks(gamma: float, *, networks=8, depth=6, tokens=4, width=128, dtype=np.float64) -> np.ndarray:
    """Hidden states of linear residual networks X ← √(1 − γ²) X + γ X W/√n, kept and added up in a type."""
    rng = np.random.default_rng(0)
    states = [rng.normal(size=(networks, tokens, width)).astype(dtype)]
    for _ in range(depth):
        X = states[-1].astype(np.float64)
        W = rng.normal(size=(networks, width, width))
        states.append((np.sqrt(1 - gamma**2) * X + gamma * X @ W / np.sqrt(width)).astype(dtype))
    return np.stack(states, axis=1)


def covariances(X):
    X = np.moveaxis(X, 1, 0).astype(np.float64)
    return X @ np.swapaxes(X, -1, -2) / X.shape[-1]


@pytest.mark.parametrize("dtype", TYPES)
def test_the_predicted_share_is_that_of_rounded_states(dtype):
    X = residual_networks(0.1, networks=64)
    exact, rounded = covariances(X), covariances(X.astype(dtype))
    diagonal = np.diagonal(exact, axis1=-2, axis2=-1)
    scale = (diagonal[..., :, None] * diagonal[..., None, :])[:-1]
    error = np.mean(np.diff(rounded - exact, axis=0) ** 2 / scale)
    change = np.mean(np.diff(rounded, axis=0) ** 2 / scale)
    predicted = rounding_share(rounded, width=128, spacing=float(ml_dtypes.finfo(dtype).eps))
    # 64 networks × 6 layers × 10 pairs: 2 % of Monte Carlo error; the rest is that numbers are not log-uniform.
    assert predicted == pytest.approx(np.sqrt(error / change), rel=0.1)


@pytest.mark.parametrize(
    ("dtype", "gamma", "matters"),
    [
        (ml_dtypes.bfloat16, 0.5, False),
        (ml_dtypes.bfloat16, 0.01, True),
        (np.float16, 0.01, False),
        (np.float16, 0.001, True),
        (np.float32, 0.001, False),
    ],
)
@pytest.mark.parametrize("runs_in_it", [False, True])
def test_a_warning_where_rounding_matters(dtype, gamma, matters, runs_in_it):
    X = residual_networks(gamma, dtype=dtype) if runs_in_it else residual_networks(gamma).astype(dtype)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        si.observe(X)
    assert [each.category for each in caught] == [si.LowPrecisionWarning] * matters
    if matters:
        assert f"hidden_states: {np.dtype(dtype)} rounds by " in str(caught[0].message)
        # The type checks of the suite add frames between the caller and the package.
        assert str(Path(si.observation.__file__).parent) not in caught[0].filename
