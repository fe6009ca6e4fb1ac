"""The answer of a search: values on fresh networks, and the conditions of Karush, Kuhn and Tucker at the solution.

Tests: `tests/tuning/test_tune.py`.
"""

import math
import time
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float
from scipy import optimize

from sdeinfer.criteria import AbstractCriterion
from sdeinfer.infer._expansion import curvature
from sdeinfer.layers import AbstractLayer
from sdeinfer.tuning._problem import Problem
from sdeinfer.tuning._search import Solution
from sdeinfer.tuning._tuned import Tuned

ACTIVE = 1e-3
"""Largest scaled slack of an active constraint."""

STATIONARY = 0.05
"""Largest relative misfit of the conditions; beyond it the search has not converged, and multipliers are NaN."""


class _Conditions(NamedTuple):
    """The conditions of Karush, Kuhn and Tucker at a solution.

    Multipliers, changes of the objective per change of each bound, are 0 for constraints that are not active; they are
    NaN where the conditions do not hold, and sensitivities for several worst prompts too.
    """

    active: Bool[np.ndarray, " rows"]
    at_end: Bool[np.ndarray, " coordinates"]
    multipliers: Float[np.ndarray, " rows"]
    sensitivity: Float[np.ndarray, "coordinates active"]


def answer(problem: Problem, fresh: Problem, solution: Solution, began: float) -> Tuned:
    """The answer of a search that `began`: values of `fresh` networks by the law of the criteria."""
    space, u = problem.space, solution.u
    conditions = _conditions(problem, u)
    criteria = _criteria(problem, fresh, conditions, u)
    active = criteria.iloc[np.flatnonzero(conditions.active)]
    by_bound = conditions.sensitivity * space.slopes(u)[:, None]
    values = {
        "value": list(problem.named(u).values()),
        "error": np.sqrt(by_bound**2 @ active["error"].to_numpy(float) ** 2),
        "at_end": conditions.at_end,
    }
    layer = problem.layer(u)
    return Tuned(
        layer=layer,
        parameters=pd.DataFrame(values, index=space.names),
        criteria=criteria,
        sensitivity=pd.DataFrame(by_bound, index=space.names, columns=active.index.to_list()),
        found={
            "start": problem.named(space.start()),
            "evaluations": solution.evaluations,
            "iterations": solution.iterations,
            "message": solution.message,
            "converged": solution.converged,
            "paths": problem.paths,
            "step": problem.step,
            "seconds": time.perf_counter() - began,
            "exploded": fresh.exploded(u),
            "gap": _gap(layer, problem.width),
            "logit_spread": _logit_spread(layer, problem.V0, problem.width),
        },
        law="limit" if fresh.law == "limit" else "finite-width",
        u=u,
        problem=problem,
    )


def _criteria(problem: Problem, fresh: Problem, conditions: _Conditions, u: np.ndarray) -> pd.DataFrame:
    """The table of the constraints, in the order of `Problem.residuals`, and of the objective."""
    rows: list[dict[str, Any]] = []

    def add(name: str, criterion: AbstractCriterion) -> list[dict[str, Any]]:
        estimates = fresh.estimates(criterion, u)
        entries = [
            {
                "criterion": name + (f", prompt {prompt}" if len(problem.V0) > 1 else ""),
                "value": x.value,
                "error": x.error,
            }
            for prompt, x in enumerate(estimates)
        ]
        rows.extend(entries)
        return entries

    for constraint in problem.constraints:
        for row in add(str(constraint), constraint.criterion):
            row |= {"bound": constraint.bound, "slack": constraint.sign * (row["value"] - constraint.bound)}
    for row, active, multiplier in zip(rows, conditions.active, conditions.multipliers, strict=True):
        row |= {"active": bool(active), "multiplier": multiplier}
    if isinstance(problem.objective, AbstractCriterion):
        add(f"{'maximise' if problem.sign > 0 else 'minimise'} {problem.objective}", problem.objective)
    columns = ["value", "error", "bound", "slack", "active", "multiplier"]
    return pd.DataFrame(rows, columns=["criterion", *columns]).set_index("criterion")


