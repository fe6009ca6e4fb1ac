"""Statistics of finite networks: exact chains, and networks with weights."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float, PRNGKeyArray

from sdeinfer.criteria import AbstractStatistic, Ensemble
from sdeinfer.layers import AbstractLayer, has_chain
from sdeinfer.networks import sample_networks, sample_tangents
from sdeinfer.solve import limit_over_on_host, step_grid
from sdeinfer.terms import LimitSteps
from sdeinfer.tuning._chain_sample import sample_chain_statistics
from sdeinfer.tuning._ensemble import by_tangent, sample_statistics, tangent_at

type Values = tuple[dict[AbstractStatistic, Float[np.ndarray, " networks"]], Bool[np.ndarray, " networks"]]
"""Statistics of networks, and whether each network explodes."""


def without_tangents(statistics: Sequence[AbstractStatistic]) -> list[AbstractStatistic]:
    """The statistics that chains have: those of gradients need weights."""
    return [each for each in statistics if each.directions is None]


@dataclasses.dataclass(frozen=True)
class Networks:
    """Networks of one width and depth, from one prompt, and the statistics that are wanted of them."""

    statistics: tuple[AbstractStatistic, ...]
    layer: AbstractLayer
    V0: Float[np.ndarray, "m m"]
    width: int
    depth: int

    def by_limit(self, paths: int, step: float, key: PRNGKeyArray) -> Values:
        """Statistics of paths of the SDE in their place, with a longest step."""
        grid, dtype = step_grid([self.depth / self.width], step), self.V0.dtype
        limit = limit_over_on_host(self.layer, grid)
        if not isinstance(limit, LimitSteps):
            columns = jax.tree.map(lambda c: np.asarray(c, dtype).reshape(1, 1), limit)
            limit = LimitSteps(columns, np.zeros(1, dtype))
        no_slopes = jax.tree.map(lambda c: np.zeros((0, *c.shape), c.dtype), limit.limit)
        found = sample_statistics(self.statistics, limit, no_slopes, self.V0, grid, paths=paths, key=key)
        return dict(zip(self.statistics, found.values, strict=True)), found.exploded

    def by_chain(self, networks: int, key: PRNGKeyArray) -> Values:
        """Statistics of exact chains, without those of tangents; none for a layer without chain."""
        mine = without_tangents(self.statistics)
        if not mine or not has_chain(self.layer):
            return {}, np.zeros(networks, bool)
        sizes: dict[str, Any] = {"width": self.width, "depth": self.depth, "networks": networks}
        found = sample_chain_statistics(mine, self.layer, self.V0, **sizes, key=key)
        return dict(zip(mine, found.values, strict=True)), found.exploded

    def at_width(self, networks: int, step: float, key: PRNGKeyArray) -> Values:
        """Statistics of exact chains, and by the limit those that chains do not have."""
        values, exploded = self.by_chain(networks, key)
        rest = tuple(each for each in self.statistics if each not in values)
        if not rest:
            return values, exploded
        others, bad = dataclasses.replace(self, statistics=rest).by_limit(networks, step, key)
        return values | others, exploded | bad

    def with_weights(self, networks: int, key: PRNGKeyArray) -> Values:
        """Statistics of networks with weights."""
        found, exploded = {}, np.zeros(networks, bool)
        sizes: dict[str, Any] = {"width": self.width, "depth": self.depth, "networks": networks}
        for tangent, mine in by_tangent(self.statistics).items() if networks else ():
            sizes["observe_every"] = 1 if any(each.every_step for each in mine) else self.depth
            tokens = len(self.V0)
            if tangent is None:
                data = sample_networks(self.layer, self.V0, method="weights", key=key, **sizes)
                values, bad = _values(mine, self.V0, data["covariance"].values[:, 1:])
            else:
                D0 = tangent_at(tangent, tokens, self.V0.dtype)
                S = sample_tangents(self.layer, self.V0, directions=D0, key=key, **sizes)[:, 1:]
                values, bad = _values(mine, self.V0, S[..., :tokens, :tokens], S[..., tokens:, tokens:])
            found, exploded = found | values, exploded | bad
        return found, exploded


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
