"""The plain likelihood of observed networks: every transition by itself, exact, differentiable in the covariances."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Bool, Float, Int

from sdeinfer.covariance import Pattern
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.layers import FiniteWidth, Limit
from sdeinfer.likelihood._assumptions import NOTHING_ASSUMED, Assumptions
from sdeinfer.likelihood._path import AbstractPath, Adjustment
from sdeinfer.likelihood._terms import at_least_a_quarter, moments_of, of_limits, terms_of
from sdeinfer.likelihood._transitions import observed_path, used_of
from sdeinfer.terms import AbstractTerm

ENTRIES = 2**20
"""Bound on the number of entries of the largest arrays (m⁴ per transition) computed at a time."""


class Transitions(AbstractPath):
    """Observed networks with the plain likelihood of their transitions.

    `CovariancePath(layer, path).log_prob(V)` is the log density of V after every layer but the first, given V at the
    first, by the law of one layer with all of its variance features. It is differentiable in the layer's parameters and
    in V, except where the spectrum of the centred V has repeated eigenvalues, as for equal correlations: the derivative
    in such a V is NaN. Its cost grows with the number of transitions: a gradient takes 30 to 70 µs per transition of
    four tokens on two cores. `PathStatistics` takes the same time for any number.
    """

    arrays = ("covariance", "used", "width")

    covariance: Float[Array, "networks layers m m"]
    used: Bool[Array, "networks transitions"]
    widths: Float[Array, " widths"]
    width: Int[Array, " networks"]
    adjustment: Adjustment | None = None
    pattern: Pattern = eqx.field(default=EVERY_TOKEN, static=True)
    assumptions: Assumptions = eqx.field(default=NOTHING_ASSUMED, static=True)
    hidden: bool = eqx.field(default=False, static=True)

    @property
    def value(self) -> Float[Array, "networks layers m m"]:
        """The covariances, the first of which are given."""
        return self.covariance

    @property
    def initial(self) -> Float[Array, "networks m m"]:
        """V of each network at its first layer."""
        return self.covariance[:, 0]

    @property
    def depth(self) -> int:
        """Number of layers after the first."""
        return self.covariance.shape[1] - 1

    def log_density(self, law: Limit | FiniteWidth, value: Any) -> Float[Array, " networks"]:
        """Log density of each network's V after the first layer, given V at the first.

        The adjustment's dispersion divides the terms that depend on the parameters.
        """
        networks, layers, tokens, _ = jnp.shape(value)
        own = of_limits(law, len(self.widths)) if isinstance(law, Limit) else law
        own, width = jax.tree.map(lambda x: x[self.width], (own, self.widths))
        batch = max(1, min(networks, ENTRIES // (layers * tokens**4)))

        @jax.checkpoint
        def of_network(network: tuple[Any, ...]) -> tuple[Array, Array]:
            return _log_density(*network, pattern=self.pattern, others=self.assumptions.other_terms)

        density, constant = jax.lax.map(of_network, (own, width, jnp.asarray(value), self.used), batch_size=batch)
        dispersion = jnp.ones(()) if self.adjustment is None else self.adjustment.dispersion
        return constant + density / jnp.broadcast_to(dispersion, self.widths.shape)[self.width]


def transitions_of(data: xr.Dataset, assumptions: Assumptions = NOTHING_ASSUMED) -> Transitions:
    """The used transitions of a Dataset in which every layer was observed."""
    path = observed_path(data, assumptions.other_terms)
    widths, width = np.unique(path.width, return_inverse=True)
    return Transitions(
        covariance=jnp.asarray(path.covariance, float),
        used=jnp.asarray(used_of(data)),
        widths=jnp.asarray(widths, float),
        width=jnp.asarray(width),
        pattern=path.pattern,
        assumptions=assumptions,
    )


def _log_density(
    law: FiniteWidth,
    width: Float[Array, ""],
    V: Float[Array, "layers m m"],
    used: Bool[Array, " transitions"],
    *,
    pattern: Pattern,
    others: tuple[AbstractTerm, ...],
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Sums over the transitions of one network: of the terms that depend on the parameters, and of the others."""
    V = (V + V.mT) / 2
    # Unused transitions may start at a singular V; its NaN would enter every derivative.
    V0, V1 = (jnp.where(used[:, None, None], ends, jnp.eye(V.shape[-1])) for ends in (V[:-1], V[1:]))
    terms = terms_of(V0, V1, jnp.broadcast_to(1 / width, used.shape), pattern=pattern, others=others)
    moments = moments_of(law)
    common = moments.common_variance(terms.mixing)
    variance = common * at_least_a_quarter(moments.own_variance(terms.mixing, terms.variance) / common)
    square = (terms.increments - moments.mean(terms)) ** 2 / variance
    density = -jnp.sum(square + jnp.log(variance), axis=-1) / 2
    constant = terms.log_jacobian - terms.mixing.shape[-1] * math.log(2 * math.pi) / 2
    return jnp.sum(jnp.where(used, density, 0.0)), jnp.sum(jnp.where(used, constant, 0.0))
