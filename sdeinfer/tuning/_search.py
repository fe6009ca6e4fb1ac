"""Search: a coarse scan for starts, then sequential quadratic programming with exact gradients of the sample.

Tests: `tests/tuning/test_problem.py`.
"""

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

SCAN_PATHS = 512
"""Networks at each point of the scan; fewer where V is large."""

REACH = 0.5
"""Largest change of a coordinate on the real line in a short run of SLSQP.

Of 24 problems one needs short runs, γ at τ0 = 0.02: longer ones end where every path explodes and slopes are 0
(`test_explosions_are_no_success`). In the place of long ones they take 1,236 evaluations, not 71, for γ over depth.
"""

PRECISION = 1e-5
"""Relative change of the objective at which the search ends."""


class Solution(NamedTuple):
    """A solution: free coordinates, the largest violation of a scaled constraint, and how SLSQP found it."""

    u: Float[np.ndarray, " coordinates"]
    violation: float
    iterations: int
    evaluations: int
    message: str
    converged: bool


def search(problem: Problem) -> tuple[Problem, Solution]:
    """Maximise the objective under the constraints; if no point meets them, find the one that violates them least.

    If chains have no derivatives, SLSQP first solves the problem on paths. At the solution the difference of chains and
    paths is added to each criterion, and SLSQP runs again from there, until these differences no longer change. Where
    they change much with the parameters, as where some networks explode, chains are searched with derivatives of their
    own. The result is the problem at whose optimum the search ended, and its solution.
    """
    if problem.law == "limit" or problem.chain_slopes:
        return problem, _optimum(problem)
    searched = dataclasses.replace(problem, law="limit")
    solution = _optimum(searched)
    evaluations = solution.evaluations
    for _ in range(4):
        moved, changed = _moved(searched, solution.u)
        if not changed:
            return searched, solution._replace(evaluations=evaluations)
        searched, solution = moved, _slsqp(moved, solution.u)
        evaluations += max(solution.evaluations, moved.evaluations)
        if solution.violation > FEASIBLE:
            break
    # A violation of a hundredth is good enough where moves go on.
    if solution.violation > FEASIBLE or _moved(searched, solution.u)[0].violation(solution.u) > 0.01:
        searched = dataclasses.replace(problem, chain_slopes=True)
        solution = _optimum(searched)
        evaluations += solution.evaluations
    return searched, solution._replace(evaluations=evaluations)


def _moved(problem: Problem, u: Float[np.ndarray, " coordinates"]) -> tuple[Problem, bool]:
    """Criteria of paths moved to those of chains, and whether one changes by a tenth of its Monte Carlo error."""
    chains = dataclasses.replace(problem, law="finite-width", offsets={})
    offsets, changed = {}, False
    for criterion in problem.compared:
        # The samples of the search are still known to the problem, whose criteria are moved already.
        pairs = zip(chains.criterion(criterion, u), problem.criterion(criterion, u), strict=True)
        moves = np.array([of_chains.value - of_paths.value for of_chains, of_paths in pairs])
        errors = np.array([estimate.error for estimate in chains.estimates(criterion, u)])
        offsets[criterion] = moves + problem.offset(criterion)
        changed |= bool((np.abs(moves) > 0.1 * errors).any())
    return dataclasses.replace(problem, offsets=offsets), changed


def _optimum(problem: Problem) -> Solution:
    """The optimum over the whole box: that near the first of the starts from which the constraints can be met."""
    points = _scanned(problem)
    solutions = []
    for start in points[:3]:
        solutions.append(_local_optimum(problem, start))
        if solutions[-1].violation <= FEASIBLE:
            break
    solution = min(solutions, key=lambda solution: solution.violation)
    if solution.violation > FEASIBLE:
        nearest = _slsqp(problem, solution.u, elastic=True)
        solution = min((solution, nearest), key=lambda solution: solution.violation)
        if nearest.violation <= FEASIBLE:
            optimum = _local_optimum(problem, nearest.u)
            solution = optimum if optimum.violation <= FEASIBLE else nearest
    return solution._replace(evaluations=len(points) + problem.evaluations)


