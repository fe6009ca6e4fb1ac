"""Choose the parameters of a layer by gradient, for stated properties of its networks at initialisation."""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.random as jr
import numpy as np
from jaxtyping import ArrayLike, PRNGKeyArray

from sdeinfer._arguments import at_least_one, checked
from sdeinfer._files import InputError
from sdeinfer._progress import phase, with_progress_line
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.blocks.reading._of import network_of
from sdeinfer.covariance._matrix import validate_covariance
from sdeinfer.criteria import AbstractCriterion, Constraint, Probability
from sdeinfer.layers import AbstractLayer, OverDepth, Stack, template
from sdeinfer.layers._base import has_limit
from sdeinfer.layers._over_depth import Profile
from sdeinfer.networks._chain import check_chain_width
from sdeinfer.passes._models import is_network
from sdeinfer.tuning._answer import answer
from sdeinfer.tuning._free import fixed_values, space_of, with_parts
from sdeinfer.tuning._problem import Law, Problem
from sdeinfer.tuning._search import FEASIBLE, Solution, search
from sdeinfer.tuning._tuned import Tuned

MOST_EXPLODED = 0.05
"""Largest share of paths that explode for criteria other than probabilities."""


@checked
@with_progress_line
def tune(
    architecture: Any,
    V0: Any = None,
    *,
    depth: int | None = None,
    width: int | None = None,
    maximise: str | AbstractCriterion | None = None,
    minimise: str | AbstractCriterion | None = None,
    subject_to: Constraint | Sequence[Constraint] = (),
    fixed: Mapping[str, ArrayLike | Profile] | None = None,
    bounds: Mapping[str, tuple[float, float]] | None = None,
    knots: Mapping[str, int] | None = None,
    law: Law = "finite-width",
    paths: int = 4096,
    step: float | None = None,
    progress: bool = True,
    key: PRNGKeyArray,
) -> Tuned:
    """Choose parameters of a layer so that networks of some width and depth have stated properties.

    Criteria are estimated on paths of the covariance SDE over T = depth/width, with the same random numbers at all
    parameters, and have exact derivatives along the paths. SLSQP finds the optimum. By the law of finite width,
    criteria are then moved to those of networks of width n, drawn as exact chains, and the search goes on until they
    agree. Values and errors in the result are those of fresh networks. The largest γ under two bounds::

        largest = si.tune(
            "transformer", V0, width=256, depth=64, maximise="gamma", fixed={"tau0": 1.0, "c_gap": 1.0}, key=key,
            subject_to=[probability(NormFactor(), below=2) >= 0.95, quantile(LargestCorrelation(), 0.95) <= 0.9],
        )

    Of a model the blocks are read, see `si.blocks.of`, with its sizes and its tokens::

        tuned = si.tune(model, inputs, maximise="strength", subject_to=goals, key=key)

    Arguments:
        architecture: a name, or a layer, whose own parameters do not matter; or a model of PyTorch, Flax or Equinox,
            whose gains and temperatures are fixed unless `bounds` or `knots` name them.
        V0: covariance of the tokens at layer 0, shape (m, m); or of several prompts, shape (prompts, m, m), for the
            worst of which goals hold; of a model its inputs, see `si.audit`.
        depth: number of layers d; of a model None.
        width: n; of a model None.
        maximise: a criterion, or the name of a free parameter; with knots, its mean over depth.
        minimise: the same, to be minimised; exactly one of the two is needed.
        subject_to: constraints, `criterion <= bound` or `criterion >= bound`.
        fixed: values of parameters that are not free, by name; or functions of depth-time, as in `OverDepth`. All other
            parameters are free: γ, τ0 and the gap c₊ − c₋, on which the limit depends. With neither c₊ nor c₋ fixed
            their mean is 0.
        bounds: lowest and highest value of free parameters, by name.
        knots: number of values over depth of free parameters, by name; linear in between.
        law: "finite-width", networks of width n; or "limit", the SDE alone. Criteria of layers
            without a chain, and of gradients with fewer than 4m columns a head, are always those of the limit.
        paths: number of paths of each prompt, and of networks.
        step: longest step in depth-time of a solver of weak order 2; None for 0.01, or for 1/64 of the depth-time if
            that is longer, since parameters are smaller where networks are deeper. At most 1/n, a layer, for statistics
            of every step. By the limit fresh paths have half of it, so that a step which is too long shows in
            `Tuned.missed`.
        progress: whether a line on a terminal or in a notebook says what is done, after two seconds.
        key: PRNG key.

    Raises:
        InputError: for goals that cannot be attained, with the nearest that can; for invalid arguments; and for
            statistics without finite derivatives.
    """
    del progress  # for `with_progress_line`
    began = time.perf_counter()
    if _is_model(architecture):
        model = network_of(architecture, V0)
        architecture, V0, depth, width = model.stack, model.V0, model.depth, model.width
        fixed = with_shapes(model.stack, fixed or {}, free=[*(bounds or {}), *(knots or {})])
    kind = template(architecture)
    objective, sign = _objective(maximise, minimise)
    if width is None or depth is None:
        raise InputError(f"{'width' if width is None else 'depth'}: a whole number is needed")
    at_least_one(width=width, depth=depth, paths=paths)
    if law not in ("finite-width", "limit"):
        raise InputError(f"law: must be 'finite-width' or 'limit', got {law!r}")
    fixed, named = with_parts(kind, fixed or {}), objective if isinstance(objective, str) else None
    stated = Problem(
        space=space_of(kind, fixed=fixed, objective=named, bounds=bounds or {}, knots=knots or {}),
        fixed=fixed_values(kind, fixed),
        V0=_prompts(V0),
        width=width,
        depth=depth,
        objective=objective,
        sign=sign,
        constraints=_constraints(subject_to),
        paths=paths,
        step=max(0.01, depth / width / 64) if step is None else step,
        key=jr.fold_in(key, 0),
        law=law,
    )
    problem = _with_law(_checked(stated))
    phase("tuning")
    solved, solution = search(problem)
    fresh = solved.fresh(problem.law, paths=paths, key=jr.fold_in(key, 1))
    _check_solution(fresh, solution)
    return answer(solved, fresh, solution, began)


