"""Promises of a tuned layer against networks of other widths and depths."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.random as jr
import numpy as np
import pandas as pd
from jaxtyping import PRNGKeyArray

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer._progress import phase, with_progress_line
from sdeinfer.criteria import Constraint
from sdeinfer.networks._chain import check_chain_width
from sdeinfer.tuning._problem import Problem
from sdeinfer.tuning._tuned import Tuned


@dataclasses.dataclass(frozen=True, eq=False)
class Transfer:
    """Criteria of a tuned layer at other widths and depths.

    Attributes:
        criteria: one row per width, depth, criterion and prompt: `promised`, the value by the law of the tuning;
            `chain` and `weights`, the values of networks, drawn as exact chains and with their weights (NaN where these
            cannot be); each with its Monte Carlo error; and whether the promised value and that of the chain meet the
            bound.
    """

    criteria: pd.DataFrame

    def to_frame(self) -> pd.DataFrame:
        """The table, with width, depth and criterion as columns."""
        return self.criteria.reset_index()


@checked
@with_progress_line
def transfer(
    tuned: Tuned,
    *,
    widths: Sequence[int],
    depths: Sequence[int],
    networks: int = 2000,
    with_weights: int = 64,
    progress: bool = True,
    key: PRNGKeyArray,
) -> Transfer:
    """Measure the criteria of a tuned layer on networks of some widths and depths.

    At the width and depth of the tuning `promised` is what it promised; elsewhere it is what its law predicts for the
    same parameters: other exact chains, or the SDE at T = depth/width, to which parameters over depth are stretched.

    Arguments:
        tuned: the result of `tune`.
        widths: widths n.
        depths: depths d.
        networks: number of networks without weights, as exact chains; gradients have them from a width of 4m a head on.
        with_weights: number of networks with weights; 0 for none.
        progress: whether a line on a terminal or in a notebook says what is done, after two seconds.
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
    if tuned.problem.of_chains:
        for width in widths:
            check_chain_width(tuned.layer, tokens=tuned.V0.shape[-1], width=width)
    rows = []
    for number, (width, depth) in enumerate((n, d) for n in widths for d in depths):
        phase(f"networks of width {width} and depth {depth}")
        problem, keys = tuned.problem.at_size(width, depth), jr.split(jr.fold_in(key, number), 3)
        sources = {
            "promised": problem.fresh(tuned.law, paths=problem.paths, key=keys[0]),
            "chain": problem.fresh("finite-width", paths=networks, key=keys[1]),
            "weights": problem.fresh("weights", paths=with_weights, key=keys[2]),
        }
        rows += _rows(problem, sources, tuned.u)
    return Transfer(pd.DataFrame(rows).set_index(["width", "depth", "criterion"]))


def _rows(problem: Problem, sources: dict[str, Problem], u: np.ndarray) -> list[dict[str, Any]]:
    """The rows of one width and depth, by where networks come from."""
    goals: list[tuple[Any, Constraint | None]] = [(promise.criterion, promise) for promise in problem.constraints]
    goals += [] if isinstance(problem.objective, str) else [(problem.objective, None)]
    rows = []
    for criterion, constraint in goals:
        known = {
            "promised": True,
            "chain": criterion.statistic in problem.of_chains,
            "weights": bool(sources["weights"].paths),
        }
        by_source = {name: fresh.estimates(criterion, u) if known[name] else None for name, fresh in sources.items()}
        for prompt in range(len(problem.V0)):
            name = str(criterion if constraint is None else constraint)
            name += f", prompt {prompt}" if len(problem.V0) > 1 else ""
            bound = math.nan if constraint is None else constraint.bound
            row: dict[str, Any] = {"width": problem.width, "depth": problem.depth, "criterion": name, "bound": bound}
            for source, estimates in by_source.items():
                value, error = dataclasses.astuple(estimates[prompt]) if estimates else (math.nan, math.nan)
                row |= {source: value, f"{source}_error": error}
                if constraint is not None and source != "weights":
                    slack = constraint.sign * (value - constraint.bound)
                    row[f"{source}_holds"] = bool(slack >= 0) if np.isfinite(slack) else None
            rows.append(row)
    return rows
