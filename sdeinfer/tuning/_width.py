"""Search at width n: the limit's criteria, moved by what networks of this width have beyond the limit."""

import dataclasses

import numpy as np
from jaxtyping import Float, PRNGKeyArray

from sdeinfer._files import InputError
from sdeinfer.tuning._chains import without_tangents
from sdeinfer.tuning._problem import Law, Problem
from sdeinfer.tuning._search import FEASIBLE, Found, polish, search
from sdeinfer.tuning._space import DEPTH

ROUNDS, SETTLED = 4, 0.1
"""Largest number of corrections, and the change of a criterion, in Monte Carlo errors, below which none is made."""

NEARLY = 0.01
"""Violation of a scaled constraint, by networks, up to which corrections that go on are good enough."""


def settled(problem: Problem, found: Found) -> tuple[Problem, Found]:
    """Move the criteria of the limit to those of networks of width n at a solution, and search near it, until settled.

    What networks add changes little with the parameters, so that the derivatives of the limit are good enough to find
    the answer, whose criteria are those of networks. Where it changes much, as where some networks explode, the search
    is one by networks alone, with their own derivatives.

    Returns:
        the problem whose criteria are moved, or that of networks, and its solution.
    """
    evaluations = found.evaluations
    for _ in range(ROUNDS):
        moved, changed = at_width(problem, found.u)
        if not changed:
            return problem, found._replace(evaluations=evaluations)
        problem, found = moved, polish(moved, found.u)
        evaluations += max(found.evaluations, moved.evaluations)
        if found.violation > FEASIBLE:
            break
    meets = found.violation <= FEASIBLE and at_width(problem, found.u)[0].violation(found.u) <= NEARLY
    if not meets and has_slopes(problem):
        problem = dataclasses.replace(problem, law="finite-width", chain_slopes=True, offsets={})
    if not meets:
        found = search(problem)
        evaluations += found.evaluations
    return problem, found._replace(evaluations=evaluations)


def has_slopes(problem: Problem) -> bool:
    """Whether the criteria of networks have derivatives: exact chains by all parameters that are free."""
    free_depth, drawn = DEPTH in problem.space.names, problem.space.drawn
    return not free_depth and not drawn and len(without_tangents(problem.statistics)) == len(problem.statistics)


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

    Raises:
        InputError: for more paths than parameters were drawn for.
    """
    if problem.space.drawn and paths > problem.paths:
        raise InputError(f"paths: the posterior was drawn for {problem.paths}, got {paths}")
    fresh = dataclasses.replace(problem, key=key, step=problem.finer_step, paths=paths)
    if law == "limit":
        return fresh
    return at_width(fresh, u)[0] if fresh.space.drawn else dataclasses.replace(fresh, law=law, offsets={})
