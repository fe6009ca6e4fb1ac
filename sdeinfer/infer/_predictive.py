"""Replicates of the observed networks at draws of the parameters. Tests: `tests/infer/test_predictive.py`."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from sdeinfer._files import InputError
from sdeinfer.covariance._factors import factor_on_host
from sdeinfer.infer._settings import MOST_DRAWS, Law
from sdeinfer.layers import AbstractLayer
from sdeinfer.layers._base import limits_on_host
from sdeinfer.networks._chain import check_chain_width
from sdeinfer.networks._sample import ENTRIES_AT_ONCE, sample_chains
from sdeinfer.observation._dataset import DIMS, outputs_of
from sdeinfer.solve._blocks import solve_in_blocks
from sdeinfer.solve._grid import STEP, step_grid
from sdeinfer.solve._solve import fill_after

FEWEST_LAYERS = 3
"""Least number of layers, evenly spaced, that are kept of predictions with too many entries."""

FEWEST_DRAWS, LAYERS_DRAWN = 20, 2**16
"""Least number of draws at which networks are replicated by default, and the number of layers, of all draws and
networks, above which there are fewer draws than `MOST_DRAWS`: about a second on two cores."""


def predict(
    layers: Float[np.ndarray, "draws *networks coordinates"],
    data: xr.Dataset,
    *,
    architecture: AbstractLayer,
    law: Law = "finite-width",
    key: PRNGKeyArray,
) -> xr.Dataset:
    """Replicate the observed networks from their first observed covariances, one replicate for each draw.

    Arguments:
        layers: draws of the coordinates of the layer, or of each network's layer.
        data: the observed networks.
        architecture: the kind of layer.
        law: "finite-width", networks of the observed widths by their exact chain (see `sample_networks`); or "limit",
            paths of the SDE. A layer whose chain is not `on_host`, or not defined at one of the widths, has the limit
            alone.
        key: PRNG key.

    Returns:
        A Dataset with `covariance` over draw, network, layer, token_a, token_b at the observed layers, some of them for
        many networks. What overflows is NaN; the attribute `exploded` is its share after the last layer, and `law` the
        law.
    """
    numbers, widths = data["layer"].values, data["width"].values
    V0 = np.asarray(data["covariance"].values[:, 0], jnp.result_type(float))
    draws, networks = len(layers), len(V0)
    count = min(len(numbers), max(FEWEST_LAYERS, ENTRIES_AT_ONCE // (draws * V0.size)))
    places = np.unique(np.linspace(0, len(numbers) - 1, count).round().astype(int))
    by_chain = law == "finite-width" and has_networks(architecture, data)
    replicates_of, steps = _networks if by_chain else _paths, (numbers[places] - numbers[0]).astype(int)
    layers = np.broadcast_to(
        np.asarray(layers, V0.dtype).reshape(draws, -1, layers.shape[-1]), (draws, networks, layers.shape[-1])
    )
    replicate = np.empty((draws, networks, len(places), *V0.shape[1:]), np.float32)
    for width in np.unique(widths):
        same = np.flatnonzero(widths == width)
        key_of_width = jr.fold_in(key, np.uint32(width))
        V = replicates_of(architecture, layers[:, same], V0[same], int(width), steps, key=key_of_width)
        # Values that single precision cannot hold have exploded as well.
        finite = (np.abs(V) < np.finfo(replicate.dtype).max).all(axis=(-2, -1), keepdims=True)
        replicate[:, same] = np.where(finite, V, np.nan)
    if outputs_of(data):
        keys = jr.split(jr.fold_in(key, 0), draws)
        replicate[:, :, -1] = _sample_covariances(replicate[:, :, -1], outputs_of(data), keys)
    return xr.Dataset(
        {"covariance": (("draw", *DIMS), replicate)},
        coords={"layer": numbers[places], "network": data["network"].values},
        attrs={
            "law": "finite-width" if by_chain else "limit",
            "exploded": float(np.isnan(replicate[:, :, -1, 0, 0]).mean()),
        },
    )


def has_networks(architecture: AbstractLayer, data: xr.Dataset) -> bool:
    """Whether the observed networks can be drawn by a chain that compiles nothing."""
    widths = np.unique(data["width"].values)
    if not (architecture.on_host and architecture.has_chain) or (widths != np.round(widths)).any():
        return False
    try:
        for width in widths:
            check_chain_width(architecture, tokens=data.sizes["token_a"], width=int(width))
    except InputError:
        return False
    return True


def _networks(
    architecture: AbstractLayer,
    layers: Float[np.ndarray, "draws networks coordinates"],
    V0: Float[np.ndarray, "networks m m"],
    width: int,
    steps: Int[np.ndarray, " kept"],
    *,
    key: PRNGKeyArray,
) -> Float[np.ndarray, "draws networks kept m m"]:
    """Networks by the exact chain, after so many layers."""
    every = int(np.gcd.reduce(steps))
    networks, observed = len(V0), int(steps[-1]) // every
    replicates = np.empty((len(layers), networks, len(steps), *V0.shape[1:]), np.float32)
    together = max(1, ENTRIES_AT_ONCE // (V0.size * (observed + 1)))
    for start in range(0, len(layers), together):
        some = layers[start : start + together]
        V = sample_chains(
            architecture.with_coordinates(some.reshape(-1, some.shape[-1]).T),
            np.tile(V0, (len(some), 1, 1)),
            width=width,
            observed=observed,
            observe_every=every,
            first=start * networks,
            shared=False,
            key=key,
        )[:, steps // every]
        with np.errstate(over="ignore"):
            replicates[start : start + together] = V.reshape(len(some), networks, *V.shape[1:])
    return replicates


def _paths(
    architecture: AbstractLayer,
    layers: Float[np.ndarray, "draws networks coordinates"],
    V0: Float[np.ndarray, "networks m m"],
    width: int,
    steps: Int[np.ndarray, " kept"],
    *,
    key: PRNGKeyArray,
) -> Float[np.ndarray, "draws networks kept m m"]:
    """Paths of the SDE; NaN after an explosion."""
    grid = step_grid(steps / width, STEP)
    limits = jax.tree.map(lambda c: c.reshape(-1), limits_on_host(architecture, layers))
    starts = np.tile(factor_on_host(V0), (len(layers), 1, 1))
    V, stopped = solve_in_blocks(limits, starts, grid, paths=len(starts), key=key)
    V = fill_after(stopped, V, grid.saved, np.nan)
    return np.asarray(V).reshape(*layers.shape[:2], *V.shape[1:])


def affordable_draws(data: xr.Dataset) -> int:
    """Number of draws of the parameters that get replicates of networks by default."""
    layers = data["layer"].values
    drawn = data.sizes["network"] * max(1, int(layers[-1] - layers[0]))
    return min(MOST_DRAWS, max(FEWEST_DRAWS, LAYERS_DRAWN // drawn))


def predicted_draws(predictions: int | None, draws: int, chains: int) -> Int[np.ndarray, " some"]:
    """Choose evenly spaced draws of each chain, which together are `predictions`; all if None.

    The same indices choose draws of the prior.
    """
    count = draws if predictions is None else min(draws, -(-predictions // chains))
    return draws // count * np.arange(count)


def labelled_predictions(predicted: xr.Dataset, chains: int, draws: np.ndarray) -> xr.Dataset:
    """Predictions with the chain and draw labels of their parameters."""
    both = pd.MultiIndex.from_product([np.arange(chains), draws], names=["chain", "draw"])
    index = xr.Coordinates.from_pandas_multiindex(both, "sample")
    return predicted.rename(draw="sample").assign_coords(index).unstack("sample").transpose("chain", "draw", ...)


def law_of_predictions(post: xr.DataTree) -> str:
    """The law of the replicates in a fit; files of earlier versions have paths of the limit."""
    return post.children["posterior_predictive"].attrs.get("law", "limit")


def last_layer(covariance: xr.DataArray) -> dict[str, np.ndarray]:
    """Largest and smallest log-eigenvalue and mean correlation of V after the last layer; +∞ if exploded.

    The smallest log-eigenvalue of a singular V, such as the sample covariance of fewer outputs than tokens, is −∞.
    """
    V = covariance.isel(layer=-1).transpose(..., "token_a", "token_b").values
    exploded = ~np.isfinite(V).all(axis=(-2, -1))
    V = np.where(exploded[..., None, None], np.eye(V.shape[-1]), V)
    values = np.linalg.eigvalsh(V)
    rounding = np.finfo(V.dtype).eps * V.shape[-1] * values[..., -1]
    values[..., 0] = np.where(values[..., 0] > rounding, values[..., 0], 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        numbers = {"largest log-eigenvalue": np.log(values[..., -1])}
        if V.shape[-1] > 1:
            norm = np.sqrt(np.diagonal(V, axis1=-2, axis2=-1))
            rows, columns = np.triu_indices(V.shape[-1], k=1)
            rho = V[..., rows, columns] / (norm[..., rows] * norm[..., columns])
            numbers |= {"smallest log-eigenvalue": np.log(values[..., 0]), "mean correlation": rho.mean(axis=-1)}
    return {name: np.where(exploded, np.inf, x) for name, x in numbers.items()}


def with_numbers(data: xr.Dataset) -> xr.Dataset:
    """Covariances as a coordinate, and the numbers of `last_layer` as variables, of which ArviZ takes one a network.

    A number that some observed network lacks, as of a singular V, is left out there, and so from ArviZ's comparisons.
    """
    covariance = data["covariance"]
    dims = [dim for dim in covariance.dims if dim not in ("layer", "token_a", "token_b")]
    numbers = {name.replace(" ", "_").replace("-", "_"): (dims, x) for name, x in last_layer(covariance).items()}
    if "draw" not in dims:
        numbers = {name: variable for name, variable in numbers.items() if np.isfinite(variable[1]).all()}
    return data.assign(numbers).set_coords("covariance")


@functools.partial(jax.jit, static_argnums=1)
def _sample_covariances(V: Float[Array, "draws networks m m"], outputs: int, keys: Key[Array, " draws"]) -> Array:
    """Sample covariances of `outputs` outputs of each network (Eq. 21)."""

    def one_draw(inputs):
        V, key = inputs
        X = jnp.linalg.cholesky(V) @ jr.normal(key, (*V.shape[:2], outputs), V.dtype)
        return X @ jnp.swapaxes(X, -1, -2) / outputs

    return jax.lax.map(one_draw, (V, keys))