def _local_optimum(problem: Problem, start: Float[np.ndarray, " coordinates"]) -> Solution:
    """The optimum near a start: by SLSQP in the whole box, and if that violates a constraint, by short runs of it."""
    solution = _slsqp(problem, start)
    if solution.violation <= FEASIBLE:
        return solution
    short = _slsqp(problem, start, reach=REACH)
    for _ in range(20):
        if short.violation > FEASIBLE or np.abs(short.u - start).max() < 0.99 * REACH:
            break
        start = short.u
        further = _slsqp(problem, start, reach=REACH)
        if further.violation > FEASIBLE:
            break
        short = further
    return min((solution, short), key=lambda solution: solution.violation)


def _worst(problem: Problem, u: Float[np.ndarray, " coordinates"]) -> float:
    """The objective of the prompt for which it is worst."""
    return min(goal.value for goal in problem.objectives(u))


def _scanned(problem: Problem) -> list[Float[np.ndarray, " coordinates"]]:
    """The start, the ends of the box and points spread over it, in the order of violations and objectives."""
    bounds, start = problem.space.bounds(), problem.space.start()
    size = len(bounds)
    paths = max(8, min(SCAN_PATHS, problem.paths, SCAN_PATHS * 32**2 // problem.V0[0].size))
    coarse = dataclasses.replace(problem, paths=paths)
    ends = [np.where(np.arange(size) == number, end, start) for number in range(size) for end in bounds[number]]
    sobol = qmc.Sobol(size, rng=0).random(32 if size > 1 else 8)
    points = [start, *ends, *(bounds[:, 0] + sobol * (bounds[:, 1] - bounds[:, 0]))]
    scores = []
    for number, u in enumerate(points):
        try:
            scores.append((coarse.violation(u) + coarse.exploded(u), -_worst(coarse, u)))
        except InputError:
            # Statistics may overflow in a corner of the box, but must be finite at the start.
            if number == 0:
                raise
            scores.append((np.inf, np.inf))
    return [points[number] for number in sorted(range(len(points)), key=lambda number: scores[number])]


def _slsqp(
    problem: Problem, start: Float[np.ndarray, " coordinates"], *, elastic: bool = False, reach: float = np.inf
) -> Solution:
    """The optimum within reach of a start by SLSQP; with `elastic`, minimise the largest violation, not the objective.

    A further variable s is the violation; or −s is a lower bound on the objectives of several prompts.
    """
    bounds = np.clip(problem.space.bounds(), start[:, None] - reach, start[:, None] + reach)
    several = not elastic and len(problem.objectives(start)) > 1
    extra = elastic or several
    size = len(start)
    # The size of a parameter may change by orders of magnitude on the way.
    logs = any(parameter.low > 0 for parameter in problem.space.free if parameter.name == problem.objective)

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
        residuals = problem.residuals(x[:size])
        extra_slack, extra_slope = (x[-1], 1.0) if elastic else (0.0, 0.0)
        # With exact slopes SLSQP's merit function may be flat on the way back to a violated bound. E tr V ≤ 3.3
        # (`test_problem.py`) takes 268 evaluations with exact slopes, 139 with these; γ at τ0 = 0.02 takes 20 and 355.
        rows = [(residual.value + extra_slack, 0.9 * residual.slope, extra_slope) for residual in residuals]
        if several:
            rows += [(objective.value + x[-1], objective.slope, 1.0) for objective in problem.objectives(x[:size])]
        values = np.array([value for value, _, _ in rows])
        jacobian = np.array([np.append(slope, extra_slope) if extra else slope for _, slope, extra_slope in rows])
        return values, jacobian.reshape(len(rows), -1)

    x0, limits = np.array(start), [tuple(pair) for pair in bounds]
    if extra:
        s0 = problem.violation(start) if elastic else -_worst(problem, start)
        x0, limits = np.append(x0, s0), [*limits, (0.0, None) if elastic else (None, None)]
    scale = max(abs(goal(x0)[0]), 1e-3) if not extra and not logs else 1.0
    result = optimize.minimize(
        lambda x: goal(x)[0] / scale,
        x0,
        jac=lambda x: goal(x)[1] / scale,
        bounds=limits,
        constraints=[{"type": "ineq", "fun": lambda x: slacks(x)[0], "jac": lambda x: slacks(x)[1]}]
        if problem.constraints or several
        else [],
        method="SLSQP",
        options={"ftol": PRECISION, "maxiter": 40},
    )
    u = np.clip(result.x[:size], bounds[:, 0], bounds[:, 1])
    return Solution(u, problem.violation(u), int(result.nit), 0, str(result.message), bool(result.success))
