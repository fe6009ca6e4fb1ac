"""Measures of the start of a transition, by which it is inside the range of the law or not."""

from collections.abc import Callable
from functools import partial

import numpy as np
import xarray as xr
from jaxtyping import Float, Real

from sdeinfer.covariance import EVERY_TOKEN, Pattern, centring, singular, whiten_by
from sdeinfer.likelihood import ATTENTION_GROWTH, GROWTH, ROUNDING, SPREAD
from sdeinfer.terms import attention_drift, relu_drift

Measures = dict[str, Float[np.ndarray, "networks transitions"]]
"""Measures by their names: the spread of the logits times τ0, the growth by attention with θ₁ = 1, by a ReLU with
θ₂ = 1, and the rounding of V, see `rounding`."""


OF_MOMENTS = 1e-11
"""Relative rounding of the law's moments, whose closed forms lose digits between near copies of a token: of 8 networks
of 600 layers, n = 64 and γ = 0.7, the adjustment of the posterior has an error of 2 to 3 % from the transitions with
condition numbers up to 10⁴, of 9 to 12 % up to 10⁸, and of 33 to 59 % up to 10¹²."""


def measured(data: xr.Dataset, names: set[str]) -> xr.Dataset:
    """Data with measures of these names; those of data in chunks are there, by `survey`."""
    if names <= set(data.data_vars):
        return data
    starts = data["covariance"].transpose("network", "layer", "token_a", "token_b").values[:, :-1]
    pattern = Pattern.in_attributes(data.attrs)
    return with_measures(data, measures_of(starts, data["width"].values[:, None], pattern, names))


def measures_of(
    starts: Float[np.ndarray, "networks transitions m m"], width: np.ndarray, pattern: Pattern, names: set[str]
) -> Measures:
    """The measures of these names at the starts of transitions."""
    functions = {
        SPREAD: partial(logit_spread, pattern=pattern),
        ATTENTION_GROWTH: partial(attention_growth, pattern=pattern),
        GROWTH: partial(_growth_by, relu_drift),
        ROUNDING: rounding,
    }
    return {name: function(starts, width) for name, function in functions.items() if name in names}


def with_measures(data: xr.Dataset, measures: Measures) -> xr.Dataset:
    """Data with variables over network and layer for values over transitions."""
    last = np.zeros((data.sizes["network"], 1))
    padded = {name: np.concatenate([value, last.astype(value.dtype)], axis=1) for name, value in measures.items()}
    return data.assign({name: (("network", "layer"), value) for name, value in padded.items()})


def measure(data: xr.Dataset, name: str) -> Float[np.ndarray, "networks transitions"]:
    """A measure of the transitions of measured data."""
    return data[name].values[:, :-1]


def logit_scale(data: xr.Dataset) -> Float[np.ndarray, "networks transitions"]:
    """The spread s of the logits at the start of each transition, times τ0."""
    return measure(measured(data, {SPREAD}), SPREAD)


def logit_spread(
    V: Float[np.ndarray, "... m m"], width: Real[np.ndarray, "*#shape"], pattern: Pattern = EVERY_TOKEN
) -> Float[np.ndarray, "..."]:
    """The spread s of the logits for τ0 = 1."""
    variances, matrices = np.diagonal(V, axis1=-2, axis2=-1), centring(pattern, V.shape[-1])
    mean, size = matrices.mean.astype(V.dtype), matrices.size.astype(V.dtype)
    about_mean = size * (variances @ mean.T - np.einsum("an,...nk,ak->...a", mean, V, mean, optimize=True))
    about_mean = np.maximum(about_mean / np.maximum(size - 1, 1), 0.0)
    return np.max(np.sqrt(variances) * np.sqrt(about_mean / np.asarray(width)[..., None]), axis=-1)


def attention_growth(
    V: Float[np.ndarray, "... m m"], width: Real[np.ndarray, "*#shape"], pattern: Pattern = EVERY_TOKEN
) -> Float[np.ndarray, "..."]:
    """The largest relative change of V by the attention of one layer with θ₁ = 1; 0 for a singular V."""
    return _growth_by(partial(attention_drift, pattern=pattern), V, width)


def rounding(V: Float[np.ndarray, "... m m"], width: Real[np.ndarray, "*#shape"]) -> Float[np.ndarray, "..."]:
    """The relative rounding of V and of its moments in the direction in which V is smallest, times √n.

    The noise of a layer is ∝ 1/√n.
    """
    eigenvalues = np.linalg.eigvalsh(V.astype(np.float64))
    smallest = np.maximum(eigenvalues[..., 0], np.finfo(np.float64).tiny)
    with np.errstate(over="ignore"):
        return max(np.finfo(V.dtype).eps, OF_MOMENTS) * eigenvalues[..., -1] / smallest * np.sqrt(width)


def _growth_by(of: Callable[[np.ndarray], np.ndarray], V: np.ndarray, width: np.ndarray) -> np.ndarray:
    """The largest relative change of V by a drift, whose axes of tokens come first, at width n."""
    definite = ~singular(V)
    safe = np.where(definite[..., None, None], V, np.eye(V.shape[-1]))
    with np.errstate(over="ignore", invalid="ignore"):
        drift = np.moveaxis(of(np.moveaxis(V, (-2, -1), (0, 1))), (0, 1), (-2, -1))
        change = whiten_by(np.linalg.cholesky(safe), drift)
    finite = np.isfinite(change).all(axis=(-2, -1))  # too large a V has too large a drift
    size = np.abs(np.linalg.eigvalsh(np.where(finite[..., None, None], change, 0.0))).max(axis=-1)
    return np.where(definite, np.where(finite, size, np.inf), 0.0) / np.asarray(width)


def mean_spread(spread: np.ndarray) -> float:
    """Mean of spreads (root mean square), weighted by the information on τ0 (∝ s⁴)."""
    relative = spread / spread.max()
    return float(spread.max() * np.sqrt((relative**6).sum() / (relative**4).sum()))
