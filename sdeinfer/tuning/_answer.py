"""The answer of a search: values on fresh paths, multipliers of the bounds, and what the parameters do beside goals."""

import math
import time
from typing import Any

import numpy as np
import pandas as pd

from sdeinfer.criteria import AbstractCriterion
from sdeinfer.layers import AbstractLayer
from sdeinfer.tuning._conditions import Conditions, conditions_at
from sdeinfer.tuning._problem import Law, Problem
from sdeinfer.tuning._search import Found
from sdeinfer.tuning._tuned import Tuned


def answer(problem: Problem, fresh: Problem, found: Found, law: Law, began: float) -> Tuned:
    """The answer at a solution.

    Arguments:
        problem: the problem.
        fresh: the same problem on other paths.
        found: the solution.
        law: that of the criteria.
        began: when the work began, by `time.perf_counter`.
    """
    space = problem.space
    conditions, u = conditions_at(problem, found.u), problem.with_whole_depth(found.u)
    depth = round(float(space.time(u, problem.depth, 1)))
    criteria = _criteria(problem, fresh, conditions, u)
    active = criteria.iloc[np.flatnonzero(conditions.active)]
    by_bound = conditions.sensitivity * space.slopes(found.u)[:, None]
    values = {
        "value": list(problem.named(u).values()),
        "error": np.sqrt(by_bound**2 @ active["error"].to_numpy(float) ** 2),
        "at_end": conditions.at_end,
    }
    layer = problem.layer(u, depth)
    return Tuned(
        layer=layer,
        parameters=pd.DataFrame(values, index=space.names),
        criteria=criteria,
        sensitivity=pd.DataFrame(by_bound, index=space.names, columns=active.index.to_list()),
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
        law=law,
        u=u,
        problem=problem,
    )


def _criteria(problem: Problem, fresh: Problem, conditions: Conditions, u: np.ndarray) -> pd.DataFrame:
    """The table of the constraints, in the order of `Problem.residuals`, and of the objective."""
    rows: list[dict[str, Any]] = []

    def add(name: str, criterion: AbstractCriterion) -> list[dict[str, Any]]:
        estimates = fresh.estimates(criterion, u)
        own = [
            {"criterion": name + (f", prompt {prompt}" if problem.rows > 1 else ""), "value": x.value, "error": x.error}
            for prompt, x in enumerate(estimates)
        ]
        rows.extend(own)
        return own

    for constraint in problem.constraints:
        for row in add(str(constraint), constraint.criterion):
            row |= {"bound": constraint.bound, "slack": constraint.sign * (row["value"] - constraint.bound)}
    for row, active, multiplier in zip(rows, conditions.active, conditions.multipliers, strict=True):
        row |= {"active": bool(active), "multiplier": multiplier}
    if isinstance(problem.objective, AbstractCriterion):
        add(f"{'maximise' if problem.sign > 0 else 'minimise'} {problem.objective}", problem.objective)
    columns = ["value", "error", "bound", "slack", "active", "multiplier"]
    return pd.DataFrame(rows, columns=["criterion", *columns]).set_index("criterion")


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
    # Blocks have another temperature.
    if not temperatures or V0.shape[-1] < 2:
        return 0.0
    spread = logit_spread(V0, np.full(len(V0), width), here.limit().pattern)
    return float(spread.max()) / min(temperatures)
