"""The data that a NumPyro program observes, with an adjustment; and those of the plain likelihood of transitions.

Tests: `tests/likelihood/test_adjustment.py`.
"""

import abc
import dataclasses
import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jaxtyping import Array, Bool, Float, Int

from sdeinfer.covariance import Pattern
from sdeinfer.covariance._matrix import engine
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.layers import AbstractLayer, FiniteWidth, Limit
from sdeinfer.likelihood._assumptions import NOTHING_ASSUMED, Assumptions
from sdeinfer.likelihood._terms import moments_of, of_limits, terms_of
from sdeinfer.likelihood._transitions import observed_path
from sdeinfer.parameters import Coordinates
from sdeinfer.terms import AbstractTerm


class Adjustment(eqx.Module):
    """ℓ(u) → ℓ(û + C (u − û − s))/φ, with the layer's coordinates u (`Coordinates.unconstrained`).

    `centre` is û, `matrix` C, `shift` s, the mode under the uncompressed law less û, and `dispersion` φ. For τ0
    below `least_tau0` the law of attention does not hold for the data; ℓ is constant there, and the prior determines
    the posterior. `error` is the relative Monte Carlo error of the adjusted standard deviations, the largest of all.
    """

    dispersion: Float[Any, "*groups"]
    least_tau0: Float[Any, "*groups"]
    centre: Float[Any, "*groups parameters"]
    matrix: Float[Any, "*groups parameters parameters"]
    shift: Float[Any, "*groups parameters"]
    error: Float[Any, "*groups"]

    def __call__(self, layer: AbstractLayer) -> AbstractLayer:
        """The layer with adjusted parameters."""
        coordinates = layer.coordinates
        return layer.with_parameters(self.adjusted(coordinates, coordinates.unconstrained(layer.parameters())))

    def adjusted(self, coordinates: Coordinates, u: Float[Any, "parameters ..."]) -> dict[str, Any]:
        """The adjusted parameters of a layer at coordinates u; NumPy handles NumPy arrays."""
        xp = engine(u)
        centre, matrix, shift = map(xp.asarray, (self.centre, self.matrix, self.shift))
        values = coordinates.constrained((centre + (u.T - centre - shift) @ matrix.T).T)
        for name in coordinates.temperatures:
            values[name] = _at_least(values[name], xp.asarray(self.least_tau0))
        return values

    def of_densities(self) -> "Adjustment":
        """The adjustment with the mode and the range of the data's density, and with its own curvature."""
        identity = np.broadcast_to(np.eye(self.centre.shape[-1], dtype=self.matrix.dtype), self.matrix.shape)
        return dataclasses.replace(self, dispersion=np.ones_like(self.dispersion), matrix=identity)

    def of_priors(self) -> "Adjustment":
        """Divide the log likelihood by the largest number, so that only the priors remain, in the compiled program."""
        largest = jnp.finfo(self.dispersion.dtype).max
        return dataclasses.replace(self, dispersion=np.full_like(self.dispersion, largest))


def no_adjustment(parameters: int, networks: int | None = None) -> Adjustment:
    """The identity adjustment; with it one compiled program serves adjusted and unadjusted likelihoods."""
    dtype, axes = jnp.result_type(float), () if networks is None else (networks,)
    values = (1.0, 0.0, np.zeros(parameters), np.eye(parameters), np.zeros(parameters), 0.0)
    arrays = (np.broadcast_to(np.asarray(x, dtype), (*axes, *np.shape(x))) for x in values)
    return Adjustment(*jax.device_put(list(arrays)))


def in_default_types[T](tree: T) -> T:
    """A pytree with its floats and integers in JAX's default types."""

    def cast(x: Any) -> Any:
        for kind, default in ((np.floating, float), (np.signedinteger, int)):
            if isinstance(x, jax.Array | np.ndarray) and jnp.issubdtype(x.dtype, kind):
                return jax.device_put(np.asarray(x, jnp.result_type(default)))
        return x

    return jax.tree.map(cast, tree)


def _at_least(x: Float[Any, "..."], least: Float[Any, ""]) -> Float[Any, "..."]:
    """Smooth maximum of x and a bound; at 1.5 times the bound it exceeds x by 0.6 %."""
    xp = engine(x)
    larger = xp.maximum(x, least)
    return larger * (1 + (xp.minimum(x, least) / larger) ** 8) ** (1 / 8)