def _is_model(architecture: Any) -> bool:
    named = isinstance(architecture, type) and issubclass(architecture, AbstractLayer)
    return is_network(architecture) and not named and not isinstance(architecture, AbstractLayer)


def with_shapes(
    stack: Stack, fixed: Mapping[str, ArrayLike | Profile], *, free: Sequence[str]
) -> dict[str, ArrayLike | Profile]:
    """Fixed values, and a model's gains and temperatures that are neither fixed nor free, of one branch or of all."""
    stated = {*fixed, *free}
    shapes = BlockOrder.of(stack, depth=1).shapes
    return {**{k: v for k, v in shapes.items() if not {k, k.partition(".")[2]} & stated}, **fixed}


def _with_law(problem: Problem) -> Problem:
    """The problem with the law of its criteria: the limit's for those without a chain.

    That of a layer without a limit, as of blocks, is about networks of width n from the start.
    """
    kind, limit = problem.space.kind, has_limit(problem.space.kind)
    if not limit:
        needs = {
            "law: that of the limit": problem.law == "limit",
            "subject_to: a statistic of gradients": any(
                statistic.directions is not None for statistic in problem.statistics
            ),
            "architecture: tuning": not problem.of_chains,
        }
        for need in (need for need, asked in needs.items() if asked):
            raise InputError(f"{need} needs the layer's limit, and {kind.name} has none")
    if problem.law == "limit" or not problem.of_chains:
        return dataclasses.replace(problem, law="limit")
    layer = problem.layer(problem.space.start())
    check_chain_width(layer, tokens=problem.V0.shape[-1], width=problem.width)
    return dataclasses.replace(problem, chain_slopes=not limit)


