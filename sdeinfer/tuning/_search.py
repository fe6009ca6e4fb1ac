"""Search: a coarse scan for a start, then sequential quadratic programming with exact gradients of the sample."""

import contextlib
import dataclasses
import math
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from scipy import optimize
from scipy.stats import qmc

from sdeinfer._files import InputError
from sdeinfer.tuning._problem import Problem

FEASIBLE = 1e-4
"""Largest violation of a scaled constraint that counts as none."""

SCANNED, SCAN_PATHS = 32, 512
"""Points of the scan, and paths at each of them and of the first search; fewer where V is large."""

NEAR = 0.05
"""Violation, plus share of paths that explode, up to which points of the scan are compared by their objective."""

SHORT, SHORT_SEARCHES = 0.5, 20
"""Largest change of a coordinate on the real line in a search by short steps, and largest number of these searches."""

PRECISION = 1e-5
"""Relative change of the objective at which the search ends."""

LESS = 0.9
"""Factor of the slopes of constraints that SLSQP sees. Its line search weighs a violation by the multiplier: with exact
slopes the way from a violated bound back to it neither gains nor loses, and is tried in ever shorter steps. Slopes of
quantiles are those of a smoothed law, off by some per cent."""


class Found(NamedTuple):
    """A solution.

    Attributes:
        u: the free coordinates.
        violation: the largest violation of a scaled constraint.
        iterations: iterations of SLSQP.
        evaluations: samples drawn, each with its derivatives.
        message: why the search ended.
        converged: whether SLSQP met its tolerance.
    """

    u: Float[np.ndarray, " coordinates"]
    violation: float
    iterations: int
    evaluations: int
    message: str
    converged: bool


def search(problem: Problem) -> Found:
    """Maximise the objective under the constraints; if no point meets them, find the one that violates them least."""
    points, start, feasible = _scan(problem)
    if problem.space.over_depth:
        # Values over depth have local optima; the best constant is a start that is not one of the worse.
        start = _best_constant(problem, start)
    if problem.paths >= 4 * SCAN_PATHS:
        start = polish(dataclasses.replace(problem, paths=SCAN_PATHS), start).u
    found = polish(problem, start)
    if found.violation > FEASIBLE:
        found = min((found, _by_short_steps(problem, start)), key=lambda each: each.violation)
    if found.violation > FEASIBLE:
        nearest = polish(problem, found.u, elastic=True)
        again = polish(problem, nearest.u) if nearest.violation <= FEASIBLE else nearest
        best = min((found, nearest, again), key=lambda each: each.violation)
        found = again if again.violation <= FEASIBLE else best
    if found.violation > FEASIBLE:
        # On few paths another point may have been best, from which no way leads here.
        feasible = _best_that_holds(problem, points)
    if feasible is not None:
        found = _at_least(problem, found, feasible)
    return found._replace(evaluations=len(points) + problem.evaluations)


def _at_least(problem: Problem, found: Found, feasible: np.ndarray) -> Found:
    """The solution, or the optimum near a point of the scan that meets the constraints and is better than it.

    Where a constraint is flat, as a correlation that cannot pass 1, a step along its slope ends anywhere.
    """
    value, other = (_worst(problem, u) for u in (found.u, feasible))
    good = found.violation <= FEASIBLE and other <= value + PRECISION * max(abs(value), 1e-3)
    if good or problem.violation(feasible) > FEASIBLE:
        return found
    again = _by_short_steps(problem, feasible)
    return min(found, again, key=lambda each: (each.violation > FEASIBLE, -_worst(problem, each.u)))


def _best_that_holds(problem: Problem, points: list[np.ndarray]) -> np.ndarray | None:
    """The point with the best objective of those that meet the constraints on all paths; None if none does."""
    held = []
    for u in points:
        with contextlib.suppress(InputError):  # statistics that are not finite, as in a corner of the box
            if problem.violation(u) <= FEASIBLE:
                held.append((_worst(problem, u), u))
    return max(held, key=lambda each: each[0])[1] if held else None


def _worst(problem: Problem, u: np.ndarray) -> float:
    """The objective of the prompt for which it is worst."""
    return min(each.value for each in problem.objectives(u))


def _by_short_steps(problem: Problem, start: np.ndarray) -> Found:
    """The optimum near a start, without steps so long that they end where every path explodes and slopes are 0."""
    found = polish(problem, start, within=SHORT)
    for _ in range(SHORT_SEARCHES):
        if found.violation > FEASIBLE or np.abs(found.u - start).max() < 0.99 * SHORT:
            break
        start = found.u
        found = polish(problem, start, within=SHORT)
    return found


