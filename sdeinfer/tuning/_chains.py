"""Statistics of finite networks: exact chains, and networks with weights."""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, PRNGKeyArray

from sdeinfer.criteria import AbstractStatistic, Ensemble
from sdeinfer.layers import AbstractLayer, has_chain
from sdeinfer.networks import sample_chains, sample_networks, sample_tangents
from sdeinfer.tuning._ensemble import by_tangent, statistics_of_layer, tangent_at

type Values = tuple[dict[AbstractStatistic, Float[np.ndarray, " networks"]], Bool[np.ndarray, " networks"]]
"""Statistics of networks, and whether each network explodes."""


def without_tangents(statistics: Sequence[AbstractStatistic]) -> list[AbstractStatistic]:
    """The statistics that chains have: those of gradients need weights."""
    return [each for each in statistics if each.directions is None]


def statistics_of_chains(
    statistics: Sequence[AbstractStatistic],
    layer: AbstractLayer,
    V0: Float[np.ndarray, "m m"],
    *,
    width: int,
    depth: int,
    networks: int,
    key: PRNGKeyArray,
) -> Values:
    """Statistics of exact chains, without those of tangents; none for a layer without chain."""
    mine = without_tangents(statistics)
    if not mine or not has_chain(layer):
        return {}, np.zeros(networks, bool)
    every = _every(mine, depth)
    starts = np.broadcast_to(V0, (networks, *V0.shape))
    sizes: dict[str, Any] = {"width": width, "observed": depth // every, "observe_every": every}
    return _values(mine, V0, sample_chains(layer, starts, **sizes, key=key)[:, 1:])


def statistics_at_width(
    statistics: Sequence[AbstractStatistic],
    layer: AbstractLayer,
    V0: Float[np.ndarray, "m m"],
    *,
    width: int,
    depth: int,
    networks: int,
    step: float,
    key: PRNGKeyArray,
) -> Values:
    """Statistics of exact chains, and by paths of the limit with a longest step those that chains do not have."""
    sizes: dict[str, Any] = {"width": width, "depth": depth, "networks": networks}
    values, exploded = statistics_of_chains(statistics, layer, V0, **sizes, key=key)
    rest = tuple(each for each in statistics if each not in values)
    if not rest:
        return values, exploded
    by_limit, others = statistics_of_layer(rest, layer, V0, depth / width, paths=networks, step=step, key=key)
    return values | by_limit, exploded | others


def statistics_of_networks(
    statistics: Sequence[AbstractStatistic],
    layer: AbstractLayer,
    V0: Float[np.ndarray, "m m"],
    *,
    width: int,
    depth: int,
    networks: int,
    key: PRNGKeyArray,
) -> Values:
    """Statistics of networks with weights."""
    found, exploded = {}, np.zeros(networks, bool)
    sizes: dict[str, Any] = {"width": width, "depth": depth, "networks": networks}
    for tangent, mine in by_tangent(tuple(statistics)).items() if networks else ():
        sizes["observe_every"], tokens = _every(mine, depth), len(V0)
        if tangent is None:
            data = sample_networks(layer, V0, method="weights", key=key, **sizes)
            values, bad = _values(mine, V0, data["covariance"].values[:, 1:])
        else:
            D0 = tangent_at(tangent, tokens, V0.dtype)
            S = sample_tangents(layer, V0, directions=D0, key=key, **sizes)[:, 1:]
            values, bad = _values(mine, V0, S[..., :tokens, :tokens], S[..., tokens:, tokens:])
        found, exploded = found | values, exploded | bad
    return found, exploded


def _every(statistics: Sequence[AbstractStatistic], depth: int) -> int:
    """Layers from one observation to the next."""
    return 1 if any(each.every_step for each in statistics) else depth


def _values(
    statistics: Sequence[AbstractStatistic], V0: np.ndarray, V: np.ndarray, D: np.ndarray | None = None
) -> Values:
    """Statistics of networks; those whose covariance overflows count as exploded."""
    exploded = ~np.isfinite(V if D is None else np.concatenate([V, D], axis=-1)).all(axis=(1, 2, 3))
    kept = ~exploded[:, None, None, None]
    covariance = jnp.asarray(np.where(kept, V, V0))
    tangent = None if D is None else jnp.asarray(np.where(kept, D, np.eye(len(V0)) / len(V0)))
    paths = Ensemble(jnp.asarray(V0), covariance, tangent, jnp.asarray(exploded))
    return {each: np.asarray(each(paths if each.every_step else paths.end)) for each in statistics}, exploded
