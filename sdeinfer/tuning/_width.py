"""Search at width n: the limit's criteria, moved by what networks of this width have beyond the limit."""

import dataclasses

import numpy as np
from jaxtyping import Float, PRNGKeyArray

from sdeinfer.tuning._problem import Law, Problem
from sdeinfer.tuning._search import FEASIBLE, Found, polish, search

ROUNDS, SETTLED = 4, 0.1
"""Largest number of corrections, and the change of a criterion, in Monte Carlo errors, below which none is made."""


def search_at_width(problem: Problem) -> tuple[Problem, Found]:
    """Search by the limit; then move its criteria to those of networks of width n at the answer, and search near it.

    Networks have no derivatives; what they add changes little with the parameters, so that the derivatives of the limit
    are good enough to find the answer, whose criteria are those of networks.

    Returns:
        the problem whose criteria are moved, and its solution.
    """
    found = search(problem)
    evaluations = found.evaluations
    for _ in range(ROUNDS):
        moved, change = at_width(problem, found.u)
        if change < SETTLED:
            break
        problem, found = moved, polish(moved, found.u)
        if found.violation > FEASIBLE:
            found = search(moved)
        evaluations += max(found.evaluations, moved.evaluations)
    return problem, found._replace(evaluations=evaluations)


def at_width(problem: Problem, u: Float[np.ndarray, " coordinates"]) -> tuple[Problem, float]:
    """The problem by the limit, whose criteria are moved to those of networks of width n at free coordinates.

    Parameters from a posterior have their medians where the two are compared.

    Returns:
        the problem, and the largest change of its criteria, in Monte Carlo errors.
    """
    fixed = {name: np.median(x) if name in problem.space.drawn else x for name, x in problem.fixed.items()}
    space = dataclasses.replace(problem.space, drawn=())
    limit = dataclasses.replace(problem, space=space, fixed=fixed, offsets={})
    networks, u = dataclasses.replace(limit, law="finite-width"), limit.with_nearest_depth(u)
    offsets, change = {}, 0.0
    for criterion in problem.compared:
        pairs = zip(networks.criterion(criterion, u), limit.criterion(criterion, u), strict=True)
        offsets[criterion] = tuple(of_networks.value - of_limit.value for of_networks, of_limit in pairs)
        before, errors = problem.offset(criterion), [each.error for each in networks.estimates(criterion, u)]
        moves = np.abs(np.subtract(offsets[criterion], before))
        change = max(
            change, *(move / error if error else np.inf * bool(move) for move, error in zip(moves, errors, strict=True))
        )
    return dataclasses.replace(problem, offsets=offsets), change


def on_new_samples(
    problem: Problem, u: Float[np.ndarray, " coordinates"], law: Law, *, paths: int, key: PRNGKeyArray
) -> Problem:
    """The problem on new networks of width n, or on new paths with half the step, for values at free coordinates.

    With parameters from a posterior, networks move the values of paths.
    """
    fresh = dataclasses.replace(problem.with_fresh_paths(key, problem.finer_step), paths=paths)
    if law == "limit":
        return fresh
    return at_width(fresh, u)[0] if fresh.space.drawn else dataclasses.replace(fresh, law=law, offsets={})