def _best_constant(problem: Problem, start: np.ndarray) -> np.ndarray:
    """The optimum with one value for all knots of each parameter."""
    free = problem.space.free
    knots = [each.knots for each in free]
    firsts = np.cumsum([0, *knots[:-1]])
    constant = dataclasses.replace(problem.space, free=tuple(dataclasses.replace(each, knots=1) for each in free))
    return np.repeat(polish(dataclasses.replace(problem, space=constant), start[firsts]).u, knots)


def _scan(problem: Problem) -> tuple[list[np.ndarray], np.ndarray, np.ndarray | None]:
    """The best of the stated start, the ends of the box and points spread over it, on few paths.

    Returns:
        the points; the best; and the best of those without any violation, if it is another.
    """
    bounds, start = problem.space.bounds(), problem.space.start()
    count = SCANNED if len(bounds) > 1 else SCANNED // 4
    few = dataclasses.replace(
        problem, paths=max(8, min(SCAN_PATHS, problem.paths, SCAN_PATHS * 32**2 // problem.V0[0].size))
    )
    sobol = qmc.Sobol(len(bounds), rng=0).random(count)
    points = [start, *_ends(bounds, start), *(bounds[:, 0] + sobol * (bounds[:, 1] - bounds[:, 0]))]
    scores, violations = [], []
    for number, u in enumerate(points):
        try:
            violation = few.violation(u) + few.exploded(u)
            value = _worst(few, u)
        except InputError:
            # Statistics may overflow in a corner of the box, but must be finite at the start.
            if number == 0:
                raise
            violation, value = np.inf, -np.inf
        scores.append((violation if violation > NEAR else 0.0, -value))
        violations.append(violation)
    best = min(range(len(points)), key=lambda number: scores[number])
    strict = [number for number in range(len(points)) if violations[number] == 0.0]
    strictly = min(strict, key=lambda number: scores[number], default=best)
    return points, points[best], None if strictly == best else points[strictly]


def _ends(bounds: np.ndarray, start: np.ndarray) -> list[np.ndarray]:
    """The start with one parameter at an end of its box."""
    size = len(start)
    return [np.where(np.arange(size) == number, end, start) for number in range(size) for end in bounds[number]]


def polish(
    problem: Problem, start: Float[np.ndarray, " coordinates"], *, elastic: bool = False, within: float = np.inf
) -> Found:
    """The optimum near a start by SLSQP; with `elastic`, minimise the largest violation instead of the objective.

    A further variable s is the violation; or −s is a lower bound on the objectives of several prompts. Each coordinate
    stays `within` a distance from its start.
    """
    bounds = np.clip(problem.space.bounds(), start[:, None] - within, start[:, None] + within)
    several = not elastic and len(problem.objectives(start)) > 1
    extra = elastic or several
    size = len(start)
    # The size of a parameter may change by orders of magnitude on the way.
    logs = any(each.low > 0 for each in problem.space.free if each.name == problem.objective)

    def goal(x: np.ndarray) -> tuple[float, np.ndarray]:
        if extra:
            slope = np.zeros(len(x))
            slope[-1] = 1.0
            return float(x[-1]), slope
        (value,) = problem.objectives(x)
        if logs:
            return -problem.sign * math.log(abs(value.value)), -value.slope / abs(value.value)
        return -value.value, -value.slope

    def slacks(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        found = problem.residuals(x[:size])
        extra_slack, own = (x[-1], 1.0) if elastic else (0.0, 0.0)
        rows = [(each.value + extra_slack, LESS * each.slope, own) for each in found]
        if several:
            rows += [(each.value + x[-1], each.slope, 1.0) for each in problem.objectives(x[:size])]
        values = np.array([value for value, _, _ in rows])
        jacobian = np.array([np.append(slope, own) if extra else slope for _, slope, own in rows])
        return values, jacobian.reshape(len(rows), -1)

    x0, limits = np.array(start), [tuple(pair) for pair in bounds]
    if extra:
        first = problem.violation(start) if elastic else -_worst(problem, start)
        x0, limits = np.append(x0, first), [*limits, (0.0, None) if elastic else (None, None)]
    constraints = {"type": "ineq", "fun": lambda x: slacks(x)[0], "jac": lambda x: slacks(x)[1]}
    scale = max(abs(goal(x0)[0]), 1e-3) if not extra and not logs else 1.0
    result = optimize.minimize(
        lambda x: goal(x)[0] / scale,
        x0,
        jac=lambda x: goal(x)[1] / scale,
        bounds=limits,
        constraints=[constraints] if problem.constraints or several else [],
        method="SLSQP",
        options={"ftol": PRECISION, "maxiter": 40},
    )
    u = np.clip(result.x[:size], bounds[:, 0], bounds[:, 1])
    return Found(u, problem.violation(u), int(result.nit), 0, str(result.message), bool(result.success))
