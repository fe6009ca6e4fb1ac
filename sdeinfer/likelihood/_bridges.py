"""Data and NumPyro distribution of networks with latent layers."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int
from numpyro.distributions import Distribution, constraints

from sdeinfer._threads import on_cpu
from sdeinfer.covariance._matrix import square_of
from sdeinfer.layers import AbstractLayer, Limit
from sdeinfer.layers._finite_width import ATTENTION_NEXT
from sdeinfer.likelihood._assumptions import NOTHING_ASSUMED, Assumptions
from sdeinfer.likelihood._bridge import Span, bridge, innovations_needed
from sdeinfer.likelihood._layer_step import LayerLaw, power_of
from sdeinfer.likelihood._terms import moments_of
from sdeinfer.likelihood._transitions import Path

TOGETHER = 256
"""Number of bridges built at a time on a CPU, so that the arrays of one layer fit in the cache."""


class Bridges(eqx.Module):
    """Consecutive observations of networks, with latent layers between them."""

    start: Float[Array, "bridges m m"]
    end: Float[Array, "bridges m m"]
    layers: Int[Array, " bridges"]
    network: Int[Array, " bridges"]
    width: Int[Array, " bridges"]
    widths: Float[Array, " widths"]
    more_drift: Float[Array, "bridges 2 m m"]
    features: Float[Array, "bridges features p"]
    centre: Float[Array, "features p"]
    networks: int = eqx.field(static=True)
    latent: int = eqx.field(static=True)
    outputs: int = eqx.field(static=True, default=0)
    assumptions: Assumptions = eqx.field(static=True, default=NOTHING_ASSUMED)

    @property
    def innovations(self) -> tuple[int, int]:
        """Shape (latent, p) of the standard normals of one bridge."""
        return self.latent, self.centre.shape[-1]

    def __len__(self) -> int:
        return self.start.shape[0]

    def by_network(self, of_bridges: Float[Array, " bridges"]) -> Float[Array, " networks"]:
        """Sum over the bridges of each network."""
        return jnp.zeros(self.networks, of_bridges.dtype).at[self.network].add(of_bridges)


def bridges_of(path: Path, *, outputs: int = 0, assumptions: Assumptions = NOTHING_ASSUMED) -> Bridges:
    """Make one bridge for each transition of a path."""
    layers, whole = path.gap[path.layer], slice(None)
    more_drift, features = path.next_order()
    # Medians, since the features of an exploding covariance are larger by many orders of magnitude.
    centre = np.median(features, axis=0)
    centre[ATTENTION_NEXT] = 0.0
    widths = np.unique(path.width)
    return Bridges(
        start=jax.device_put(path.starts(whole)),
        end=jax.device_put(path.ends(whole)),
        layers=jnp.asarray(layers),
        network=jnp.asarray(path.network),
        width=jnp.asarray(path.width_index(widths)),
        widths=jnp.asarray(widths, float),
        more_drift=jnp.asarray(more_drift, float),
        features=jnp.asarray(features, float),
        centre=jnp.asarray(centre, float),
        networks=len(path.width),
        latent=innovations_needed(int(layers.max()), outputs),
        outputs=outputs,
        assumptions=assumptions,
    )


class Bridged(Distribution):
    """Law of the observations given the innovations of the latent layers: log w of `bridge`.

    One batch element is one bridge.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("layer", "law", "bridges", "innovations")
    pytree_aux_fields = ("power",)
    support = constraints.independent(constraints.real, 2)  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(
        self,
        layer: AbstractLayer,
        bridges: Bridges,
        innovations: Float[Array, "bridges latent p"],
        *,
        validate_args: bool | None = None,
    ):
        self.layer = layer
        limit = bridges.assumptions.law == "limit"
        self.law = layer.limit() if limit else jax.vmap(layer.finite_width)(bridges.widths)
        self.bridges = bridges
        self.innovations = innovations
        self.power = power_of(layer.skewness)
        super().__init__((len(bridges),), bridges.end.shape[1:], validate_args=validate_args)

    def log_prob(self, value: ArrayLike, intermediates: list | None = None) -> Float[Array, " bridges"]:
        """Log density of the ends, covariances or X Xᵀ/q of outputs X, shape (bridges, m, m)."""
        del intermediates
        bridges, count, ends = self.bridges, len(self.bridges), jnp.asarray(value)
        together = TOGETHER if on_cpu() else count
        blocks = -(-count // together)
        size = -(-count // blocks)
        each = (bridges.start, ends, bridges.layers, bridges.width, bridges.more_drift, bridges.features)
        # The last block is padded with copies of the last bridge.
        index = jnp.minimum(jnp.arange(blocks * size), count - 1).reshape(blocks, size)
        columns = jax.tree.map(lambda x: x[index], (*each, self.innovations))
        law_of_block = self._law_of_block()

        def block(columns):
            start, end, layers, width, more_drift, features, innovations = (jnp.moveaxis(x, 0, -1) for x in columns)
            law = law_of_block(width, more_drift, features)
            return bridge(law, Span(start, end, layers, bridges.outputs), innovations)[0]

        return jax.lax.map(block, columns).reshape(-1)[:count]

    def _law_of_block(self) -> Callable[[Array, Array, Array], LayerLaw]:
        """Return a function from width indices, drift terms and features of bridges to the law of their layers."""
        bridges, law = self.bridges, self.law
        tokens = bridges.start.shape[-1]
        if isinstance(law, Limit):
            h = 1 / bridges.widths
            return lambda width, more_drift, features: LayerLaw.of_limit(law, h[width], tokens=tokens, power=self.power)
        moments = jax.vmap(lambda law: moments_of(law, bridges.centre))(law)

        def of_moments(width: Array, more_drift: Array, features: Array) -> LayerLaw:
            own = (features - bridges.centre[..., None])[:, square_of(tokens)]
            mine = jax.tree.map(lambda x: x[width], moments)
            return LayerLaw.of_moments(mine, more_drift, own, 1 / bridges.widths[width], power=self.power)

        return of_moments