class AbstractPath(eqx.Module):
    """Observed networks, as a `CovariancePath` takes them: `CovariancePath(layer, path)`, `obs=path.observed`."""

    arrays: ClassVar[tuple[str, ...]]

    widths: eqx.AbstractVar[Float[Array, " widths"]]
    width: eqx.AbstractVar[Int[Array, " networks"]]
    adjustment: eqx.AbstractVar[Adjustment | None]
    pattern: eqx.AbstractVar[Pattern]
    assumptions: eqx.AbstractVar[Assumptions]
    hidden: eqx.AbstractVar[bool]

    @property
    @abc.abstractmethod
    def value(self) -> Float[Array, "networks ..."]:
        """The observed value, with a leading axis of networks."""

    @property
    @abc.abstractmethod
    def initial(self) -> Float[Array, "networks m m"] | None:
        """V of each network at its first layer; None if networks cannot be sampled."""

    @property
    @abc.abstractmethod
    def depth(self) -> int:
        """Number of layers after the first."""

    @abc.abstractmethod
    def log_density(self, law: Limit | FiniteWidth, value: Any) -> Float[Array, " networks"]:
        """Log density of each network's value by the coefficients of one layer."""

    @property
    def networks(self) -> int:
        """Number of networks."""
        return self.value.shape[0]

    @property
    def observed(self) -> Float[Array, "networks ..."] | None:
        """The value that a program observes: pass it as `obs`."""
        return None if self.hidden else self.value

    def __getitem__(self, indices: Int[Array | np.ndarray, " some"]) -> "AbstractPath":
        """Some of the networks, as those of a plate with `subsample_size`; the indices may be traced."""
        fields = {name: getattr(self, name) for name in self.arrays}
        fields = {name: None if x is None else jnp.asarray(x)[indices] for name, x in fields.items()}
        return dataclasses.replace(self, **fields)

    def with_adjustment(self, adjustment: Adjustment) -> "AbstractPath":
        """The same data with another adjustment."""
        return dataclasses.replace(self, adjustment=adjustment)

    def unobserved(self) -> "AbstractPath":
        """The same networks with `observed` None: a program run on them samples covariances."""
        return dataclasses.replace(self, hidden=True)

    def by_network(self) -> "AbstractPath":
        """The same data with one width and adjustment per network."""
        adjustment = self.adjustment
        if adjustment is not None and adjustment.centre.ndim > 1:
            adjustment = jax.tree.map(lambda x: x[self.width], adjustment)
        fields = {"widths": self.widths[self.width], "width": jnp.arange(self.networks), "adjustment": adjustment}
        return dataclasses.replace(self, **fields)


class Transitions(AbstractPath):
    """Observed networks with the plain likelihood of their transitions.

    The log density of V after every layer but the first is differentiable in the layer's parameters and in V, except
    where the spectrum of the centred V has repeated eigenvalues, as for equal correlations: the derivative in such a V
    is NaN. A gradient takes 30 to 70 µs per transition of four tokens on two cores.
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
        return self.covariance

    @property
    def initial(self) -> Float[Array, "networks m m"]:
        return self.covariance[:, 0]

    @property
    def depth(self) -> int:
        return self.covariance.shape[1] - 1

    def log_density(self, law: Limit | FiniteWidth, value: Any) -> Float[Array, " networks"]:
        """Log density of each network's V after the first layer, given V at the first."""
        networks, layers, tokens, _ = jnp.shape(value)
        laws = of_limits(law, len(self.widths)) if isinstance(law, Limit) else law
        laws, width = jax.tree.map(lambda x: x[self.width], (laws, self.widths))
        batch = max(1, min(networks, 2**20 // (layers * tokens**4)))  # the largest arrays have m⁴ entries a transition

        @jax.checkpoint
        def of_network(network: tuple[Any, ...]) -> tuple[Array, Array]:
            return _log_density(*network, pattern=self.pattern, others=self.assumptions.other_terms)

        density, constant = jax.lax.map(of_network, (laws, width, jnp.asarray(value), self.used), batch_size=batch)
        dispersion = jnp.ones(()) if self.adjustment is None else self.adjustment.dispersion
        return constant + density / jnp.broadcast_to(dispersion, self.widths.shape)[self.width]


def transitions_of(data: xr.Dataset, assumptions: Assumptions = NOTHING_ASSUMED) -> Transitions:
    """The used transitions of a Dataset in which every layer was observed."""
    path = observed_path(data, assumptions.other_terms)
    widths, width = np.unique(path.width, return_inverse=True)
    return Transitions(
        covariance=jnp.asarray(path.covariance, float),
        used=jnp.asarray(path.used),
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
    mean, variance = moments_of(law).mean_and_variance(terms)
    square = (terms.increments - mean) ** 2 / variance
    density = -jnp.sum(square + jnp.log(variance), axis=-1) / 2
    constant = terms.log_jacobian - terms.mixing.shape[-1] * math.log(2 * math.pi) / 2
    return jnp.sum(jnp.where(used, density, 0.0)), jnp.sum(jnp.where(used, constant, 0.0))
