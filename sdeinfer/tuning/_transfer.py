"""Promises of a tuned layer against networks of other widths and depths."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.random as jr
import numpy as np
import pandas as pd
from jaxtyping import Array, PRNGKeyArray

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer._progress import phase, with_progress_line
from sdeinfer.criteria import Constraint
from sdeinfer.layers import AbstractLayer, OverDepth, has_chain
from sdeinfer.networks import check_chain_width
from sdeinfer.tuning._chains import Networks, without_tangents
from sdeinfer.tuning._search import polish
from sdeinfer.tuning._space import DEPTH
from sdeinfer.tuning._tuned import Tuned
from sdeinfer.tuning._width import settled

RULES = {"constant": 0.0, "d^-1/2": -0.5, "d^-1": -1.0}
"""Exponents of the depth in the rules that people use for γ."""


@dataclasses.dataclass(frozen=True, eq=False)
class Transfer:
    """Criteria of a tuned layer at other widths and depths.

    Attributes:
        criteria: one row per width, depth, criterion and prompt: `promised`, the value by the law of the tuning;
            `chain` and `weights`, the values of networks, drawn as exact chains and with their weights (NaN where these
            cannot be); each with its Monte Carlo error; and whether the promised value and that of the chain meet the
            bound.
        rules: one row per width and depth: γ tuned for it, and γ by each rule from the tuned one, with the least slack
            of the constraints that each leaves, in units of the scaled constraints (negative where one fails). None
            if γ is not free or changes with depth, or if the depth is free. Tuning changes all free parameters, the
            rules γ only.
    """

    criteria: pd.DataFrame
    rules: pd.DataFrame | None

    def plot(self, *, axes: Any = None) -> list[Any]:
        """Plot each criterion over the depth, and the rules, in a panel each.

        Arguments:
            axes: where to plot, one for each criterion and one for the rules; None for a new figure.
        """
        from sdeinfer.tuning._transfer_figure import plot_transfer  # loads Matplotlib

        return plot_transfer(self, axes=axes)


@checked
@with_progress_line
def transfer(
    tuned: Tuned,
    *,
    widths: Sequence[int],
    depths: Sequence[int],
    networks: int = 2000,
    with_weights: int = 64,
    rules: bool = True,
    progress: bool = False,
    key: PRNGKeyArray,
) -> Transfer:
    """Measure the criteria of a tuned layer on networks of some widths and depths.

    At the width and depth of the tuning `promised` is what it promised; elsewhere it is what its law predicts for the
    same parameters: other exact chains, or the SDE at T = depth/width. Parameters from a posterior have their medians,
    here and in the networks. Parameters over depth are stretched to the new T.

    Arguments:
        tuned: the result of `tune`.
        widths: widths n.
        depths: depths d.
        networks: number of networks without weights, as exact chains; statistics of tangents have no chain.
        with_weights: number of networks with weights; 0 for none.
        rules: whether to tune γ for every width and depth, and to set it beside γ constant, ∝ d^{−1/2} and ∝ d^{−1}.
        progress: show the phase of the work.
        key: PRNG key.

    Raises:
        InputError: for widths that the layer does not allow, and for numbers that are not positive.
    """
    del progress  # for `with_progress_line`
    for name, sizes in {"widths": widths, "depths": depths}.items():
        if not len(sizes) or min(sizes) < 1:
            raise InputError(f"{name}: positive numbers are needed, got {list(sizes)}")
    if networks < 2 or with_weights < 0 or with_weights == 1:
        raise InputError("networks: at least 2 are needed, and 0 or at least 2 with weights")
    by_chain = has_chain(tuned.layer) and bool(without_tangents(tuned.problem.statistics))
    for width in widths if by_chain else ():
        check_chain_width(tuned.layer, tokens=tuned.V0.shape[-1], width=width)
    rows, by_rule = [], []
    for number, (width, depth) in enumerate((n, d) for n in widths for d in depths):
        phase(f"networks of width {width} and depth {depth}")
        own = jr.fold_in(key, number)
        layer = stretched(tuned.layer, tuned.depth / tuned.width, depth / width)
        rows += _rows(tuned, layer, width, depth, networks, with_weights, own)
        if rules and "gamma" in tuned.values and DEPTH not in tuned.values and not tuned.problem.space.over_depth:
            by_rule.append(_rules_at(tuned, width, depth))
    index = ["width", "depth", "criterion"]
    return Transfer(pd.DataFrame(rows).set_index(index), pd.DataFrame(by_rule) if by_rule else None)


def _rows(
    tuned: Tuned, layer: AbstractLayer, width: int, depth: int, networks: int, with_weights: int, key: PRNGKeyArray
) -> list[dict[str, Any]]:
    problem, rows = tuned.problem, []
    step, found = min(problem.finer_step, 1 / width), []
    promised = Networks.at_width if tuned.law == "finite-width" else Networks.by_limit
    for V0, own in zip(tuned.V0, jr.split(key, (len(tuned.V0), 3)), strict=True):
        here = Networks(problem.statistics, layer, V0, width, depth)
        found.append(
            {
                "promised": promised(here, problem.paths, step, own[0]),
                "chain": here.by_chain(networks, own[1]),
                "weights": here.with_weights(with_weights, own[2]),
            }
        )
    goals: list[tuple[Any, Constraint | None]] = [(each.criterion, each) for each in problem.constraints]
    goals += [] if isinstance(problem.objective, str) else [(problem.objective, None)]
    for criterion, constraint in goals:
        for prompt, each in enumerate(found):
            name = str(criterion if constraint is None else constraint)
            name += f", prompt {prompt}" if len(found) > 1 else ""
            bound = math.nan if constraint is None else constraint.bound
            row: dict[str, Any] = {"width": width, "depth": depth, "criterion": name, "bound": bound}
            for source, (values, exploded) in each.items():
                value = error = math.nan
                if criterion.statistic in values:
                    estimate = criterion.estimate(values[criterion.statistic], exploded)
                    value, error = estimate.value, estimate.error
                row |= {source: value, f"{source}_error": error}
                if constraint is not None and source != "weights":
                    slack = constraint.sign * (value - constraint.bound)
                    row[f"{source}_holds"] = bool(slack >= 0) if np.isfinite(slack) else None
            rows.append(row)
    return rows


def _rules_at(tuned: Tuned, width: int, depth: int) -> dict[str, Any]:
    """γ tuned for a width and a depth, and by the rules; with the least slack of the constraints under each."""
    problem, u = dataclasses.replace(tuned.problem, width=width, depth=float(depth), offsets={}), tuned.u
    found = polish(problem, u)
    if tuned.law == "finite-width" and not problem.chain_slopes:
        problem, found = settled(problem, found)
    if tuned.law == "finite-width" and not problem.space.drawn:
        # Rules may be far from the answer: their slacks are those of networks of their own.
        problem = dataclasses.replace(problem, law="finite-width", offsets={})
    names, best = problem.space.names, found.u
    gamma = names.index("gamma")
    row: dict[str, Any] = {"width": width, "depth": depth, "tuned": problem.named(best)["gamma"]}
    row["tuned_slack"] = _least_slack(problem, best)
    free = next(each for each in problem.space.free if each.name == "gamma")
    for rule, exponent in RULES.items():
        value = min(tuned.values["gamma"] * (depth / tuned.depth) ** exponent, free.high)
        moved = np.array(u)
        moved[gamma] = free.to_real(value)
        row |= {rule: value, f"{rule}_slack": _least_slack(problem, moved)}
    return row


def _least_slack(problem: Any, u: np.ndarray) -> float:
    return min((each.value for each in problem.residuals(u)), default=math.nan)


class Stretched(eqx.Module):
    """A function of depth-time, at a multiple of its argument."""

    profile: Any
    ratio: float

    def __call__(self, time: Any) -> Array:
        """The value at `ratio` times the depth-time."""
        return self.profile(time * self.ratio)


def stretched(layer: AbstractLayer, time: float, new_time: float) -> AbstractLayer:
    """The layer with its functions of depth-time stretched from [0, time] to [0, new_time]."""
    if not isinstance(layer, OverDepth) or math.isclose(time, new_time):
        return layer
    return OverDepth(layer.layer, **{name: Stretched(each, time / new_time) for name, each in layer.profiles.items()})