def _conditions(problem: Problem, u: Float[np.ndarray, " coordinates"]) -> _Conditions:
    """The conditions at a solution.

    Stationarity is Σ w ∇objective + Σ λ sign ∇criterion = 0 with w, λ ≥ 0 and Σ w = 1 over the prompts that are the
    worst; and a bound moves the objective by −sign λ.
    """
    at_end = problem.space.at_end(u)
    free, goals = ~at_end, problem.objectives(u)
    active = np.array([residual.value < ACTIVE for residual in problem.residuals(u)], bool)
    rows = _slopes(problem, u)[active][:, free]
    signs = np.repeat([constraint.sign for constraint in problem.constraints], len(problem.V0))[active]
    values, slopes = np.array([goal.value for goal in goals]), np.array([goal.slope[free] for goal in goals])
    tied = np.flatnonzero(values - values.min() <= ACTIVE * max(abs(values.min()), 1e-3))
    scale = max(float(np.abs(slopes).max(initial=0.0)), 1e-12)
    top = np.concatenate([slopes[tied].T, (signs[:, None] * rows).T], axis=1) / scale
    total = np.concatenate([np.ones(len(tied)), np.zeros(len(rows))])
    weights, misfit = optimize.nnls(np.vstack([top, total]), np.append(np.zeros(len(top)), 1.0))
    of_goals, of_bounds = weights[: len(tied)].sum(), signs * weights[len(tied) :]
    known = misfit < STATIONARY and of_goals > 0
    multipliers = np.zeros(len(active))
    multipliers[active] = -of_bounds * problem.sign / of_goals if known else np.nan
    sensitivity = np.zeros((len(u), len(rows)))
    if len(rows) and free.any():
        solved = known and len(tied) == 1
        sensitivity[free] = _moves(problem, u, rows, of_bounds / of_goals, active, free) if solved else np.nan
    return _Conditions(active, at_end, multipliers, sensitivity)


def _slopes(problem: Problem, u: np.ndarray) -> np.ndarray:
    """Gradients of the criteria as they are stated, one row per constraint and prompt."""
    rows = [value.slope for constraint in problem.constraints for value in problem.criterion(constraint.criterion, u)]
    return np.array(rows).reshape(-1, len(u))


def _moves(
    problem: Problem, u: np.ndarray, rows: np.ndarray, weights: np.ndarray, active: np.ndarray, free: np.ndarray
) -> np.ndarray:
    """du/db from the linearised conditions; with the Hessian where constraints do not fix u."""
    count = len(rows)
    if count >= free.sum():
        return np.linalg.pinv(rows)

    def gradient(x: np.ndarray) -> np.ndarray:
        point = u.copy()
        point[free] = x
        worst = min(problem.objectives(point), key=lambda goal: goal.value)
        return (worst.slope + weights @ _slopes(problem, point)[active])[free]

    hessian = curvature(gradient, u[free], 0.02)
    system = np.block([[hessian, rows.T], [rows, np.zeros((count, count))]])
    right = np.concatenate([np.zeros((len(hessian), count)), np.eye(count)])
    return np.linalg.lstsq(system, right)[0][: len(hessian)]


def _gap(layer: AbstractLayer, width: int) -> float:
    """The largest gap of the slopes of a ReLU, (c₊ − c₋)/√n, at layer 0; 0 without one."""
    values = {name: float(value) for name, value in layer.at(0.0).parameters().items()}
    gaps = [
        value - values[f"{name.removesuffix('plus')}minus"] for name, value in values.items() if name.endswith("c_plus")
    ]
    return max(gaps, default=0.0) / math.sqrt(width)


def _logit_spread(layer: AbstractLayer, V0: np.ndarray, width: int) -> float:
    """The largest spread of the logits in a row of the softmax at layer 0; 0 without attention."""
    from sdeinfer.infer._measures import logit_spread

    first_layer = layer.at(0.0)
    temperatures = [float(first_layer.parameters()[name]) for name in first_layer.coordinates.temperatures]
    # Blocks have another temperature.
    if not temperatures or V0.shape[-1] < 2:
        return 0.0
    spread = logit_spread(V0, np.full(len(V0), width), first_layer.limit().pattern)
    return float(spread.max()) / min(temperatures)
