"""The optimisation problem: objective, residuals of the constraints, and their gradients, on common random numbers."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from sdeinfer._files import InputError
from sdeinfer._progress import phase
from sdeinfer.criteria import AbstractCriterion, AbstractStatistic, Constraint, Estimate, Probability, Quantile
from sdeinfer.layers import AbstractLayer
from sdeinfer.solve._grid import Grid, step_grid
from sdeinfer.terms._limit import LimitSteps
from sdeinfer.tuning._samples import Sample, chain_sample, joined_samples, path_sample, weight_sample
from sdeinfer.tuning._space import Space, coefficients

type Law = Literal["finite-width", "limit"]
"""Whose statistics promises are about: networks of width n, or paths of the SDE."""


class Value(NamedTuple):
    """A number and its gradient in the free coordinates."""

    value: float
    slope: Float[np.ndarray, " coordinates"]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Criteria of a layer as functions of its free coordinates.

    Attributes:
        objective: a criterion, or the name of a free coordinate.
        sign: 1 to maximise the objective, −1 to minimise it.
        paths: number of networks, or of paths.
        law: what is sampled: paths of the SDE; exact chains, where there are any; or networks with weights.
        chain_slopes: whether chains come with derivatives.
        offsets: what is added to criteria, one number for each prompt.
    """

    space: Space
    fixed: dict[str, Any]
    V0: Float[np.ndarray, "prompts m m"]
    width: int
    depth: int
    objective: AbstractCriterion | str
    sign: int
    constraints: tuple[Constraint, ...]
    paths: int
    step: float
    key: PRNGKeyArray
    law: Law | Literal["weights"] = "limit"
    chain_slopes: bool = False
    offsets: Mapping[AbstractCriterion, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def time(self) -> float:
        return self.depth / self.width

    @property
    def criteria(self) -> tuple[AbstractCriterion, ...]:
        """The criteria of the constraints and of the objective, each once."""
        goals = [constraint.criterion for constraint in self.constraints]
        goals += [] if isinstance(self.objective, str) else [self.objective]
        return tuple(dict.fromkeys(goals))

    @property
    def compared(self) -> tuple[AbstractCriterion, ...]:
        """The criteria, and those that `residuals` compares with bounds in their place."""
        return tuple(
            dict.fromkeys([*(_in_residuals(constraint)[0] for constraint in self.constraints), *self.criteria])
        )

    @property
    def statistics(self) -> tuple[AbstractStatistic, ...]:
        """The statistics of the criteria, each once."""
        return tuple(dict.fromkeys(criterion.statistic for criterion in self.criteria))  # pyright: ignore[reportReturnType]

    @property
    def of_chains(self) -> tuple[AbstractStatistic, ...]:
        """The statistics that exact chains have, those of gradients from a width of 4m per block of columns on."""
        layer = self.layer(self.space.start())
        if not layer.has_chain:
            return ()
        tangents = layer.has_tangents and self.width >= 4 * self.V0.shape[-1] * layer.column_blocks
        return tuple(statistic for statistic in self.statistics if tangents or statistic.directions is None)

    @property
    def grid(self) -> Grid:
        return step_grid([1.0], self.step / self.time)

    def fresh(self, law: Law | Literal["weights"], *, paths: int, key: PRNGKeyArray) -> "Problem":
        """The problem on new networks, or on new paths with half the step, unless statistics are of every step."""
        every_step = any(statistic.every_step for statistic in self.statistics)
        step = self.step if every_step else self.time / (2 * (len(self.grid.steps) - 1))
        return dataclasses.replace(self, law=law, paths=paths, key=key, step=step, offsets={})

    def at_size(self, width: int, depth: int) -> "Problem":
        """The problem of another width and depth; functions of depth-time are stretched to the new d/n."""
        ratio = self.time * width / depth
        fixed = {
            name: profile if math.isclose(ratio, 1) or name not in self.space.profiled else _Stretched(profile, ratio)
            for name, profile in self.fixed.items()
        }
        sizes = {"width": width, "depth": depth, "step": min(self.step, 1 / width)}
        return dataclasses.replace(self, **sizes, fixed=fixed, chain_slopes=False, offsets={})

    @functools.cached_property
    def _remembered(self) -> dict[bytes, list[Sample]]:
        return {}

    @property
    def evaluations(self) -> int:
        return len(self._remembered)

    def samples(self, u: Float[np.ndarray, " coordinates"]) -> list[Sample]:
        """The statistics of each prompt; an InputError where they or their derivatives are not finite."""
        place = np.asarray(u, float).tobytes()
        if place not in self._remembered:
            phase(f"tuning: evaluation {self.evaluations + 1} of {self.paths} networks")
            draw = self._sampler(u)
            draws = [draw(V, jax.random.fold_in(self.key, number)) for number, V in enumerate(self.V0)]
            self._require_finite(u, draws)
            self._remembered[place] = draws
        return self._remembered[place]

    def _sampler(self, u: Float[np.ndarray, " coordinates"]) -> Callable[[np.ndarray, PRNGKeyArray], Sample]:
        """Draws statistics of networks from a V0 by a key; by width n those that chains do not have are of paths."""
        layer = self.layer(u)
        sizes: dict[str, Any] = {"width": self.width, "depth": self.depth, "networks": self.paths}
        if self.law == "weights":
            return lambda V0, key: weight_sample(self.statistics, layer, V0, **sizes, key=key)
        by_chain = self.of_chains if self.law == "finite-width" else ()
        by_path = tuple(statistic for statistic in self.statistics if statistic not in by_chain)
        slopes = self.space.layer_slopes(u, self.fixed, self.time) if by_chain and self.chain_slopes else None
        limit = self.limit(u) if by_path else None

        def draw(V0: np.ndarray, key: PRNGKeyArray) -> Sample:
            parts = {}
            if by_chain:
                parts[by_chain] = chain_sample(by_chain, layer, V0, slopes=slopes, **sizes, key=key)
            if limit is not None:
                sample = path_sample(by_path, *limit, V0, self.grid, paths=self.paths, key=key)
                directions = slice(0 if by_chain and slopes is None else None)
                parts[by_path] = sample._replace(slopes=sample.slopes[:, directions])
            return joined_samples(self.statistics, parts)

        return draw

    def layer(self, u: Float[np.ndarray, " coordinates"]) -> AbstractLayer:
        return self.space.layer(u, self.fixed, self.time)

    def limit(self, u: Float[np.ndarray, " coordinates"]) -> tuple[LimitSteps, Any]:
        """Coefficients over unit time and their derivatives."""
        ends = np.asarray(self.grid.steps) if self.space.over_depth else np.array([0.0, 1.0])
        middle = jnp.asarray((ends[1:] + ends[:-1]) / 2, float)
        arrays = coefficients(self.space, jnp.asarray(u, float), self.fixed, middle, jnp.asarray(self.time, float))
        limit, slopes = jax.tree.map(np.asarray, arrays)
        return LimitSteps(limit, ends[:-1]), slopes

    def _require_finite(self, u: np.ndarray, samples: list[Sample]) -> None:
        place = ", ".join(f"{name} = {value:.4g}" for name, value in self.named(u).items())
        for sample in samples:
            for statistic, values, slopes in zip(self.statistics, sample.values, sample.slopes, strict=True):
                for prefix, bad in (
                    ("", ~np.isfinite(values)),
                    ("the derivative of ", ~np.isfinite(slopes).all(axis=0)),
                ):
                    if bad.any():
                        count = f"{bad.sum()} of {len(bad)} paths"
                        raise InputError(f"{prefix}{statistic}: not finite on {count} at {place}")

    def named(self, u: Float[np.ndarray, " coordinates"]) -> dict[str, float]:
        """The free values, one per knot."""
        values = np.hstack(list(self.space.values(np.asarray(u)).values()))
        return dict(zip(self.space.names, map(float, values), strict=True))

    def criterion(self, criterion: AbstractCriterion, u: Float[np.ndarray, " coordinates"]) -> list[Value]:
        """A criterion of each prompt, smoothed."""
        values = []
        for sample, offset in zip(self.samples(u), self.offset(criterion), strict=True):
            number = self.statistics.index(criterion.statistic)  # pyright: ignore[reportArgumentType]
            value, weights = _value_and_weights(criterion, sample.values[number], sample.exploded)
            values.append(Value(float(value) + offset, sample.slopes[number] @ np.asarray(weights)))
        return values

    def estimates(self, criterion: AbstractCriterion, u: Float[np.ndarray, " coordinates"]) -> list[Estimate]:
        """A criterion of each prompt without smoothing, with its Monte Carlo error."""
        by_prompt = []
        for sample, offset in zip(self.samples(u), self.offset(criterion), strict=True):
            number = self.statistics.index(criterion.statistic)  # pyright: ignore[reportArgumentType]
            estimate = criterion.estimate(sample.values[number], sample.exploded)
            by_prompt.append(Estimate(estimate.value + offset, estimate.error))
        return by_prompt

    def offset(self, criterion: AbstractCriterion) -> np.ndarray:
        return self.offsets.get(criterion, np.zeros(len(self.V0)))

    def objectives(self, u: Float[np.ndarray, " coordinates"]) -> list[Value]:
        """The value to be maximised, of each prompt."""
        if isinstance(self.objective, str):
            values, weights = np.array(list(self.named(u).values())), self.space.mean_of(self.objective)
            goals = [Value(float(weights @ values), weights * self.space.slopes(np.asarray(u)))]
        else:
            goals = self.criterion(self.objective, u)
        return [Value(self.sign * value, self.sign * slope) for value, slope in goals]

    def residuals(self, u: Float[np.ndarray, " coordinates"]) -> list[Value]:
        """The slacks of all constraints, scaled to be of order 1; negative where one does not hold.

        A bound on a probability is one on a quantile, which has a gradient where the probability is next to 0 or 1.
        Values are compared with positive bounds in logs, continued by a line for values below a third of the bound.
        """
        slacks = []
        for constraint in self.constraints:
            criterion, bound, sign = _in_residuals(constraint)
            for value, slope in self.criterion(criterion, u):
                if bound > 0 and value >= bound / math.e:
                    slacks.append(Value(sign * math.log(value / bound), sign * slope / value))
                elif bound > 0:
                    slacks.append(Value(sign * (math.e * value / bound - 2), sign * slope * math.e / bound))
                else:
                    size = max(abs(bound), 1.0)
                    slacks.append(Value(sign * (value - bound) / size, sign * slope / size))
        return slacks

    def violation(self, u: Float[np.ndarray, " coordinates"]) -> float:
        """The largest violation of a scaled constraint; 0 if all hold."""
        return max((max(-residual.value, 0.0) for residual in self.residuals(u)), default=0.0)

    def exploded(self, u: Float[np.ndarray, " coordinates"]) -> float:
        """The largest share, over prompts, of networks that explode."""
        return max(float(sample.exploded.mean()) for sample in self.samples(u))


class _Stretched(eqx.Module):
    """A function of depth-time, at a multiple of its argument."""

    profile: Any
    ratio: float

    def __call__(self, time: Any) -> Array:
        return self.profile(time * self.ratio)


def _in_residuals(constraint: Constraint) -> tuple[AbstractCriterion, float, int]:
    """The criterion, its bound and the sign of the slack; a bound on a quantile in place of one on a probability."""
    criterion, bound, sign = constraint.criterion, constraint.bound, constraint.sign
    if not isinstance(criterion, Probability):
        return criterion, bound, sign
    # P(g < x) ≥ p means that the p-quantile is at most x, and P(g > x) ≥ p that the (1 − p)-quantile is at least x.
    level = bound if criterion.sign < 0 else 1 - bound
    event = _Event(criterion.statistic, level, criterion.value, criterion.sign)
    return event, criterion.value, criterion.sign * sign


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
        # Paths that explode end at any size, whose square may overflow.
        known = jnp.where(exploded, self.value, jax.lax.stop_gradient(values))
        margin = known.std() + max(abs(self.value), 1.0)
        worst = jnp.minimum(known.min(), self.value) if self.better > 0 else jnp.maximum(known.max(), self.value)
        return super().smooth(jnp.where(exploded, worst - self.better * margin, values), exploded)

    def estimate(self, values: Float[np.ndarray, " paths"], exploded: Bool[np.ndarray, " paths"]) -> Estimate:
        # Among the paths that do not explode.
        return super().estimate(values[~exploded] if (~exploded).sum() > 1 else values, exploded)


@functools.partial(jax.jit, static_argnums=0)
def _value_and_weights(criterion: AbstractCriterion, values: Array, exploded: Array) -> tuple[Array, Array]:
    return jax.value_and_grad(lambda g: criterion.smooth(g, exploded))(values)
