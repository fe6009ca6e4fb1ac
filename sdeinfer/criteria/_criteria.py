"""Criteria on the distribution of a statistic over networks: expectation, spread, quantile and probability.

Expectations and spreads of a sample are smooth in its values. Quantiles and probabilities are not: their derivatives
are those of a smoothed distribution function,

    F_h(x) = mean of K((x − g_i)/h),   K(u) = Φ(u) + u φ(u)/2,   h = sd · N^{−1/5},

with a kernel of fourth order, so that the smoothing biases F by O(h⁴) = O(N^{−4/5}), less than its Monte Carlo error of
O(N^{−1/2}). Given pathwise derivatives of the g_i, the derivative of a probability is −E[∂g | g = x] f(x) and that of a
quantile E[∂g | g = q], each from the paths within about h.
"""

import abc
import dataclasses
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optimistix as optx
from jaxtyping import Array, Bool, Float
from scipy import stats

from sdeinfer._files import InputError
from sdeinfer.criteria._statistics import Statistic, statistic_of


@dataclasses.dataclass(frozen=True)
class AbstractCriterion(abc.ABC):
    """A number that depends on the distribution of a statistic over networks.

    `criterion <= bound` and `criterion >= bound` are constraints of `tune`; `<` and `>` say the same.

    Attributes:
        statistic: the statistic, or a function of an `Ensemble` with one number per path.
    """

    statistic: Statistic

    def __post_init__(self):
        object.__setattr__(self, "statistic", statistic_of(self.statistic))

    @abc.abstractmethod
    def smooth(self, values: Float[Array, " paths"], exploded: Bool[Array, " paths"]) -> Float[Array, ""]:
        """The criterion of a sample, as a differentiable function of its values."""

    @abc.abstractmethod
    def estimate(self, values: Float[np.ndarray, " paths"], exploded: Bool[np.ndarray, " paths"]) -> "Estimate":
        """The criterion of a sample, without smoothing, and its Monte Carlo error."""

    def __le__(self, bound: float) -> "Constraint":
        return Constraint(self, "<=", float(bound))

    def __ge__(self, bound: float) -> "Constraint":
        return Constraint(self, ">=", float(bound))

    __lt__, __gt__ = __le__, __ge__


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value and its Monte Carlo error."""

    value: float
    error: float


@dataclasses.dataclass(frozen=True)
class Constraint:
    """A bound on a criterion."""

    criterion: AbstractCriterion
    sense: Literal["<=", ">="]
    bound: float

    def __post_init__(self):
        if not math.isfinite(self.bound):
            raise InputError(f"{self.criterion}: a finite bound is needed, got {self.bound:g}")
        if isinstance(self.criterion, Probability) and not 0 < self.bound < 1:
            raise InputError(f"{self.criterion}: a bound between 0 and 1 is needed, got {self.bound:g}")

    @property
    def sign(self) -> int:
        """1 for a lower bound, −1 for an upper bound."""
        return 1 if self.sense == ">=" else -1

    def __str__(self) -> str:
        return f"{self.criterion} {'≥' if self.sign > 0 else '≤'} {self.bound:g}"

    def __bool__(self) -> bool:
        raise InputError(f"{self}: a constraint is not a truth value; chained comparisons are two constraints")


@dataclasses.dataclass(frozen=True)
class Expectation(AbstractCriterion):
    """The mean over networks. A path that explodes counts with its statistic before that."""

    def smooth(self, values: Array, exploded: Array) -> Array:
        return values.mean()

    def estimate(self, values: np.ndarray, exploded: np.ndarray) -> Estimate:
        return Estimate(float(values.mean()), float(values.std() / math.sqrt(len(values))))

    def __str__(self) -> str:
        return f"E[{self.statistic}]"


@dataclasses.dataclass(frozen=True)
class Spread(AbstractCriterion):
    """The standard deviation over networks. A path that explodes counts with its statistic before that."""

    def smooth(self, values: Array, exploded: Array) -> Array:
        return values.std()

    def estimate(self, values: np.ndarray, exploded: np.ndarray) -> Estimate:
        sd = values.std()
        influence = ((values - values.mean()) ** 2 - sd**2) / (2 * sd) if sd > 0 else np.zeros_like(values)
        return Estimate(float(sd), float(influence.std() / math.sqrt(len(values))))

    def __str__(self) -> str:
        return f"sd[{self.statistic}]"


@dataclasses.dataclass(frozen=True)
class Quantile(AbstractCriterion):
    """A quantile over networks, of a level in (0, 1). A path that explodes counts with its statistic before that."""

    level: float

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.level < 1:
            raise InputError(f"{self}: a level between 0 and 1 is needed, got {self.level:g}")

    def smooth(self, values: Array, exploded: Array) -> Array:
        h = bandwidth(values)
        known = jax.lax.stop_gradient(values)

        def excess(q: Array, args: tuple[Array, Array]) -> Array:
            sample, h = args
            return distribution((q - sample) / h).mean() - self.level

        span = {"lower": known.min() - 4 * h, "upper": known.max() + 4 * h}
        precision = 100 * float(jnp.finfo(values.dtype).eps)
        solver = optx.Bisection(rtol=precision, atol=precision)
        return optx.root_find(excess, solver, known.mean(), (values, h), options=span, throw=False).value

    def estimate(self, values: np.ndarray, exploded: np.ndarray) -> Estimate:
        q, h = np.quantile(values, self.level), np.asarray(bandwidth(values))
        density = stats.norm.pdf((q - values) / h).mean() / h
        return Estimate(float(q), math.sqrt(self.level * (1 - self.level) / len(values)) / float(density))

    def __str__(self) -> str:
        return f"{100 * self.level:g}% quantile of {self.statistic}"


@dataclasses.dataclass(frozen=True)
class Probability(AbstractCriterion):
    """The probability over networks that a statistic is below or above a value. A path that explodes does not count."""

    below: float | None = None
    above: float | None = None

    def __post_init__(self):
        super().__post_init__()
        if (self.below is None) == (self.above is None):
            raise InputError(f"probability of {self.statistic}: give either below or above")
        if not math.isfinite(self.value):
            raise InputError(f"{self}: a finite value is needed")

    @property
    def value(self) -> float:
        """The value with which the statistic is compared."""
        return float(self.above if self.below is None else self.below)  # pyright: ignore[reportArgumentType]

    @property
    def sign(self) -> int:
        """1 for a statistic that must be above the value, −1 below it."""
        return -1 if self.above is None else 1

    def smooth(self, values: Array, exploded: Array) -> Array:
        inside = distribution(self.sign * (values - self.value) / bandwidth(values))
        return jnp.where(exploded, 0.0, inside).mean()

    def estimate(self, values: np.ndarray, exploded: np.ndarray) -> Estimate:
        inside = ((self.sign * (values - self.value)) > 0) & ~exploded
        count, p = len(values), float(inside.mean())
        near = min(max(p, 1 / count), 1 - 1 / count)
        return Estimate(p, math.sqrt(near * (1 - near) / count))

    def __str__(self) -> str:
        return f"P({self.statistic} {'<' if self.above is None else '>'} {self.value:g})"


def expectation(statistic: Statistic) -> Expectation:
    """The mean of a statistic over networks."""
    return Expectation(statistic)


def spread(statistic: Statistic) -> Spread:
    """The standard deviation of a statistic over networks."""
    return Spread(statistic)


def quantile(statistic: Statistic, level: float) -> Quantile:
    """The quantile of a statistic over networks, at a level in (0, 1)."""
    return Quantile(statistic, level)


def probability(statistic: Statistic, *, below: float | None = None, above: float | None = None) -> Probability:
    """The probability over networks that a statistic is below, or above, a value; exploding paths do not count."""
    return Probability(statistic, below=below, above=above)


def bandwidth(values: Float[Any, " paths"]) -> Float[Array, ""]:
    """The smaller of the sd and the scaled interquartile range, times N^{−1/5}; constant under differentiation."""
    known = jax.lax.stop_gradient(jnp.asarray(values))
    low, high = jnp.quantile(known, jnp.array([0.25, 0.75], known.dtype))
    scale, sd = (high - low) / 1.349, known.std()
    scale = jnp.where(scale > 0, jnp.minimum(scale, sd), sd)
    size = jnp.abs(known).max()
    least = jnp.finfo(known.dtype).eps * jnp.where(size > 0, size, 1.0)
    return jnp.maximum(scale * known.size ** (-1 / 5), least)


def distribution(u: Float[Array, "..."]) -> Float[Array, "..."]:
    """K(u) = Φ(u) + u φ(u)/2, the distribution function of a kernel of fourth order."""
    return jax.scipy.stats.norm.cdf(u) + u * jax.scipy.stats.norm.pdf(u) / 2
