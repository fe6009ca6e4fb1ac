"""Statistics of networks with derivatives: paths of the SDE, exact chains at width n, and networks with weights.

Block by block, in memory that does not grow with the number of networks. Random numbers depend on the key and the
network's number alone, so that statistics are functions of the parameters.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray
from scipy.linalg import block_diag

from sdeinfer._threads import in_threads
from sdeinfer.covariance._factors import factor_on_host
from sdeinfer.criteria import AbstractStatistic, Ensemble
from sdeinfer.criteria._statistics import evaluate
from sdeinfer.layers import AbstractLayer
from sdeinfer.layers._keys import NetworkKeys
from sdeinfer.networks import covariance_chain, sample_networks, sample_tangents
from sdeinfer.networks._sample import chains_at_once
from sdeinfer.solve import BrownianSteps, PSDSplitting
from sdeinfer.solve._blocks import block_size
from sdeinfer.solve._grid import Grid, Times
from sdeinfer.solve._solve import solve_paths
from sdeinfer.terms._limit import Limit, LimitSteps

type Statistics = tuple[AbstractStatistic, ...]


class Sample(NamedTuple):
    """Statistics of networks, their derivatives along no or some directions, and whether each network exploded."""

    values: Float[np.ndarray, "statistics networks"]
    slopes: Float[np.ndarray, "statistics directions networks"]
    exploded: Bool[np.ndarray, " networks"]


def joined_samples(statistics: Statistics, parts: Mapping[Statistics, Sample]) -> Sample:
    """Samples of groups of statistics as one; a network explodes if it does in one of them."""
    values = {statistic: x for group, part in parts.items() for statistic, x in zip(group, part.values, strict=True)}
    slopes = {statistic: x for group, part in parts.items() for statistic, x in zip(group, part.slopes, strict=True)}
    exploded = np.any([part.exploded for part in parts.values()], axis=0)
    return Sample(
        np.stack([values[statistic] for statistic in statistics]),
        np.stack([slopes[statistic] for statistic in statistics]),
        exploded,
    )


def path_sample(
    statistics: Statistics,
    limit: LimitSteps,
    slopes: Limit,
    V0: Float[np.ndarray, "m m"],
    grid: Grid,
    *,
    paths: int,
    key: PRNGKeyArray,
) -> Sample:
    """Paths of the SDE, with coefficients of each interval; `slopes` have a leading axis of directions."""
    dtype = V0.dtype
    limit = limit.padded(dtype) if len(limit.starts) > 1 else jax.tree.map(lambda c: np.asarray(c, dtype), limit)
    count = len(limit.starts)
    # The last interval is repeated; intervals are the second axis.
    slopes = jax.tree.map(
        lambda c: np.pad(np.asarray(c, dtype), [(0, 0), (0, count - c.shape[1]), (0, 0)], "edge"), slopes
    )

    def draw(group: Statistics, tangent: Any) -> Sample:
        every_step = any(statistic.every_step for statistic in group)
        saved = grid.steps[1:] if every_step else grid.saved
        times = Grid(grid.steps, saved).times(dtype)
        if not every_step:
            times = Times(times.steps, times.saved[:1], times.end)
        start = factor_on_host(with_tangent(V0, tangent))
        # A block saves at most 2²² entries of covariances.
        size = max(1, min(block_size(paths, start.size), 2**22 // (len(saved) * start.size)))
        solver, sizes = PSDSplitting(tangents=tangent is not None), {"size": size, "saved": len(saved)}

        def block(number: int) -> tuple[Array, Array, Array]:
            return _path_block(group, solver, limit, slopes, start, V0, times, key, np.uint32(number), **sizes)

        return _in_batches(block, paths, size)

    return _by_tangent(statistics, draw)


def chain_sample(
    statistics: Statistics,
    layer: AbstractLayer,
    V0: Float[np.ndarray, "m m"],
    *,
    width: int,
    depth: int,
    networks: int,
    slopes: AbstractLayer | None = None,
    key: PRNGKeyArray,
) -> Sample:
    """Exact chains of networks of width n; `slopes` is a layer whose arrays have a leading axis of directions.

    With slopes, networks are others of the same law. Statistics are smooth wherever every V is definite; where V is
    singular, as with equal tokens, along directions that keep it so.
    """
    layer, slopes = (jax.tree.map(lambda x: np.asarray(x, V0.dtype), tree) for tree in (layer, slopes))

    def draw(group: Statistics, tangent: Any) -> Sample:
        start = with_tangent(V0, tangent)
        room = depth if any(statistic.every_step for statistic in group) else 1
        batch = chains_at_once(networks, len(start), layer.column_blocks, room)
        sizes: dict[str, Any] = {"width": np.int32(width), "depth": np.int32(depth), "room": room}

        def block(number: int) -> tuple[Array, Array, Array]:
            members = np.arange(number * batch, (number + 1) * batch, dtype=np.uint32)
            return _chain_block(group, layer, slopes, V0, start, members, key, **sizes)

        return _in_batches(block, networks, batch)

    return _by_tangent(statistics, draw)


def weight_sample(
    statistics: Statistics,
    layer: AbstractLayer,
    V0: Float[np.ndarray, "m m"],
    *,
    width: int,
    depth: int,
    networks: int,
    key: PRNGKeyArray,
) -> Sample:
    """Networks with weights, without derivatives; those whose covariance overflows explode."""
    tokens = len(V0)

    def draw(group: Statistics, tangent: Any) -> Sample:
        observe_every = 1 if any(statistic.every_step for statistic in group) else depth
        sizes: dict[str, Any] = {
            "width": width,
            "depth": depth,
            "networks": networks,
            "observe_every": observe_every,
        }
        if tangent is None:
            data = sample_networks(layer, V0, method="weights", key=key, **sizes)
            V, D = data["covariance"].values[:, 1:], None
        else:
            D0 = tangent_at(tangent, tokens, V0.dtype)
            S = sample_tangents(layer, V0, directions=D0, key=key, **sizes)[:, 1:]
            V, D = S[..., :tokens, :tokens], S[..., tokens:, tokens:]
        exploded = ~np.isfinite(V if D is None else np.concatenate([V, D], axis=-1)).all(axis=(1, 2, 3))
        finite = ~exploded[:, None, None, None]
        D = None if D is None else jnp.asarray(np.where(finite, D, np.eye(tokens) / tokens))
        ensemble = Ensemble(jnp.asarray(V0), jnp.asarray(np.where(finite, V, V0)), D, jnp.asarray(exploded))
        return Sample(np.asarray(evaluate(group, ensemble)), np.zeros((len(group), 0, networks)), exploded)

    return _by_tangent(statistics, draw)


def _by_tangent(statistics: Statistics, draw: Callable[[Statistics, Any], Sample]) -> Sample:
    """One sample, where statistics of one tangent share networks; those without a tangent share those of the first."""
    tangents = list(dict.fromkeys(x.directions for x in statistics if x.directions is not None)) or [None]
    groups: dict[Any, Statistics] = {tangent: () for tangent in tangents}
    for statistic in statistics:
        groups[tangents[0] if statistic.directions is None else statistic.directions] += (statistic,)
    return joined_samples(statistics, {group: draw(group, tangent) for tangent, group in groups.items()})


def tangent_at(tangent: int | str, tokens: int, dtype: np.dtype) -> Float[np.ndarray, "m m"]:
    """D with tr D = 1 of a tangent at a token, or at all."""
    if tangent == "all":
        return np.eye(tokens, dtype=dtype) / tokens
    return np.diag((np.arange(tokens) == tangent).astype(dtype))


def with_tangent(V0: Float[np.ndarray, "m m"], tangent: int | str | None) -> Float[np.ndarray, "rows rows"]:
    """V0, or the joint covariance of tokens and a tangent at time 0."""
    return V0 if tangent is None else np.asarray(block_diag(V0, tangent_at(tangent, len(V0), V0.dtype)))


def _in_batches(draw: Callable[[int], Sequence[Array]], count: int, size: int) -> Sample:
    """So many networks, drawn in threads; `draw` returns a block of `size` by its number."""
    blocks = in_threads(lambda number: [np.asarray(x) for x in draw(number)], range(-(-count // size)))
    return Sample(*(np.concatenate(parts, axis=-1)[..., :count] for parts in zip(*blocks, strict=True)))


@functools.partial(jax.jit, static_argnums=(0,), static_argnames=("size", "saved"))
def _path_block(statistics, solver, limit: LimitSteps, slopes, start, V0, times, key, number, *, size, saved):
    """Values of the statistics of one block of paths, their derivatives, and whether paths exploded."""
    tokens = len(V0)
    shape = jax.ShapeDtypeStruct((*limit.normals(len(start)), size), start.dtype)
    brownian = BrownianSteps(shape=shape, key=key, block=number)
    X0 = jnp.broadcast_to(start[..., None], (*start.shape, size))

    def values(coefficients: Limit) -> tuple[Array, Array]:
        steps = LimitSteps(coefficients, limit.starts)
        S, stopped = solve_paths(steps, X0, times, brownian, solver=solver)
        S, exploded = jnp.moveaxis(S[:saved], -1, 0), jnp.isfinite(stopped)
        D = S[..., tokens:, tokens:] if solver.tangents else None
        return evaluate(statistics, Ensemble(V0, S[..., :tokens, :tokens], D, exploded)), exploded

    return _along(values, limit.limit, slopes)


@functools.partial(jax.jit, static_argnums=0, static_argnames="room")
def _chain_block(statistics, layer, slopes, V0, start, numbers, key, *, width, depth, room):
    """The same of one block of chains; they start at V0, or at the joint covariance of tokens and a tangent."""
    keys, every_step = NetworkKeys.numbered(key, numbers), any(statistic.every_step for statistic in statistics)
    sizes = {"width": width, "layers": depth, "observe_every": 1 if every_step else depth, "room": room, "keys": keys}
    tokens, tangents = len(V0), len(start) > len(V0)

    def values(layer: AbstractLayer) -> tuple[Array, Array]:
        S = covariance_chain(layer, start, **sizes, tangents=tangents)[:, 1:]
        exploded = ~jnp.isfinite(S).all(axis=(1, 2, 3))
        S = jnp.where(exploded[:, None, None, None], start, S)
        D = S[..., tokens:, tokens:] if tangents else None
        return evaluate(statistics, Ensemble(V0, S[..., :tokens, :tokens], D, exploded)), exploded

    if slopes is not None:
        return _along(values, layer, slopes)
    statistic_values, exploded = values(layer)
    return statistic_values, jnp.zeros((len(statistics), 0, len(numbers)), statistic_values.dtype), exploded


def _along(values: Callable[[Any], tuple[Array, Array]], point: Any, slopes: Any) -> tuple[Array, Array, Array]:
    """Values at some parameters, their derivatives along directions, and what explodes."""

    def along(direction: Any) -> tuple[Array, Array, Array]:
        return jax.jvp(values, (point,), (direction,), has_aux=True)

    return jax.vmap(along, out_axes=(None, 1, None))(slopes)
