"""The optimisation problem: objective, residuals of the constraints, and their gradients, on common random numbers."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from sdeinfer._files import InputError
from sdeinfer.criteria import AbstractCriterion, AbstractStatistic, Constraint, Estimate, Probability, Quantile
from sdeinfer.layers import AbstractLayer
from sdeinfer.solve import Grid, step_grid
from sdeinfer.terms import LimitSteps
from sdeinfer.tuning._chain_sample import sample_chain_statistics
from sdeinfer.tuning._chains import Networks
from sdeinfer.tuning._ensemble import Sample, sample_statistics
from sdeinfer.tuning._space import DEPTH, Space, coefficients

type Over = Literal["worst", "mean"]
"""How criteria are combined over several prompts: each must hold for every prompt, or for their mean."""

type Law = Literal["finite-width", "limit"]
"""Whose statistics are sampled: networks of width n, or paths of the SDE."""


class Value(NamedTuple):
    """A number and its gradient in the free coordinates."""

    value: float
    slope: Float[np.ndarray, " coordinates"]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Criteria of a layer as functions of its free coordinates.

    Attributes:
        space: the free coordinates.
        fixed: values of the other parameters: numbers, functions of depth-time, or one value per path.
        V0: initial covariances, shape (prompts, m, m).
        width: n.
        depth: d; the largest if it is free.
        objective: a criterion, or the name of a free coordinate.
        sign: 1 to maximise the objective, −1 to minimise it.
        constraints: the constraints.
        over: how prompts are combined.
        paths: number of paths.
        step: longest step in depth-time.
        key: PRNG key.
        law: whose statistics are sampled.
        chain_slopes: whether statistics of networks have derivatives.
        offsets: what is added to criteria, one number for each row.
    """

    space: Space
    fixed: dict[str, Any]
    V0: Float[np.ndarray, "prompts m m"]
    width: int
    depth: float
    objective: AbstractCriterion | str
    sign: int
    constraints: tuple[Constraint, ...]
    over: Over
    paths: int
    step: float
    key: PRNGKeyArray
    law: Law = "limit"
    chain_slopes: bool = False
    offsets: Mapping[AbstractCriterion, tuple[float, ...]] = dataclasses.field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Number of values of a criterion: one for each prompt, or one for their mean."""
        return 1 if self.over == "mean" else len(self.V0)

    @property
    def criteria(self) -> tuple[AbstractCriterion, ...]:
        """The criteria of the constraints and of the objective, each once."""
        wanted = [each.criterion for each in self.constraints]
        wanted += [] if isinstance(self.objective, str) else [self.objective]
        return tuple(dict.fromkeys(wanted))

    @property
    def statistics(self) -> tuple[AbstractStatistic, ...]:
        """The statistics of the criteria, each once."""
        return tuple(dict.fromkeys(each.statistic for each in self.criteria))  # pyright: ignore[reportReturnType]

    @property
    def compared(self) -> tuple[AbstractCriterion, ...]:
        """The criteria, and those that `residuals` compares with bounds in their place."""
        return tuple(dict.fromkeys([*(self._in_residuals(each)[0] for each in self.constraints), *self.criteria]))

    @property
    def finer_step(self) -> float:
        """The step of fresh paths: half of the steps taken, or the same where statistics depend on every step."""
        if any(each.every_step for each in self.statistics):
            return self.step
        return self.depth / self.width / (2 * (len(self.grid.steps) - 1))

    @property
    def grid(self) -> Grid:
        """Steps of unit time."""
        return step_grid([1.0], self.step * self.width / self.depth)

    def with_whole_depth(self, u: Float[np.ndarray, " coordinates"]) -> Float[np.ndarray, " coordinates"]:
        """The coordinates with the depth, where it is free, rounded to a neighbour.

        The one that violates the constraints less; of two that do not, the one with the better objective.
        """
        if DEPTH not in self.space.names:
            return u
        last = self.space.free[-1]
        depth = float(np.clip(self.space.values(u)[DEPTH], last.low, last.high))
        if abs(depth - round(depth)) < 1e-6:
            return np.append(u[:-1], math.log(round(depth)))
        whole = [np.append(u[:-1], math.log(number)) for number in (math.floor(depth), math.ceil(depth))]
        scores = [(self.violation(v), -min(x.value for x in self.objectives(v))) for v in whole]
        return whole[scores.index(min(scores))]

    def with_nearest_depth(self, u: Float[np.ndarray, " coordinates"]) -> Float[np.ndarray, " coordinates"]:
        """The coordinates with the depth, where it is free, rounded to the nearest whole number."""
        return np.append(u[:-1], math.log(self.layers(u))) if DEPTH in self.space.names else u

    @functools.cached_property
    def _remembered(self) -> dict[bytes, list[Sample]]:
        return {}

    @property
    def evaluations(self) -> int:
        """Number of points at which samples were drawn."""
        return len(self._remembered)

    def samples(self, u: Float[np.ndarray, " coordinates"]) -> list[Sample]:
        """The statistics of each prompt at free coordinates.

        Raises:
            InputError: for statistics or derivatives that are not finite.
        """
        where = np.asarray(u, float).tobytes()
        if where not in self._remembered:
            sample = self._of_limit(u) if self.law == "limit" else self._of_networks(u)
            found = [sample(V, jax.random.fold_in(self.key, number)) for number, V in enumerate(self.V0)]
            self._require_finite(u, found)
            self._remembered[where] = found
        return self._remembered[where]

    def _of_limit(self, u: Float[np.ndarray, " coordinates"]) -> Callable[[np.ndarray, PRNGKeyArray], Sample]:
        """Draws statistics of paths from a V0 by a key."""
        limit, slopes = self.limit(u)
        return lambda V0, key: sample_statistics(
            self.statistics, limit, slopes, V0, self.grid, paths=self.paths, key=key
        )

    def _of_networks(self, u: Float[np.ndarray, " coordinates"]) -> Callable[[np.ndarray, PRNGKeyArray], Sample]:
        """The same of networks of width n; statistics of gradients, which have no chain, are those of the limit."""
        depth = self.layers(u)
        layer = self.layer(u, depth)
        if self.chain_slopes:
            slopes = self.space.layer_slopes(u, self.fixed, depth / self.width)
            sizes: dict[str, Any] = {"width": self.width, "depth": depth, "networks": self.paths}
            return lambda V0, key: sample_chain_statistics(self.statistics, layer, V0, slopes=slopes, key=key, **sizes)

        def sample(V0: np.ndarray, key: PRNGKeyArray) -> Sample:
            networks = Networks(self.statistics, layer, V0, self.width, depth)
            values, exploded = networks.at_width(self.paths, self.step, key)
            each = np.stack([values[statistic] for statistic in self.statistics])
            return Sample(each, np.zeros((len(each), 0, self.paths)), exploded)

        return sample

    def layers(self, u: Float[np.ndarray, " coordinates"]) -> int:
        """Number of layers, the nearest whole one where it is free."""
        return round(float(self.space.time(u, self.depth, 1)))

    def layer(self, u: Float[np.ndarray, " coordinates"], depth: float) -> AbstractLayer:
        """The layer of so many layers at free coordinates; parameters from a posterior have their medians."""
        fixed = {name: np.median(x) if name in self.space.drawn else x for name, x in self.fixed.items()}
        return self.space.layer(u, fixed, depth / self.width)

    def limit(self, u: Float[np.ndarray, " coordinates"]) -> tuple[LimitSteps, Any]:
        """Coefficients over unit time and their derivatives."""
        ends = np.asarray(self.grid.steps) if self.space.over_depth else np.array([0.0, 1.0])
        middle = (ends[1:] + ends[:-1]) / 2
        args = (jnp.asarray(x, float) for x in (middle, self.depth, self.width))
        found = coefficients(self.space, jnp.asarray(u, float), self.fixed, *args)
        limit, slopes = jax.tree.map(np.asarray, found)
        return LimitSteps(limit, ends[:-1]), slopes

    def _require_finite(self, u: np.ndarray, samples: list[Sample]) -> None:
        at = ", ".join(f"{name} = {value:.4g}" for name, value in self.named(u).items())
        for sample in samples:
            for statistic, values, slopes in zip(self.statistics, sample.values, sample.slopes, strict=True):
                for what, bad in (("", ~np.isfinite(values)), ("the derivative of ", ~np.isfinite(slopes).all(axis=0))):
                    if bad.any():
                        count = f"{bad.sum()} of {len(bad)} paths"
                        raise InputError(f"{what}{statistic}: not finite on {count} at {at}")

    def named(self, u: Float[np.ndarray, " coordinates"]) -> dict[str, float]:
        """The free values, one per knot."""
        values = np.concatenate([np.atleast_1d(x) for x in self.space.values(np.asarray(u)).values()])
        return dict(zip(self.space.names, map(float, values), strict=True))

    def criterion(self, criterion: AbstractCriterion, u: Float[np.ndarray, " coordinates"]) -> list[Value]:
        """A criterion, smoothed: of each prompt, or their mean."""
        number = self.statistics.index(criterion.statistic)  # pyright: ignore[reportArgumentType]
        found = []
        for sample in self.samples(u):
            value, weights = _value_and_weights(criterion, sample.values[number], sample.exploded)
            found.append(Value(float(value), sample.slopes[number] @ np.asarray(weights)))
        if self.over == "mean":
            found = [Value(float(np.mean([x.value for x in found])), np.mean([x.slope for x in found], axis=0))]
        return [
            Value(value + offset, slope) for (value, slope), offset in zip(found, self.offset(criterion), strict=True)
        ]

    def offset(self, criterion: AbstractCriterion) -> tuple[float, ...]:
        """The number that is added to a criterion, for each row."""
        return self.offsets.get(criterion, (0.0,) * self.rows)

    def objectives(self, u: Float[np.ndarray, " coordinates"]) -> list[Value]:
        """The value to be maximised, of each prompt or their mean."""
        if isinstance(self.objective, str):
            values, weights = np.array(list(self.named(u).values())), self.space.mean_of(self.objective)
            found = [Value(float(weights @ values), weights * self.space.slopes(np.asarray(u)))]
        else:
            found = self.criterion(self.objective, u)
        return [Value(self.sign * value, self.sign * slope) for value, slope in found]

    def residuals(self, u: Float[np.ndarray, " coordinates"]) -> list[Value]:
        """The slacks of all constraints, scaled to be of order 1; negative where one does not hold.

        A bound on a probability is one on a quantile, which has a gradient where the probability is next to 0 or 1.
        Values are compared with positive bounds in logs, continued by a line for values below a third of the bound.
        """
        found = []
        for each in self.constraints:
            criterion, bound, sign = self._in_residuals(each)
            for value, slope in self.criterion(criterion, u):
                if bound > 0 and value >= bound / math.e:
                    found.append(Value(sign * math.log(value / bound), sign * slope / value))
                elif bound > 0:
                    found.append(Value(sign * (math.e * value / bound - 2), sign * slope * math.e / bound))
                else:
                    size = max(abs(bound), 1.0)
                    found.append(Value(sign * (value - bound) / size, sign * slope / size))
        return found

    def _in_residuals(self, constraint: Constraint) -> tuple[AbstractCriterion, float, int]:
        """The criterion, its bound and the sign of the slack."""
        # A bound on the mean of probabilities is not one on the mean of quantiles.
        if self.over == "worst" and isinstance(constraint.criterion, Probability):
            return _as_quantile(constraint.criterion, constraint.bound, constraint.sign)
        return constraint.criterion, constraint.bound, constraint.sign

    def violation(self, u: Float[np.ndarray, " coordinates"]) -> float:
        """The largest violation of a scaled constraint; 0 if all hold."""
        return max((max(-each.value, 0.0) for each in self.residuals(u)), default=0.0)

    def estimates(self, criterion: AbstractCriterion, u: Float[np.ndarray, " coordinates"]) -> list[Estimate]:
        """A criterion without smoothing, with its Monte Carlo error: of each prompt, or their mean."""
        number = self.statistics.index(criterion.statistic)  # pyright: ignore[reportArgumentType]
        found = [criterion.estimate(sample.values[number], sample.exploded) for sample in self.samples(u)]
        if self.over == "mean":
            error = math.sqrt(sum(each.error**2 for each in found)) / len(found)
            found = [Estimate(float(np.mean([each.value for each in found])), error)]
        return [
            Estimate(each.value + offset, each.error)
            for each, offset in zip(found, self.offset(criterion), strict=True)
        ]

    def exploded(self, u: Float[np.ndarray, " coordinates"]) -> float:
        """The largest share, over prompts, of paths that explode."""
        return max(float(sample.exploded.mean()) for sample in self.samples(u))


def _as_quantile(criterion: Probability, bound: float, sign: int) -> tuple["_Event", float, int]:
    """A bound on a quantile in place of one on a probability."""
    # P(g < x) ≥ p means that the p-quantile is at most x, and P(g > x) ≥ p that the (1 − p)-quantile is at least x.
    level = bound if criterion.sign < 0 else 1 - bound
    return _Event(criterion.statistic, level, criterion.value, criterion.sign), criterion.value, criterion.sign * sign


@dataclasses.dataclass(frozen=True)
class _Event(Quantile):
    """A quantile for which paths that explode are on the wrong side of a value, beyond all others.

    Attributes:
        value: the value.
        better: 1 if a statistic above the value is wanted, −1 if one below it is.
    """

    value: float
    better: int

    def smooth(self, values: Float[Array, " paths"], exploded: Bool[Array, " paths"]) -> Float[Array, ""]:
        """The quantile."""
        # Paths that explode end at any size, whose square may overflow.
        known = jnp.where(exploded, self.value, jax.lax.stop_gradient(values))
        margin = known.std() + max(abs(self.value), 1.0)
        worst = jnp.minimum(known.min(), self.value) if self.better > 0 else jnp.maximum(known.max(), self.value)
        return super().smooth(jnp.where(exploded, worst - self.better * margin, values), exploded)

    def estimate(self, values: Float[np.ndarray, " paths"], exploded: Bool[np.ndarray, " paths"]) -> Estimate:
        """The quantile and its error, among the paths that do not explode."""
        return super().estimate(values[~exploded] if (~exploded).sum() > 1 else values, exploded)


@functools.partial(jax.jit, static_argnums=0)
def _value_and_weights(criterion: AbstractCriterion, values: Array, exploded: Array) -> tuple[Array, Array]:
    return jax.value_and_grad(lambda g: criterion.smooth(g, exploded))(values)