def _constraints(subject_to: Any) -> tuple[Constraint, ...]:
    several = isinstance(subject_to, Sequence) and not isinstance(subject_to, str)
    constraints: tuple[Any, ...] = tuple(subject_to) if several else (subject_to,)
    for constraint in constraints:
        if not isinstance(constraint, Constraint):
            raise InputError(
                f"subject_to: a constraint, such as expectation(statistic) <= 1, is needed; got {constraint!r}"
            )
    return constraints


def _checked(problem: Problem) -> Problem:
    """The problem, if it is defined, with steps of at most a layer for statistics of every step."""
    objective, names = problem.objective, [parameter.name for parameter in problem.space.free]
    if isinstance(objective, str) and objective not in names:
        raise InputError(f"objective: {objective} is not free; free are {', '.join(names)}")
    if isinstance(objective, str) and not problem.constraints:
        raise InputError(f"subject_to: without a constraint nothing limits {objective}")
    for statistic in problem.statistics:
        statistic.check(problem.V0.shape[-1])
    if any(quantity.every_step for quantity in problem.statistics):
        problem = dataclasses.replace(problem, step=min(problem.step, 1 / problem.width))
    example = problem.layer(problem.space.start())
    example.check_width(problem.width)
    if isinstance(example, OverDepth):
        ends = np.asarray(problem.grid.steps) * problem.time
        example.check_range((ends[1:] + ends[:-1]) / 2)
    return problem


def _prompts(V0: ArrayLike) -> np.ndarray:
    shapes = [np.shape(V) for V in V0] if isinstance(V0, list | tuple) else []
    if len(set(shapes)) > 1:
        raise InputError(f"V0: prompts of one number of tokens are needed, got shapes {', '.join(map(str, shapes))}")
    array = np.asarray(V0)
    if array.ndim not in (2, 3) or not array.size:
        raise InputError(f"V0: shape (m, m) or (prompts, m, m) is needed, got {array.shape}")
    prompts = [validate_covariance(V) for V in (array if array.ndim == 3 else array[None])]
    return np.stack([V.astype(jax.dtypes.canonicalize_dtype(V.dtype)) for V in prompts])


def _objective(maximise: Any, minimise: Any) -> tuple[str | AbstractCriterion, int]:
    if (maximise is None) == (minimise is None):
        raise InputError("maximise: give either maximise or minimise")
    objective, sign = (maximise, 1) if minimise is None else (minimise, -1)
    if not isinstance(objective, str | AbstractCriterion):
        raise InputError(f"maximise: the name of a parameter or a criterion is needed, got {objective!r}")
    return objective, sign


def _check_solution(problem: Problem, solution: Solution) -> None:
    """Raise an InputError for goals that cannot be had; and where paths explode, unless all are events.

    An event does not count if its path explodes. Other criteria see a path as it was before.
    """
    u = solution.u
    place = ", ".join(f"{name} = {value:.3g}" for name, value in problem.named(u).items())
    if solution.violation > FEASIBLE:
        nearest = []
        for constraint in problem.constraints:
            values = [estimate.value for estimate in problem.estimates(constraint.criterion, u)]
            value, sense = (min(values), "≥") if constraint.sign > 0 else (max(values), "≤")
            nearest.append(f"{constraint.criterion} = {value:.3g} (asked {sense} {constraint.bound:g})")
        ends = problem.space.at_end(u)
        place += " (the end of its box, see bounds)" if len(ends) == 1 and ends[0] else ""
        raise InputError(f"subject_to: these cannot all be had; the nearest is {'; '.join(nearest)}, at {place}")
    criteria = [criterion for criterion in problem.criteria if not isinstance(criterion, Probability)]
    share = problem.exploded(u)
    if criteria and share > MOST_EXPLODED:
        raise InputError(
            f"{criteria[0]}: {share:.0%} of paths explode at {place}; add a probability to subject_to, or set bounds"
        )
