"""The conditions of Karush, Kuhn and Tucker at a solution: multipliers of the bounds, and how the answer moves."""

import numpy as np
from scipy import optimize

from sdeinfer.tuning._problem import Problem

ACTIVE = 1e-3
"""Largest scaled slack of an active constraint."""

STATIONARY = 0.05
"""Largest relative misfit of the conditions; beyond it the search has not converged, and multipliers are NaN."""

DIFFERENCE = 0.02
"""Step in the free coordinates for second derivatives, from differences of gradients."""


class Conditions:
    """The conditions of Karush, Kuhn and Tucker at a solution.

    Attributes:
        active: mask of the active rows of the constraints.
        at_end: mask of the coordinates at the end of their box.
        multipliers: change of the objective per change of each bound; 0 for constraints that are not active, NaN where
            the conditions do not hold.
        sensitivity: derivative of each coordinate by the bound of each active row; NaN for several worst prompts.
    """

    def __init__(self, problem: Problem, u: np.ndarray):
        self.problem = problem
        bounds = problem.space.bounds()
        width = bounds[:, 1] - bounds[:, 0]
        self.at_end = (u - bounds[:, 0] < 1e-6 * width) | (bounds[:, 1] - u < 1e-6 * width)
        free = ~self.at_end
        residuals = problem.residuals(u)
        self.active = np.array([each.value < ACTIVE for each in residuals], bool)
        rows = self._constraints(u)[self.active][:, free]
        goals = np.array([each.slope[free] for each in problem.objectives(u)])
        signs = np.concatenate([[each.sign] * self._prompts for each in problem.constraints] or [[]])[self.active]
        # Stationarity: Σ w ∇objective + Σ λ sign ∇criterion = 0 with w, λ ≥ 0 and Σ w = 1 over the prompts that are the
        # worst; and a bound moves the objective by −sign λ.
        values = np.array([each.value for each in problem.objectives(u)])
        tied = np.flatnonzero(values - values.min() <= ACTIVE * max(abs(values.min()), 1e-3))
        scale = max(float(np.abs(goals).max(initial=0.0)), 1e-12)
        top = np.concatenate([goals[tied].T, (signs[:, None] * rows).T], axis=1) / scale
        total = np.concatenate([np.ones(len(tied)), np.zeros(len(rows))])
        found, misfit = optimize.nnls(np.vstack([top, total]), np.append(np.zeros(len(top)), 1.0))
        weights, found = found[: len(tied)], found[len(tied) :]
        known = misfit < STATIONARY and weights.sum() > 0
        self.multipliers = np.zeros(len(residuals))
        self.multipliers[self.active] = -signs * found * problem.sign / weights.sum() if known else np.nan
        self.sensitivity = np.zeros((len(u), len(rows)))
        if len(rows) and free.any():
            solved = known and len(tied) == 1
            self.sensitivity[free] = self._solve(u, rows, signs * found / weights.sum(), free) if solved else np.nan

    @property
    def _prompts(self) -> int:
        return 1 if self.problem.over == "mean" else len(self.problem.V0)

    def _constraints(self, u: np.ndarray) -> np.ndarray:
        """Gradients of the criteria as they are stated, one row per constraint and prompt."""
        problem = self.problem
        rows = [each.slope for constraint in problem.constraints for each in problem.criterion(constraint.criterion, u)]
        return np.array(rows).reshape(-1, len(u))

    def _goal(self, u: np.ndarray) -> np.ndarray:
        found = self.problem.objectives(u)
        return min(found, key=lambda each: each.value).slope

    def _solve(self, u: np.ndarray, rows: np.ndarray, weights: np.ndarray, free: np.ndarray) -> np.ndarray:
        """du/db from the linearised conditions; the Hessian is needed only where constraints do not fix u."""
        count = len(rows)
        if count >= free.sum():
            return np.linalg.pinv(rows)
        hessian = np.zeros((free.sum(),) * 2)
        for number, coordinate in enumerate(np.flatnonzero(free)):
            change = np.zeros(len(u))
            change[coordinate] = DIFFERENCE
            high, low = (self._goal(x) + weights @ self._constraints(x)[self.active] for x in (u + change, u - change))
            hessian[:, number] = (high - low)[free] / (2 * DIFFERENCE)
        hessian = (hessian + hessian.T) / 2
        system = np.block([[hessian, rows.T], [rows, np.zeros((count, count))]])
        right = np.concatenate([np.zeros((len(hessian), count)), np.eye(count)])
        return np.linalg.lstsq(system, right)[0][: len(hessian)]
