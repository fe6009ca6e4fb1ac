"""The Dataset of observed tokens, and its validation."""

import numpy as np
import xarray as xr

from sdeinfer._files import InputError

TOKEN_DIMS = ("network", "layer", "token", "component")
"""Dimensions of `tokens` in a Dataset of observed tokens."""


def validate_tokens(data: xr.Dataset) -> xr.Dataset:
    """Check a Dataset of observed tokens from any source, and put it in canonical order.

    Raises:
        InputError: one line that says what is wrong and where: other dimensions or types, fewer than two layers, tokens
            that are not on the unit sphere, and numbers of layers that do not increase.
    """
    if "tokens" not in data or set(data["tokens"].dims) != set(TOKEN_DIMS):
        raise InputError(f"data: a Dataset with `tokens` over {', '.join(TOKEN_DIMS)} is needed, see tokens_dataset")
    data = data.transpose(*TOKEN_DIMS, ...)
    x = data["tokens"].values
    if not np.issubdtype(x.dtype, np.floating):
        raise InputError(f"tokens: real floating-point numbers are needed, got {x.dtype}")
    if 0 in x.shape or x.shape[1] < 2:
        raise InputError(f"tokens: a network, two layers and a token are needed at least, got shape {x.shape}")
    off = ~(np.abs(np.linalg.norm(x, axis=-1) - 1) <= np.finfo(x.dtype).eps ** 0.5)
    if off.any():
        place = ", ".join(f"{name} {number}" for name, number in zip(TOKEN_DIMS[:-1], np.argwhere(off)[0], strict=True))
        raise InputError(f"tokens: {place} is not on the unit sphere: tokens_dataset scales them")
    if "layer" in data.coords and not (np.diff(data["layer"].values) > 0).all():
        raise InputError(f"layer: increasing numbers are needed, got {data['layer'].values.tolist()}")
    return data
