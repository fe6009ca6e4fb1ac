"""Statistics of a network: functions of one path, differentiable in its covariances.

Each maps an `Ensemble` of paths to one number per path. A function of an `Ensemble` can be used in the same way.
Tests: `tests/criteria/test_criteria.py`.
"""

import abc
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from sdeinfer._files import InputError
from sdeinfer.covariance._eigen import eigh

type Directions = int | Literal["all"] | None
"""The start of a tangent: a random direction at one token, or at all; None for no tangent."""


class Ensemble(eqx.Module):
    """Paths of many networks.

    Attributes:
        initial: V at time 0, shape (m, m).
        covariance: V at the last time only, or at the end of every step; shape (paths, times, m, m). A path that
            explodes keeps its V before that, a network of a chain or with weights that of time 0.
        tangent: D at the same times of a tangent with tr D = 1 at time 0 (see `tangents`), or None.
        exploded: whether each path exploded, shape (paths,).
    """

    initial: Float[Any, "m m"]
    covariance: Float[Any, "paths times m m"]
    tangent: Float[Any, "paths times m m"] | None
    exploded: Bool[Any, " paths"]

    @property
    def last(self) -> Float[Any, "paths m m"]:
        """V at the last time."""
        return self.covariance[:, -1]

    @property
    def end(self) -> "Ensemble":
        """The paths at the last time only."""
        tangent = None if self.tangent is None else self.tangent[:, -1:]
        return Ensemble(self.initial, self.covariance[:, -1:], tangent, self.exploded)


class AbstractStatistic(abc.ABC):
    """A function of an `Ensemble` with one number per path; hashable, since programs are compiled for it.

    Attributes:
        label: what it is called, with its fields in braces; the name of its type if empty.
        fewest: smallest number of tokens for which it is defined.
        every_step: whether it needs V at the end of every step.
        directions: where the tangent starts that it needs.
    """

    label: ClassVar[str] = ""
    fewest: ClassVar[int] = 1
    every_step: ClassVar[bool] = False

    @property
    def directions(self) -> Directions:
        """No tangent, unless a statistic overrides this."""
        return None

    @abc.abstractmethod
    def __call__(self, paths: Ensemble) -> Float[Array, " paths"]:
        """The statistic of each path."""

    def check(self, tokens: int) -> None:
        """Raise an InputError if the statistic is not defined for so many tokens."""
        if tokens < self.fewest:
            raise InputError(f"{self}: at least {self.fewest} tokens are needed, got {tokens}")

    def __str__(self) -> str:
        return self.label.format(**vars(self)) if self.label else type(self).__name__


@dataclasses.dataclass(frozen=True)
class MeanCorrelation(AbstractStatistic):
    """The mean over pairs of tokens of the correlation V_αβ/√(V_αα V_ββ)."""

    label: ClassVar[str] = "mean correlation"
    fewest: ClassVar[int] = 2

    def __call__(self, paths: Ensemble) -> Float[Array, " paths"]:
        return _correlations(paths.last).mean(axis=-1)


@dataclasses.dataclass(frozen=True)
class LargestCorrelation(AbstractStatistic):
    """The largest correlation of two tokens."""

    label: ClassVar[str] = "largest correlation"
    fewest: ClassVar[int] = 2

    def __call__(self, paths: Ensemble) -> Float[Array, " paths"]:
        return _correlations(paths.last).max(axis=-1)


@dataclasses.dataclass(frozen=True)
class EffectiveRank(AbstractStatistic):
    """The effective rank (tr V)²/tr V², between 1 and m."""

    label: ClassVar[str] = "effective rank"

    def __call__(self, paths: Ensemble) -> Float[Array, " paths"]:
        V = paths.last
        return jnp.trace(V, axis1=-2, axis2=-1) ** 2 / (V * V).sum(axis=(-2, -1))


@dataclasses.dataclass(frozen=True)
class LogNorm(AbstractStatistic):
    """The change log(V_αα,T/V_αα,0) of the squared norm of a token α."""

    label: ClassVar[str] = "log norm of token {token}"
    token: int = 0

    def __call__(self, paths: Ensemble) -> Float[Array, " paths"]:
        return jnp.log(paths.last[:, self.token, self.token] / paths.initial[self.token, self.token])

    def check(self, tokens: int) -> None:
        _check_token(self, self.token, tokens)


@dataclasses.dataclass(frozen=True)
class NormFactor(AbstractStatistic):
    """The factor by which the squared norm of a token grows or shrinks: the largest of all tokens, at least 1."""

    label: ClassVar[str] = "norm factor"

    def __call__(self, paths: Ensemble) -> Float[Array, " paths"]:
        change = jnp.log(_diagonal(paths.last) / _diagonal(paths.initial))
        return jnp.exp(jnp.abs(change).max(axis=-1))


