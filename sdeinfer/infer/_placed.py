"""The device and the precision of fits."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import xarray as xr

from sdeinfer._threads import on_cpu
from sdeinfer.likelihood._model import LatentLayers

SINGLE = 2**16
"""Largest number of terms of a log density in single precision, which resolves a sum of so many to a few hundredths."""


def placed[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function of fits, so that it runs where it is fast, in a precision that resolves its sums.

    It runs on the CPU beside an accelerator, where each of its many small programs would take longer to launch than a
    core needs for its work: README's fit took 26 s on an H100, and 2.3 s on the CPU beside it. Fits with latent layers,
    which are large, and those inside of `jax.default_device` run where the caller's programs run. With more than
    `SINGLE` terms it runs in double precision.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        given = (*args, *kwargs.values())
        device = jax.config.jax_default_device
        if device is None and not on_cpu() and not any(isinstance(value, LatentLayers) for value in given):
            device = _host()
        x64 = jax.config.jax_enable_x64 or any(_terms(value) > SINGLE for value in given)
        with jax.default_device(device), jax.enable_x64(x64):
            return function(*args, **kwargs)

    return wrapped


def _host() -> Any:
    """The device of the CPU; None where the platforms of JAX, as by JAX_PLATFORMS, leave it out."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


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
