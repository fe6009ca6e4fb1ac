"""Choose the parameters of a layer by gradient, for stated properties of its networks at initialisation."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.random as jr
import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray

from sdeinfer._arguments import checked, whole_number
from sdeinfer._files import InputError
from sdeinfer._progress import phase, with_progress_line
from sdeinfer.covariance import validate_covariance
from sdeinfer.criteria import AbstractCriterion, Constraint, Estimate, Probability
from sdeinfer.layers import AbstractLayer, Architecture, OverDepth, Profile, kind_of
from sdeinfer.tuning._conditions import Conditions
from sdeinfer.tuning._problem import Over, Problem, extrapolated
from sdeinfer.tuning._search import FEASIBLE, Found, polish, search
from sdeinfer.tuning._space import fixed_values, space_of
from sdeinfer.tuning._tuned import Tuned

MOST_EXPLODED = 0.05
"""Largest share of paths that explode for criteria other than probabilities."""

CORRECTIONS = 2
"""Largest number of times that the bias of the steps is removed and the search goes on."""


@checked
@with_progress_line
def tune(
    architecture: str | Architecture | AbstractLayer | type[AbstractLayer],
    V0: Float[Array | np.ndarray, "*prompts m m"],
    *,
    depth: int | tuple[int, int],
    width: int,
    maximise: str | AbstractCriterion | None = None,
    minimise: str | AbstractCriterion | None = None,
    subject_to: Constraint | Sequence[Constraint] = (),
    fixed: Mapping[str, ArrayLike | Profile] | None = None,
    posterior: xr.DataTree | None = None,
    start: Mapping[str, float] | None = None,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    knots: Mapping[str, int] | None = None,
    over: Over = "worst",
    paths: int = 4096,
    step: float = 0.01,
    progress: bool = False,
    key: PRNGKeyArray,
) -> Tuned:
    """Choose parameters of a layer so that networks of some width and depth have stated properties.

    Criteria are estimated on paths of the covariance SDE over T = depth/width, with the same random numbers at all
    parameters, and have exact derivatives along the paths. SLSQP finds the optimum; values and errors in the result are
    those of fresh paths. The largest γ under two bounds::

        largest = si.tune(
            "transformer", V0, width=256, depth=64, maximise="gamma", fixed={"tau0": 1.0, "c_gap": 1.0}, key=key,
            subject_to=[probability(NormFactor(), below=2) >= 0.95, quantile(LargestCorrelation(), 0.95) <= 0.9],
        )

    Arguments:
        architecture: a name, an `Architecture`, or a layer, whose own parameters do not matter.
        V0: covariance of the tokens at layer 0, shape (m, m); or of several prompts, shape (prompts, m, m).
        depth: number of layers d; or the fewest and the most, to choose it as well.
        width: n.
        maximise: a criterion, or "depth", or the name of a free parameter; with knots, its mean over depth.
        minimise: the same, to be minimised; exactly one of the two is needed.
        subject_to: constraints, `criterion <= bound` or `criterion >= bound`.
        fixed: values of parameters that are not free, by name; or functions of depth-time, as in `OverDepth`. All other
            parameters are free: γ, τ0 and the gap c₊ − c₋, on which the limit depends. With neither c₊ nor c₋ fixed
            their mean is 0.
        posterior: a fit. Parameters that are not in `fixed`, `start`, `bounds`, `knots` and the objective are drawn
            from it, one draw per path: probabilities and quantiles are then over networks and over what is not known.
        start: values at which the search starts, by name.
        bounds: lowest and highest value of free parameters, by name.
        knots: number of values over depth of free parameters, by name; linear in between.
        over: with several prompts, whether constraints and objective hold for the worst prompt or for their mean.
        paths: number of paths of each prompt.
        step: longest step in depth-time; at most 1/n, a layer, for statistics of every step. Where halving it changes a
            criterion by more than its Monte Carlo error, the bias is removed by extrapolation, and the search goes on.
        progress: show the phase of the work.
        key: PRNG key.

    Raises:
        InputError: for goals that cannot be attained, with the nearest that can; for invalid arguments; and for
            statistics without finite derivatives.
    """
    del progress  # for `with_progress_line`
    began = time.perf_counter()
    kind = kind_of(architecture)
    V0 = _prompts(V0)
    fixed, free_by_name = dict(fixed or {}), {*(start or {}), *(bounds or {}), *(knots or {})}
    objective, sign = _objective(maximise, minimise)
    each_one: Any = subject_to
    several = isinstance(each_one, Sequence) and not isinstance(each_one, str)
    constraints: tuple[Any, ...] = tuple(each_one) if several else (each_one,)
    for each in constraints:
        if not isinstance(each, Constraint):
            raise InputError(f"subject_to: a constraint, such as expectation(statistic) <= 1, is needed; got {each!r}")
    for name, value in {"width": width, "paths": paths}.items():
        if value < 1:
            raise InputError(f"{name}: at least 1 is needed, got {value}")
    if over not in ("worst", "mean"):
        raise InputError(f"over: must be 'worst' or 'mean', got {over!r}")
    ends: Any = tuple(depth) if isinstance(depth, list) else depth
    depth = ends
    if isinstance(depth, tuple) and (len(depth) != 2 or not all(map(whole_number, depth))):
        raise InputError(f"depth: a number, or the fewest and the most layers, is needed; got {depth}")
    if min(depth if isinstance(depth, tuple) else (depth,)) < 1:
        raise InputError(f"depth: at least 1 is needed, got {depth}")
    draws = _draws(kind, posterior, {*fixed, *free_by_name, objective}, paths, key)
    named = {"start": start or {}, "bounds": bounds or {}, "knots": knots or {}}
    space = space_of(kind, fixed=fixed, depth=depth, drawn=tuple(draws), **named)
    values = fixed_values(kind, fixed)
    if isinstance(objective, str) and objective not in [each.name for each in space.free]:
        free = ", ".join(each.name for each in space.free)
        range_of_depth = "; for depth give the fewest and the most layers" if objective == "depth" else ""
        raise InputError(f"objective: {objective} is not free; free are {free}{range_of_depth}")
    if isinstance(objective, str) and not constraints:
        raise InputError(f"subject_to: without a constraint nothing limits {objective}")
    problem = Problem(
        space=space,
        fixed=values | draws,
        V0=V0,
        width=width,
        depth=float(max(depth) if isinstance(depth, tuple) else depth),
        objective=objective,
        sign=sign,
        constraints=constraints,
        over=over,
        paths=paths,
        step=step,
        key=jr.fold_in(key, 0),
    )
    for statistic in problem.statistics:
        statistic.check(V0.shape[-1])
    if any(each.every_step for each in problem.statistics):
        problem = dataclasses.replace(problem, step=min(step, 1 / width))
    example = problem.layer(space.start(), problem.depth)
    example.check_width(width)
    if isinstance(example, OverDepth):
        ends = np.asarray(problem.grid.steps) * problem.depth / width
        example.check_range((ends[1:] + ends[:-1]) / 2)
    phase("tuning")
    found = search(problem)
    fresh = problem.with_fresh_paths(jr.fold_in(key, 1), problem.finer_step)
    for _ in range(CORRECTIONS):
        corrected = problem.corrected(fresh, found.u)
        if found.violation > FEASIBLE or corrected.offsets == problem.offsets:
            break
        problem = corrected
        again = polish(problem, found.u)
        found = again._replace(evaluations=found.evaluations + problem.evaluations)
    if found.violation > FEASIBLE:
        raise InputError(_nearest(fresh, found))
    _require_few_explosions(fresh, found.u)
    return _tuned(problem, fresh, found, began)


def _prompts(V0: ArrayLike) -> np.ndarray:
    array = np.asarray(V0)
    if array.ndim not in (2, 3) or not array.size:
        raise InputError(f"V0: shape (m, m) or (prompts, m, m) is needed, got {array.shape}")
    each = [validate_covariance(V) for V in (array if array.ndim == 3 else array[None])]
    return np.stack([V.astype(jax.dtypes.canonicalize_dtype(V.dtype)) for V in each])


def _objective(maximise: Any, minimise: Any) -> tuple[str | AbstractCriterion, int]:
    if (maximise is None) == (minimise is None):
        raise InputError("maximise: give either maximise or minimise")
    objective, sign = (maximise, 1) if minimise is None else (minimise, -1)
    if not isinstance(objective, str | AbstractCriterion):
        raise InputError(f"maximise: the name of a parameter or a criterion is needed, got {objective!r}")
    return objective, sign


def _draws(
    kind: Architecture, posterior: xr.DataTree | None, settled: set[Any], paths: int, key: PRNGKeyArray
) -> dict[str, Float[np.ndarray, " paths"]]:
    """One posterior draw per path of each parameter that is neither fixed nor free by name."""
    if posterior is None:
        return {}
    draws = posterior["posterior"].to_dataset()
    taken = []
    for names, sampled, _ in kind.coordinates.rules:
        # Parameters that follow from sampled coordinates are drawn together, or not at all.
        if not settled & {*names, *sampled} and draws.keys() >= {*names}:
            taken += names
    if not taken:
        raise InputError("posterior: it has none of the parameters that are not fixed or free")
    stacked = draws[taken].stack(draw_of_all=("chain", "draw"))
    if any(set(stacked[name].dims) != {"draw_of_all"} for name in taken):
        raise InputError("posterior: one value per draw is needed, as from a fit of one layer")
    number = np.asarray(jr.choice(jr.fold_in(key, 2), stacked.sizes["draw_of_all"], (paths,)))
    return {name: stacked[name].values[number] for name in taken}


def _require_few_explosions(problem: Problem, u: np.ndarray) -> None:
    """Raise an InputError where paths explode and a criterion is not the probability of an event.

    An event does not count if its path explodes. Other criteria see a path as it was before.
    """
    others = [each for each in problem.criteria if not isinstance(each, Probability)]
    share = problem.exploded(u)
    if others and share > MOST_EXPLODED:
        at = ", ".join(f"{name} = {value:.3g}" for name, value in problem.named(u).items())
        raise InputError(
            f"{others[0]}: {share:.0%} of paths explode at {at}; add a probability to subject_to, or set bounds"
        )


def _nearest(problem: Problem, found: Found) -> str:
    """The message for goals that cannot be attained."""
    nearest = []
    for constraint in problem.constraints:
        value = _worst(constraint, [each.value for each in problem.estimates(constraint.criterion, found.u)])
        nearest.append(
            f"{constraint.criterion} = {value:.3g} (asked {'≥' if constraint.sign > 0 else '≤'} {constraint.bound:g})"
        )
    at = ", ".join(f"{name} = {value:.3g}" for name, value in problem.named(found.u).items())
    return f"subject_to: these cannot all be had; the nearest is {'; '.join(nearest)}, at {at}"


def _worst(constraint: Constraint, values: list[float]) -> float:
    return min(values) if constraint.sign > 0 else max(values)


def _tuned(problem: Problem, fresh: Problem, found: Found, began: float) -> Tuned:
    space = problem.space
    gradients, u = Conditions(problem, found.u), problem.with_whole_depth(found.u)
    depth = round(float(space.time(u, problem.depth, 1)))
    names, values = space.names, list(problem.named(u).values())
    # Rows of constraints are in the order of `Problem.residuals`: by constraint, then by prompt.
    rows, errors = [], []
    prompts = 1 if problem.over == "mean" else len(problem.V0)
    for constraint in problem.constraints:
        for prompt, estimate in enumerate(_estimates(problem, fresh, constraint.criterion, u)):
            number = len(rows)
            rows.append(
                {
                    "criterion": str(constraint) + (f", prompt {prompt}" if prompts > 1 else ""),
                    "value": estimate.value,
                    "error": estimate.error,
                    "bound": constraint.bound,
                    "slack": constraint.sign * (estimate.value - constraint.bound),
                    "active": bool(gradients.active[number]),
                    "multiplier": gradients.multipliers[number],
                }
            )
            errors.append(estimate.error)
    if isinstance(problem.objective, AbstractCriterion):
        for prompt, estimate in enumerate(_estimates(problem, fresh, problem.objective, u)):
            name = f"{'maximise' if problem.sign > 0 else 'minimise'} {problem.objective}"
            rows.append(
                {
                    "criterion": name + (f", prompt {prompt}" if prompts > 1 else ""),
                    "value": estimate.value,
                    "error": estimate.error,
                }
            )
    columns = ["value", "error", "bound", "slack", "active", "multiplier"]
    criteria = pd.DataFrame(rows, columns=["criterion", *columns]).set_index("criterion")
    active = np.flatnonzero(gradients.active)
    by_bound = gradients.sensitivity * space.slopes(found.u)[:, None]
    sensitivity = pd.DataFrame(by_bound, index=names, columns=[rows[number]["criterion"] for number in active])
    error = (
        np.sqrt(by_bound**2 @ np.array([errors[number] for number in active]) ** 2) if len(active) else np.zeros(len(u))
    )
    parameters = pd.DataFrame({"value": values, "error": error, "at_end": gradients.at_end}, index=names)
    layer = problem.layer(u, depth)
    return Tuned(
        layer=layer,
        parameters=parameters,
        criteria=criteria,
        sensitivity=sensitivity,
        found={
            "start": problem.named(space.start()),
            "evaluations": found.evaluations,
            "iterations": found.iterations,
            "message": found.message,
            "converged": found.converged,
            "paths": problem.paths,
            "step": problem.step,
            "seconds": time.perf_counter() - began,
            "exploded": fresh.exploded(u),
            "gap": _gap(layer, problem.width),
            "logit_spread": _logit_spread(layer, problem.V0, problem.width),
        },
        depth=depth,
        u=u,
        problem=problem,
    )


def _estimates(problem: Problem, fresh: Problem, criterion: AbstractCriterion, u: np.ndarray) -> list[Estimate]:
    """A criterion on fresh paths, free of the bias of the steps where they were halved and it shows."""
    found = fresh.estimates(criterion, u)
    if fresh.grid == problem.grid:
        return found
    return [extrapolated(rough, fine) for rough, fine in zip(problem.estimates(criterion, u), found, strict=True)]


def _gap(layer: AbstractLayer, width: int) -> float:
    """The largest gap of the slopes of a ReLU, (c₊ − c₋)/√n, at layer 0; 0 without one."""
    values = {name: float(value) for name, value in layer.at(0.0).parameters().items()}
    gaps = [
        value - values[f"{name.removesuffix('plus')}minus"] for name, value in values.items() if name.endswith("c_plus")
    ]
    return max(gaps, default=0.0) / math.sqrt(width)


def _logit_spread(layer: AbstractLayer, V0: np.ndarray, width: int) -> float:
    """The largest spread of the logits in a row of the softmax at layer 0; 0 without attention."""
    from sdeinfer.infer import logit_spread

    here = layer.at(0.0)
    temperatures = [float(here.parameters()[name]) for name in here.coordinates.temperatures]
    if not temperatures or V0.shape[-1] < 2:
        return 0.0
    spread = logit_spread(V0, np.full(len(V0), width), here.limit().pattern)
    return float(spread.max()) / min(temperatures)
