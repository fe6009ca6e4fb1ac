"""The interface of the data that a NumPyro program observes: plain transitions, or their sufficient statistics."""

import abc
import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from sdeinfer.covariance import Pattern
from sdeinfer.layers import FiniteWidth, Limit
from sdeinfer.likelihood._adjustment import Adjustment
from sdeinfer.likelihood._assumptions import Assumptions


class AbstractPath(eqx.Module):
    """Observed networks, as a `CovariancePath` takes them: `CovariancePath(layer, path)`, `obs=path.observed`.

    `Transitions` are the covariances themselves, `PathStatistics` a compression of them.

    Attributes:
        widths: the distinct widths n, ascending, padded by `repeated_widths`; shape (widths,).
        width: index of each network into `widths`, shape (networks,).
        adjustment: adjustment of the likelihood, possibly with a leading axis of widths; None for no adjustment.
        pattern: the attention pattern of the coordinates.
        assumptions: assumptions of the fit.
        hidden: whether `observed` is None, so that a program samples the data.
        arrays: names of the fields with a leading axis of networks.
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
        """Log density of each network's value by the coefficients of one layer.

        Arguments:
            law: the limit, for data without an adjustment, possibly with a leading axis of `widths`; or the law of one
                layer, with that axis.
            value: an array like `value`.
        """

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
