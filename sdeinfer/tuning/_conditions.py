"""The conditions of Karush, Kuhn and Tucker at a solution: multipliers of the bounds, and how the answer moves."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float
from scipy import optimize

from sdeinfer.tuning._problem import Problem

ACTIVE = 1e-3
"""Largest scaled slack of an active constraint."""

STATIONARY = 0.05
"""Largest relative misfit of the conditions; beyond it the search has not converged, and multipliers are NaN."""

DIFFERENCE = 0.02
"""Step in the free coordinates for second derivatives, from differences of gradients."""


class Conditions(NamedTuple):
    """The conditions of Karush, Kuhn and Tucker at a solution.

    Attributes:
        active: the active rows of the constraints.
        at_end: the coordinates at the end of their box.
        multipliers: change of the objective per change of each bound; 0 for constraints that are not active, NaN where
            the conditions do not hold.
        sensitivity: derivative of each coordinate by the bound of each active row; NaN for several worst prompts.
    """

    active: Bool[np.ndarray, " rows"]
    at_end: Bool[np.ndarray, " coordinates"]
    multipliers: Float[np.ndarray, " rows"]
    sensitivity: Float[np.ndarray, "coordinates active"]


def conditions_at(problem: Problem, u: Float[np.ndarray, " coordinates"]) -> Conditions:
    """The conditions at a solution.

    Stationarity is Σ w ∇objective + Σ λ sign ∇criterion = 0 with w, λ ≥ 0 and Σ w = 1 over the prompts that are the
    worst; and a bound moves the objective by −sign λ.
    """
    at_end = problem.space.at_end(u)
    free, goals = ~at_end, problem.objectives(u)
    active = np.array([each.value < ACTIVE for each in problem.residuals(u)], bool)
    rows = _constraints(problem, u)[active][:, free]
    signs = np.repeat([each.sign for each in problem.constraints], problem.rows)[active]
    values, slopes = np.array([each.value for each in goals]), np.array([each.slope[free] for each in goals])
    tied = np.flatnonzero(values - values.min() <= ACTIVE * max(abs(values.min()), 1e-3))
    scale = max(float(np.abs(slopes).max(initial=0.0)), 1e-12)
    top = np.concatenate([slopes[tied].T, (signs[:, None] * rows).T], axis=1) / scale
    total = np.concatenate([np.ones(len(tied)), np.zeros(len(rows))])
    found, misfit = optimize.nnls(np.vstack([top, total]), np.append(np.zeros(len(top)), 1.0))
    of_goals, of_bounds = found[: len(tied)].sum(), signs * found[len(tied) :]
    known = misfit < STATIONARY and of_goals > 0
    multipliers = np.zeros(len(active))
    multipliers[active] = -of_bounds * problem.sign / of_goals if known else np.nan
    sensitivity = np.zeros((len(u), len(rows)))
    if len(rows) and free.any():
        solved = known and len(tied) == 1
        sensitivity[free] = _moves(problem, u, rows, of_bounds / of_goals, active, free) if solved else np.nan
    return Conditions(active, at_end, multipliers, sensitivity)


def _constraints(problem: Problem, u: np.ndarray) -> np.ndarray:
    """Gradients of the criteria as they are stated, one row per constraint and prompt."""
    rows = [each.slope for constraint in problem.constraints for each in problem.criterion(constraint.criterion, u)]
    return np.array(rows).reshape(-1, len(u))


def _moves(
    problem: Problem, u: np.ndarray, rows: np.ndarray, weights: np.ndarray, active: np.ndarray, free: np.ndarray
) -> np.ndarray:
    """du/db from the linearised conditions; the Hessian is needed only where constraints do not fix u."""
    count = len(rows)
    if count >= free.sum():
        return np.linalg.pinv(rows)

    def gradient(x: np.ndarray) -> np.ndarray:
        worst = min(problem.objectives(x), key=lambda each: each.value)
        return worst.slope + weights @ _constraints(problem, x)[active]

    changes = DIFFERENCE * np.eye(len(u))[free]
    hessian = np.array([(gradient(u + x) - gradient(u - x))[free] for x in changes]).T / (2 * DIFFERENCE)
    hessian = (hessian + hessian.T) / 2
    system = np.block([[hessian, rows.T], [rows, np.zeros((count, count))]])
    right = np.concatenate([np.zeros((len(hessian), count)), np.eye(count)])
    return np.linalg.lstsq(system, right)[0][: len(hessian)]