@dataclasses.dataclass(frozen=True)
class RangeMargin(AbstractStatistic):
    """The distance of the eigenvalues of V from the ends of a range, in logs, the smallest over all steps.

    It is positive for a path that `simulate_stopped` does not stop.
    """

    label: ClassVar[str] = "margin in [{lowest:g}, {highest:g}]"
    lowest: float
    highest: float
    every_step: ClassVar[bool] = True

    def __post_init__(self):
        if not 0 <= self.lowest < self.highest < math.inf:
            raise InputError(f"range: 0 ≤ lowest < highest < ∞ is needed, got {self.lowest:g} and {self.highest:g}")

    def __call__(self, paths: Ensemble) -> Float[Array, " paths"]:
        eigenvalues, _ = eigh(jnp.moveaxis(paths.covariance, (-2, -1), (0, 1)))
        below = jnp.log(self.highest / eigenvalues[-1]).min(axis=-1)
        if self.lowest == 0:
            return below
        tiny = jnp.finfo(eigenvalues.dtype).tiny
        return jnp.minimum(below, jnp.log(jnp.maximum(eigenvalues[0], tiny) / self.lowest).min(axis=-1))


@dataclasses.dataclass(frozen=True)
class AbstractTangentStatistic(AbstractStatistic):
    """A statistic of a tangent, which starts in a random direction at a token, or at all."""

    token: int | Literal["all"] = "all"

    @property
    def directions(self) -> Directions:
        return self.token

    def check(self, tokens: int) -> None:
        if not isinstance(self.token, int) and self.token != "all":
            raise InputError(f"token: a number or 'all' is needed, got {self.token!r}")
        if self.token != "all":
            _check_token(self, self.token, tokens)

    def __str__(self) -> str:
        return self.label if self.token == "all" else f"{self.label} of token {self.token}"


@dataclasses.dataclass(frozen=True)
class LogGradientNorm(AbstractTangentStatistic):
    """log(tr D_T/tr D_0) of a tangent that starts in a random direction at a token, or at all tokens.

    It has the law of the log squared norm of the gradient that reaches the token from one white gradient of the outputs
    (`gradient_norms`), up to a constant: 0 means that gradients keep their size.
    """

    label: ClassVar[str] = "log gradient norm"

    def __call__(self, paths: Ensemble) -> Float[Array, " paths"]:
        assert paths.tangent is not None
        return jnp.log(jnp.trace(paths.tangent[:, -1], axis1=-2, axis2=-1))


@dataclasses.dataclass(frozen=True)
class GradientFactor(AbstractTangentStatistic):
    """The factor by which the squared norm of a gradient grows or shrinks, at least 1: exp|`LogGradientNorm`|."""

    label: ClassVar[str] = "gradient factor"

    def __call__(self, paths: Ensemble) -> Float[Array, " paths"]:
        return jnp.exp(jnp.abs(LogGradientNorm(self.token)(paths)))


@dataclasses.dataclass(frozen=True)
class FunctionStatistic(AbstractStatistic):
    """A function of an `Ensemble` with covariances at the last time."""

    function: Callable[[Ensemble], Float[Array, " paths"]]

    def __call__(self, paths: Ensemble) -> Float[Array, " paths"]:
        values = jnp.asarray(self.function(paths))
        if not jnp.issubdtype(values.dtype, jnp.floating):
            raise InputError(f"{self}: real numbers are needed, got {values.dtype}; events are for `probability`")
        if values.shape != (len(paths.covariance),):
            raise InputError(
                f"{self}: one number per path is needed, shape ({len(paths.covariance)},); got {values.shape}"
            )
        return values

    def __str__(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__)


type Statistic = AbstractStatistic | Callable[[Ensemble], Float[Array, " paths"]]


def statistic_of(statistic: Statistic) -> AbstractStatistic:
    """The statistic, or that of a function."""
    if isinstance(statistic, AbstractStatistic):
        return statistic
    if isinstance(statistic, type):
        raise InputError(f"statistic: an instance is needed, as {statistic.__name__}(…), got the class")
    if not callable(statistic):
        raise InputError(f"statistic: a function of an Ensemble is needed, got {statistic!r}")
    return FunctionStatistic(statistic)


def evaluate(statistics: Sequence[AbstractStatistic], paths: Ensemble) -> Float[Array, "statistics paths"]:
    """The values of statistics, of covariances at every step for those that need them."""
    values = []
    for statistic in statistics:
        try:
            values.append(statistic(paths if statistic.every_step else paths.end))
        except jax.errors.JAXTypeError as error:
            raise InputError(
                f"{statistic}: operations of JAX are needed, as jax.numpy in place of NumPy, and no branches on values"
            ) from error
    return jnp.stack(values)


def _check_token(statistic: AbstractStatistic, token: int, tokens: int) -> None:
    if not 0 <= token < tokens:
        raise InputError(f"{statistic}: a token from 0 to {tokens - 1} is needed")


def _diagonal(V: Float[Any, "... m m"]) -> Float[Array, "... m"]:
    return jnp.diagonal(V, axis1=-2, axis2=-1)


def _correlations(V: Float[Any, "paths m m"]) -> Float[Array, "paths pairs"]:
    rows, columns = np.triu_indices(V.shape[-1], 1)
    norms = jnp.sqrt(_diagonal(V))
    return V[:, rows, columns] / (norms[:, rows] * norms[:, columns])
