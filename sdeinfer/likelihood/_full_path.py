"""The law of networks observed at every layer."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, PRNGKeyArray
from numpyro.distributions import Distribution, constraints

from sdeinfer._files import InputError
from sdeinfer.layers import AbstractLayer, FiniteWidth, Limit
from sdeinfer.layers._keys import NetworkKeys
from sdeinfer.likelihood._path import AbstractPath
from sdeinfer.likelihood._terms import laws_on_host
from sdeinfer.networks import covariance_chain

FARTHEST_COORDINATE = 40.0
"""Bound on the parameters on the real line, such as log τ0: beyond it, squares and cubes of them lose all digits."""


class FullPath(Distribution):
    """Law of observed covariance paths given their initial covariance.

    One batch element is one network; its log density is that of the covariances V_αβ, α ≤ β, after every layer but the
    first. The terms that depend on the parameters are divided by the dispersion of the path's `Adjustment`.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("law", "path")
    support = constraints.independent(constraints.real, 3)  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, law: Limit | FiniteWidth, path: AbstractPath, *, validate_args: bool | None = None):
        if isinstance(law, Limit) and path.adjustment is not None:
            raise ValueError("path: these data were prepared for a law of finite width, not for the limit")
        self.law = law
        self.path = path
        super().__init__((path.networks,), path.value.shape[1:], validate_args=validate_args)

    def expand(self, batch_shape: Sequence[int]) -> "FullPath":
        """The law itself; as each network is observed once, it cannot be repeated by a plate of another size."""
        if tuple(batch_shape) != self.batch_shape:
            raise InputError(
                f"plate: numpyro.plate(…, path.networks) is needed around the law of {self.path.networks} networks, "
                f"got the shape {tuple(batch_shape)}; for plates of another size declare si.models.each_network"
            )
        return self

    def log_prob(self, value: ArrayLike, intermediates: list | None = None) -> Float[Array, " networks"]:
        """Log density of each network; `value` has the shape of the path's `value`."""
        del intermediates
        path, law = self.path, self.law
        if jnp.shape(value) != path.value.shape:
            raise InputError(
                f"value: path.observed is needed, or what has its shape {path.value.shape}, got {jnp.shape(value)}; of "
                "other covariances, si.transitions makes a path"
            )
        pattern = (law if isinstance(law, Limit) else law.limit).pattern
        if pattern != path.pattern:
            raise ValueError(f"path: these data were prepared for attention with {path.pattern}, not with {pattern}")
        density = path.log_density(law, jnp.asarray(value))
        return jnp.where(jnp.isnan(density), -jnp.inf, density)  # of a law whose numbers overflow


