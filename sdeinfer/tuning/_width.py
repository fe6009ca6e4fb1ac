"""Search at width n: the limit's criteria, moved by what networks of this width have beyond the limit."""

import dataclasses

import numpy as np
from jaxtyping import Float, PRNGKeyArray

from sdeinfer.tuning._problem import Law, Problem
from sdeinfer.tuning._search import FEASIBLE, Found, polish, search

ROUNDS, SETTLED = 4, 0.1
"""Largest number of corrections, and the change of a criterion, in Monte Carlo errors, below which none is made."""


def settled(problem: Problem, found: Found) -> tuple[Problem, Found]:
    """Move the criteria of the limit to those of networks of width n at a solution, and search near it, until settled.

    Networks have no derivatives; what they add changes little with the parameters, so that the derivatives of the limit
    are good enough to find the answer, whose criteria are those of networks.

    Returns:
        the problem whose criteria are moved, and its solution.
    """
    evaluations = found.evaluations
    for _ in range(ROUNDS):
        moved, changed = at_width(problem, found.u)
        if not changed:
            break
        problem, found = moved, polish(moved, found.u)
        if found.violation > FEASIBLE:
            found = search(moved)
        evaluations += max(found.evaluations, moved.evaluations)
    return problem, found._replace(evaluations=evaluations)


def at_width(problem: Problem, u: Float[np.ndarray, " coordinates"]) -> tuple[Problem, bool]:
    """The problem by the limit, whose criteria are moved to those of networks of width n at free coordinates.

    Parameters from a posterior have their medians where the two are compared.

    Returns:
        the problem, and whether one of its criteria changes by more than `SETTLED`.
    """
    limit, drawn = problem, problem.space.drawn
    if drawn:
        medians = {name: np.median(x) if name in drawn else x for name, x in problem.fixed.items()}
        limit = dataclasses.replace(problem, space=dataclasses.replace(problem.space, drawn=()), fixed=medians)
    networks, u = dataclasses.replace(limit, law="finite-width", offsets={}), limit.with_nearest_depth(u)
    offsets, changed = {}, False
    for criterion in problem.compared:
        # The samples of the search are still known to `limit`, whose criteria are moved already.
        pairs = zip(networks.criterion(criterion, u), limit.criterion(criterion, u), strict=True)
        moves = np.array([of_networks.value - of_limit.value for of_networks, of_limit in pairs])
        errors = np.array([each.error for each in networks.estimates(criterion, u)])
        offsets[criterion] = tuple((moves + problem.offset(criterion)).tolist())
        changed |= bool((np.abs(moves) > SETTLED * errors).any())
    return dataclasses.replace(problem, offsets=offsets), changed


def on_new_samples(
    problem: Problem, u: Float[np.ndarray, " coordinates"], law: Law, *, paths: int, key: PRNGKeyArray
) -> Problem:
    """The problem on new networks of width n, or on new paths with half the step, for values at free coordinates.

    With parameters from a posterior, networks move the values of paths.
    """
    fresh = dataclasses.replace(problem, key=key, step=problem.finer_step, paths=paths)
    if law == "limit":
        return fresh
    return at_width(fresh, u)[0] if fresh.space.drawn else dataclasses.replace(fresh, law=law, offsets={})
