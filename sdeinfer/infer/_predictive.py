"""What the SDE predicts for the observed networks at draws of the parameters."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, PRNGKeyArray

from sdeinfer.covariance import semidefinite_cholesky
from sdeinfer.layers import Architecture
from sdeinfer.observe import DIMS, outputs_of
from sdeinfer.solve import BrownianSteps, fill_after, solve_paths, step_grid

TIMES = 9
"""Predictions are kept at no more than so many of the observed layers, evenly spread: files stay small."""

STEP = 0.01


def predict(
    parameters: dict[str, Float[Array, " draws"]],
    data: xr.Dataset,
    *,
    architecture: Architecture,
    key: PRNGKeyArray,
) -> xr.Dataset:
    """Replicate the observed networks from their first observed covariances, one replicate for each draw.

    Arguments:
        parameters: draws of the architecture's parameters.
        data: the observed networks.
        architecture: the kind of layer.
        key: where the randomness comes from.

    Returns:
        What would be observed: `covariance` over draw, network, layer, token_a, token_b at up to `TIMES` of the layers
        that were. Paths that explode are NaN from then on; the attribute `exploded` is their share.
    """
    layers = data["layer"].values
    kept = np.unique(np.linspace(0, len(layers) - 1, min(TIMES, len(layers))).round().astype(int))
    V0 = jnp.asarray(data["covariance"].values[:, 0], float)
    widths = data["width"].values
    draws = len(next(iter(parameters.values())))
    keys = jr.split(key, draws)
    fields = {name: parameters[name] for name in architecture.parameters}
    replicate = np.empty((draws, len(V0), len(kept), *V0.shape[1:]), np.float32)
    for width in np.unique(widths):
        same = np.flatnonzero(widths == width)
        grid = step_grid((layers[kept] - layers[0]) / width, STEP)
        of_width = jax.vmap(jr.fold_in, (0, None))(keys, width)
        replicate[:, same] = _replicate(architecture, fields, V0[same], grid, of_width)
    if outputs_of(data):
        of_outputs = jax.vmap(jr.fold_in, (0, None))(keys, 0)
        replicate[:, :, -1] = _sample_covariances(replicate[:, :, -1], outputs_of(data), of_outputs)
    return xr.Dataset(
        {"covariance": (("draw", *DIMS), replicate)},
        coords={"layer": layers[kept], "network": data["network"].values},
        attrs={"exploded": float(np.isnan(replicate[:, :, -1, 0, 0]).mean())},
    )


@functools.partial(jax.jit, static_argnums=1)
def _sample_covariances(V: Float[Array, "draws networks m m"], outputs: int, keys: PRNGKeyArray) -> Array:
    """Of so many outputs of each network (Eq. 21)."""

    def one_draw(inputs):
        V, key = inputs
        X = jnp.linalg.cholesky(V) @ jr.normal(key, (*V.shape[:2], outputs), V.dtype)
        return X @ jnp.swapaxes(X, -1, -2) / outputs

    return jax.lax.map(one_draw, (V, keys))


@eqx.filter_jit
def _replicate(architecture, fields, V0, grid, keys):
    X0 = semidefinite_cholesky(jnp.moveaxis(V0, 0, -1))

    def one_draw(inputs):
        parameters, key = inputs
        limit = architecture.layer(**parameters).limit()
        shape = jax.ShapeDtypeStruct((*limit.normals(len(X0)), *X0.shape[2:]), X0.dtype)
        V, stopped = solve_paths(limit, X0, grid, BrownianSteps(shape=shape, key=key))
        return fill_after(stopped, jnp.moveaxis(V, -1, 0), grid.saved, jnp.nan).astype(jnp.float32)

    return jax.lax.map(one_draw, (fields, keys))
