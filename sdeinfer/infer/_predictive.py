"""Predictions of the SDE for the observed networks at draws of the parameters. Tests: `tests/infer/test_fit.py`."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Array, Float, Key, PRNGKeyArray

from sdeinfer.covariance._factors import factor_on_host
from sdeinfer.layers import AbstractLayer
from sdeinfer.layers._base import limits_on_host
from sdeinfer.observation._dataset import DIMS, outputs_of
from sdeinfer.solve._blocks import solve_in_blocks
from sdeinfer.solve._grid import STEP, step_grid
from sdeinfer.solve._solve import fill_after

TIMES, FEWEST, ENTRIES = 9, 3, 2**24
"""Largest and least number of observed layers, evenly spaced, at which predictions are kept; and the number of entries
of predictions above which there are fewer than `TIMES`."""


def predict(
    layers: Float[np.ndarray, "draws *networks coordinates"],
    data: xr.Dataset,
    *,
    architecture: AbstractLayer,
    key: PRNGKeyArray,
) -> xr.Dataset:
    """Replicate the observed networks from their first observed covariances, one replicate for each draw.

    Arguments:
        layers: draws of the coordinates of the layer, or of each network's layer.
        data: the observed networks.
        architecture: the kind of layer.
        key: PRNG key.

    Returns:
        A Dataset with `covariance` over draw, network, layer, token_a, token_b, at 3 to 9 of the observed layers, fewer
        for many networks. Paths are NaN after an explosion; the attribute `exploded` is the fraction of exploded paths.
    """
    numbers = data["layer"].values
    dtype, widths = jnp.result_type(float), data["width"].values
    X0 = factor_on_host(np.asarray(data["covariance"].values[:, 0], dtype))
    draws, networks = len(layers), len(X0)
    times = min(TIMES, max(FEWEST, ENTRIES // (draws * X0.size)), len(numbers))
    kept = np.unique(np.linspace(0, len(numbers) - 1, times).round().astype(int))
    # Limits have one value per draw, or per draw and network.
    limits = limits_on_host(architecture, np.asarray(layers, dtype))
    limits = jax.tree.map(lambda c: np.broadcast_to(c.reshape(draws, -1), (draws, networks)), limits)
    replicate = np.empty((draws, networks, len(kept), *X0.shape[1:]), np.float32)
    for width in np.unique(widths):
        same = np.flatnonzero(widths == width)
        grid = step_grid((numbers[kept] - numbers[0]) / width, STEP)
        # One path for each pair of a draw and a network.
        each = jax.tree.map(lambda c, same=same: c[:, same].reshape(-1), limits)
        starts = np.tile(X0[same], (draws, 1, 1))
        key_here = jr.fold_in(key, np.uint32(width))
        V, stopped = solve_in_blocks(each, starts, grid, paths=len(starts), key=key_here)
        V = fill_after(stopped, V, grid.saved, np.nan)
        # Values that single precision cannot hold have exploded as well.
        V = np.where(np.abs(V) < np.finfo(replicate.dtype).max, V, np.nan)
        replicate[:, same] = V.reshape(draws, len(same), *V.shape[1:])
    if outputs_of(data):
        keys = jr.split(jr.fold_in(key, 0), draws)
        replicate[:, :, -1] = _sample_covariances(replicate[:, :, -1], outputs_of(data), keys)
    return xr.Dataset(
        {"covariance": (("draw", *DIMS), replicate)},
        coords={"layer": numbers[kept], "network": data["network"].values},
        attrs={"exploded": float(np.isnan(replicate[:, :, -1, 0, 0]).mean())},
    )


def predicted_draws(predictions: int | None, draws: int, chains: int) -> tuple[np.ndarray, np.ndarray]:
    """Evenly spaced draws of the prior, and of each chain, which are among them; all if None."""
    if predictions is None:
        return np.arange(draws), np.arange(draws)
    count = min(predictions, draws)
    of_prior = draws // count * np.arange(count)
    return of_prior, of_prior[::chains]


def labelled(predicted: xr.Dataset, chains: int, draws: np.ndarray) -> xr.Dataset:
    """Predictions with the chain and draw labels of their parameters."""
    both = pd.MultiIndex.from_product([np.arange(chains), draws], names=["chain", "draw"])
    index = xr.Coordinates.from_pandas_multiindex(both, "sample")
    return predicted.rename(draw="sample").assign_coords(index).unstack("sample").transpose("chain", "draw", ...)


@functools.partial(jax.jit, static_argnums=1)
def _sample_covariances(V: Float[Array, "draws networks m m"], outputs: int, keys: Key[Array, " draws"]) -> Array:
    """Sample covariances of `outputs` outputs of each network (Eq. 21)."""

    def one_draw(inputs):
        V, key = inputs
        X = jnp.linalg.cholesky(V) @ jr.normal(key, (*V.shape[:2], outputs), V.dtype)
        return X @ jnp.swapaxes(X, -1, -2) / outputs

    return jax.lax.map(one_draw, (V, keys))
