"""Tokens on the sphere: random ones, and Datasets of observed ones."""

import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, PRNGKeyArray
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.meanfield._flow import on_sphere
from sdeinfer.observation import TOKEN_DIMS, as_array, in_order, labels_of_networks


def random_tokens(number: int, dimension: int, *, key: PRNGKeyArray) -> Float[Array, "n D"]:
    """Independent tokens, uniform on the unit sphere S^{D−1}.

    Arguments:
        number: number of tokens n.
        dimension: dimension D of the tokens.
        key: PRNG key.
    """
    return on_sphere(jr.normal(key, (number, dimension)))


def tokens_dataset(tokens: ArrayLike, *, layers: ArrayLike | None = None) -> xr.Dataset:
    """Observed tokens as a Dataset, scaled to the unit sphere.

    Arguments:
        tokens: hidden states, shape (networks, layers, tokens, D), the initial ones first. Their norms are divided out,
            as the normalisation of the next layer does. An xarray.DataArray may have its dimensions in any order.
        layers: numbers of the observed layers; None for 0, 1, 2, ….

    Returns:
        A Dataset with `tokens` over network, layer, token, component.

    Raises:
        InputError: for another number of axes, fewer than two layers or components, and tokens that are zero, infinite
            or NaN.
    """
    labels = labels_of_networks(tokens)
    if isinstance(tokens, xr.DataArray):
        layers = tokens["layer"].values if layers is None and "layer" in tokens.coords else layers
        tokens = in_order(tokens, TOKEN_DIMS, "tokens")
    x = as_array(tokens, "tokens")
    if x.ndim != len(TOKEN_DIMS):
        raise InputError(f"tokens: shape (networks, layers, tokens, D) is needed, got {x.shape}")
    if x.shape[1] < 2 or x.shape[3] < 2:
        raise InputError(f"tokens: at least two layers and two components are needed, got shape {x.shape}")
    x = x.astype(np.result_type(x.dtype, np.float32), copy=False)
    norms = np.linalg.norm(x, axis=-1, keepdims=True)
    wrong = np.argwhere(~((norms > 0) & np.isfinite(norms))[..., 0])
    if len(wrong):
        place = ", ".join(f"{name} {value}" for name, value in zip(TOKEN_DIMS[:-1], wrong[0], strict=True))
        raise InputError(f"tokens: {place} is zero or not finite")
    numbers = np.arange(x.shape[1]) if layers is None else np.asarray(layers)
    if numbers.shape != (x.shape[1],) or (np.diff(numbers) <= 0).any():
        raise InputError(f"layers: {x.shape[1]} increasing numbers are needed, got {numbers}")
    return xr.Dataset({"tokens": (TOKEN_DIMS, x / norms)}, coords={"layer": numbers} | labels)
