"""Double precision for sums that single precision does not resolve, and the precision of threads."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import xarray as xr

SINGLE = 2**16
"""Largest number of terms of a log density in single precision, which resolves a sum of so many to a few hundredths."""


def in_enough_precision[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that it runs in double precision for data or posteriors with more than `SINGLE` terms."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        if jax.config.jax_enable_x64 or not any(_terms(value) > SINGLE for value in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        with jax.enable_x64(True):  # noqa: FBT003
            return function(*args, **kwargs)

    return wrapped


def in_this_precision[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function for other threads, in the precision of this one: `jax.enable_x64` is thread-local."""
    x64 = jax.config.jax_enable_x64

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.enable_x64(x64):
            return function(*args, **kwargs)

    return wrapped


def _terms(value: Any) -> int:
    """Number of terms of the log density of networks observed at every layer; 0 of other values."""
    networks = 0
    if isinstance(value, xr.DataTree) and "observed_data" in value.children:
        networks = int(value.attrs.get("networks", 0))
        value = value["observed_data"].to_dataset()
    if not isinstance(value, xr.Dataset) or "token_a" not in value.sizes:
        return 0
    sizes, tokens = value.sizes, value.sizes["token_a"]
    networks = max(networks, sizes.get("network", 0))
    return networks * (sizes.get("layer", 1) - 1) * tokens * (tokens + 1) // 2
