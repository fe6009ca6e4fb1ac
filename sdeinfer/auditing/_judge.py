"""Observed branches against declared blocks: estimates, and tests of the law."""

import numpy as np
import pandas as pd
import xarray as xr

from sdeinfer.auditing._estimates import IDENTIFIED, Estimate, shape_estimate, strength_estimate
from sdeinfer.auditing._observe import Seen
from sdeinfer.auditing._recipe import Recipe
from sdeinfer.auditing._result import Audit
from sdeinfer.blocks import BlockOrder, branch_coefficients, labelled
from sdeinfer.diagnostics import BranchTests, Verdict
from sdeinfer.layers import Stack

ALIKE = 1.05
"""Largest acceptable ratio of a significant strength of a block to the declared one, or its inverse."""

SIGNIFICANT = 0.002
"""False-alarm probability of the strengths of all blocks together."""


def judge(seen: Seen, architecture: Stack, recipe: Recipe | None, *, name: str) -> Audit:
    """Compare observed branches with blocks.

    Arguments:
        seen: what was observed.
        architecture: the declared blocks of one layer.
        recipe: what declares their strengths, which are not judged if it is None.
        name: what was observed, in sentences.

    Raises:
        InputError: for branches of other kinds or patterns than those of the blocks, see `BlockOrder.of_data`.
    """
    data = seen.data
    order = BlockOrder.of_data(architecture, data)
    coefficients = branch_coefficients(data, order)
    at_declared = coefficients[:, :, coefficients.shape[2] // 2]
    part = np.asarray(order.part)
    strengths, shapes, assumed = [], [], []
    for number, block in enumerate(order.names):
        key = f"{block}.strength"
        strengths.append(strength_estimate(key, order.strengths[key], at_declared[:, part == number]))
        shape = next(key for key in order.shapes if key.startswith(f"{block}."))
        found = shape_estimate(shape, order.shapes[shape], coefficients[:, part == number])
        if found.sd < IDENTIFIED:
            shapes.append(found)
        else:
            assumed.append(shape)
    tests = BranchTests(
        data,
        labelled(coefficients, order, data),
        values={each.name: np.asarray(each.value) for each in strengths},
        declared=order.strengths | order.shapes,
        normed=order.normed,
    )
    of_strengths = [] if recipe is None else [_of_strength(each, recipe, len(strengths)) for each in strengths]
    return Audit(
        name=name,
        recipe=recipe,
        strengths=tuple(strengths),
        shapes=tuple(shapes),
        assumed=tuple(assumed),
        branches=_by_branch(data, order, at_declared).assign(p=tests.of_each()),
        verdicts=(*tests.verdicts(), *of_strengths),
        causes=(),
        words="",
        architecture=architecture,
        data=data,
        stream=seen.stream,
    )


def _by_branch(data: xr.Dataset, order: BlockOrder, at_declared: np.ndarray) -> pd.DataFrame:
    rows = []
    for branch, number in enumerate(order.part):
        name = f"{order.names[number]}.strength"
        found = strength_estimate(name, order.strengths[name], at_declared[:, branch])
        rows.append(
            {
                "branch": str(data["name"].values[branch]),
                "block": order.names[number],
                "layer": branch // len(order.names),
                "strength": found.value,
                "ratio": found.ratio,
                "low": found.interval[0],
                "high": found.interval[1],
                "sd": found.sd,
            }
        )
    return pd.DataFrame(rows).set_index("branch")


def _of_strength(found: Estimate, recipe: Recipe, count: int) -> Verdict:
    """The strength of a block against the declared one."""
    value = float(np.exp(abs(found.log_ratio))) if found.p(1.0) < SIGNIFICANT / count else 1.0
    advice = f"{found.name} is {found} times what {recipe.name} declares"
    return Verdict("declared", f"ratio of {found.name} to the declared one", value, ALIKE, value <= ALIKE, advice)
