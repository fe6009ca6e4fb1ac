"""The data that a NumPyro program observes: plain transitions or their statistics, with an adjustment."""

import abc
import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sdeinfer.covariance import Pattern
from sdeinfer.layers import AbstractLayer, FiniteWidth, Limit
from sdeinfer.likelihood._assumptions import Assumptions


class Adjustment(eqx.Module):
    """ℓ(u) → ℓ(û + C (u − û − s))/φ, with the layer's coordinates u (`Coordinates.unconstrained`).

    `centre` is û, `matrix` C, `shift` s, the mode under the exact law of a layer less û, and `dispersion` φ. For τ0
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
        u = coordinates.unconstrained(layer.parameters())
        moved = self.centre + self.matrix @ (u - self.centre - self.shift)
        values = coordinates.constrained(moved)
        for name in coordinates.temperatures:
            values[name] = _at_least(values[name], self.least_tau0)
        return layer.with_parameters(values)

    def of_densities(self) -> "Adjustment":
        """The adjustment with the mode and the range of the data's density, and with its own curvature."""
        identity = jnp.broadcast_to(jnp.eye(self.centre.shape[-1], dtype=self.matrix.dtype), self.matrix.shape)
        return dataclasses.replace(self, dispersion=jnp.ones_like(self.dispersion), matrix=identity)

    def of_priors(self) -> "Adjustment":
        """An adjustment that leaves nothing of the likelihood, so that a joint density is that of the priors."""
        largest = jnp.finfo(self.dispersion.dtype).max
        return dataclasses.replace(self, dispersion=jnp.full_like(self.dispersion, largest))


def no_adjustment(parameters: int, networks: int | None = None) -> Adjustment:
    """The identity adjustment; with it one compiled program serves adjusted and unadjusted likelihoods."""
    dtype, axes = jnp.result_type(float), () if networks is None else (networks,)
    values = (1.0, 0.0, np.zeros(parameters), np.eye(parameters), np.zeros(parameters), 0.0)
    each = (np.broadcast_to(np.asarray(x, dtype), (*axes, *np.shape(x))) for x in values)
    return Adjustment(*jax.device_put(list(each)))


def _at_least(x: Float[Array, ""], least: Float[Array, ""]) -> Float[Array, ""]:
    """Smooth maximum of x and a bound; at 1.5 times the bound it exceeds x by 0.6 %."""
    larger = jnp.maximum(x, least)
    return larger * (1 + (jnp.minimum(x, least) / larger) ** 8) ** (1 / 8)


class AbstractPath(eqx.Module):
    """Observed networks, as a `CovariancePath` takes them: `CovariancePath(layer, path)`, `obs=path.observed`.

    `Transitions` are the covariances themselves, `PathStatistics` a compression of them.
    """

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
        own = {name: getattr(self, name) for name in self.arrays}
        own = {name: None if x is None else jnp.asarray(x)[indices] for name, x in own.items()}
        return dataclasses.replace(self, **own)

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
        own = {"widths": self.widths[self.width], "width": jnp.arange(self.networks), "adjustment": adjustment}
        return dataclasses.replace(self, **own)