class CovariancePath(FullPath):
    """Law of observed covariance paths of networks of a layer, given their initial covariance.

    The path's assumptions choose the law: one layer at each network's width to the next order in 1/n, or the limit.
    The path's `Adjustment` is applied to the layer's parameters.

    Attributes:
        layer: the layer; each parameter is a scalar or has one value per network.
        inside: whether the parameters are in their range, of all networks or of each; the density outside of it is 0,
            and its logarithm has the derivative 0.
    """

    pytree_data_fields = ("law", "path", "layer", "inside")

    def __init__(self, layer: AbstractLayer, path: AbstractPath, *, validate_args: bool | None = None):
        self.layer = layer
        leaves = jax.tree.leaves(layer)
        if any(jnp.ndim(leaf) for leaf in leaves):
            for name, value in layer.parameters().items():
                if jnp.shape(value) not in ((), (path.networks,)):
                    raise InputError(
                        f"{name}: one value, or one for each of {path.networks} networks, is needed; got the shape "
                        f"{jnp.shape(value)}; declare a program with a layer of each network: si.models.each_network"
                    )
            path = path.by_network()
            layer = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (path.networks,)), layer)
        layer, self.inside = _inside(layer, adjusted=path.adjustment is not None)
        law = _law_of(layer, path)
        super().__init__(law, path, validate_args=validate_args)

    def log_prob(self, value: ArrayLike, intermediates: list | None = None) -> Float[Array, " networks"]:
        """Log likelihood of each network given its first covariance, −∞ for parameters outside of their range.

        It is a log density on a path of `transitions`. On a path of `prepare` it is the adjusted log likelihood, see
        `Adjustment`; there it is a log density by the limit's law only, or with `Adjustment.of_densities`.
        """
        return jnp.where(self.inside, super().log_prob(value, intermediates), -jnp.inf)

    def sample(self, key: PRNGKeyArray | None, sample_shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Sample networks from their initial covariances by the chain, the exact law of finite networks."""
        path = self.path
        if path.initial is None:
            raise InputError("path: networks are sampled from the data of si.prepare, not from pooled statistics")
        if not self.layer.has_chain:
            raise InputError(f"layer: {type(self.layer).__name__} needs forward_covariance to sample finite networks")
        assert key is not None
        if not jnp.issubdtype(jnp.result_type(key), jax.dtypes.prng_key):
            key = jr.wrap_key_data(key)
        layer = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (path.networks,)), self.layer)
        draw = functools.partial(_chains, layer, path)
        if not sample_shape:
            return draw(key)
        drawn = jax.lax.map(draw, jr.split(key, math.prod(sample_shape)))
        return drawn.reshape(*sample_shape, *drawn.shape[1:])


def densities_at(
    path: AbstractPath, kind: AbstractLayer, u: Float[np.ndarray, "points coordinates"]
) -> Float[np.ndarray, "points networks"]:
    """`CovariancePath.log_prob` of the path's networks at points of the layer's coordinates, by NumPy."""
    adjustment, coordinates = path.adjustment, kind.coordinates
    inside = (abs(u) <= (FARTHEST_COORDINATE if adjustment is not None else np.inf)).all(axis=-1)
    u = np.where(inside[:, None], np.asarray(u, float), 0.0)
    if adjustment is not None:
        u = coordinates.unconstrained(adjustment.adjusted(coordinates, u.T)).T
    path = jax.tree.map(np.asarray, path)
    densities = path.log_density(laws_on_host(kind, u, np.asarray(path.widths), path.assumptions.law), path.value)
    return np.where(inside[:, None], densities, -np.inf)


def _inside(layer: AbstractLayer, *, adjusted: bool) -> tuple[AbstractLayer, Bool[Array, "*networks"]]:
    """A layer with other parameters where they are out of range, and whether they are in it.

    An adjustment needs them on the real line, where samplers leap to ±∞: up to `FARTHEST_COORDINATE`.
    """
    coordinates, values = layer.coordinates, layer.parameters()
    if not values:  # a layer of a user may declare none
        return layer, jnp.ones((), bool)
    if adjusted:
        inside = (jnp.abs(coordinates.unconstrained(values)) <= FARTHEST_COORDINATE).all(axis=0)
    else:
        inside = ~jnp.stack([coordinates.declared[name].is_faulty(x) for name, x in values.items()]).any(axis=0)
    defaults = coordinates.constrained(jnp.zeros(len(coordinates)))
    return layer.with_parameters({name: jnp.where(inside, x, defaults[name]) for name, x in values.items()}), inside


def _chains(layer: AbstractLayer, path: AbstractPath, key: PRNGKeyArray) -> Float[Array, "networks layers m m"]:
    def network(layer, V0, width, number):
        keys = NetworkKeys.numbered(key, number[None])
        return covariance_chain(layer, V0[None], width=width.astype(int), layers=path.depth, keys=keys)[0]

    numbers = jnp.arange(path.networks, dtype=jnp.uint32)
    return jax.vmap(network)(layer, path.initial, path.widths[path.width], numbers)


def _law_of(layer: AbstractLayer, path: AbstractPath) -> Limit | FiniteWidth:
    """The law of a layer, with a leading axis if the layer, the widths or the adjustments have one."""
    own_layers = any(jnp.ndim(leaf) for leaf in jax.tree.leaves(layer))
    if path.assumptions.law == "limit":
        return jax.vmap(lambda layer: layer.limit())(layer) if own_layers else layer.limit()
    adjustment = path.adjustment
    if adjustment is not None and adjustment.centre.ndim > 1:
        layer = jax.vmap(lambda adjustment, layer: adjustment(layer), (0, 0 if own_layers else None))(adjustment, layer)
        own_layers = True
    elif adjustment is not None:
        layer = jax.vmap(adjustment)(layer) if own_layers else adjustment(layer)
    return jax.vmap(lambda layer, width: layer.finite_width(width), (0 if own_layers else None, 0))(layer, path.widths)
