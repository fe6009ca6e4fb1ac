"""The problem of increments of residual branches: strengths, gains and temperatures."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from sdeinfer._files import InputError
from sdeinfer.blocks._coefficients import labelled
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.infer._chains import Draws
from sdeinfer.infer._labels import NETWORK, Labels, labels_by_trace, stamp
from sdeinfer.infer._problem import AbstractProblem, Prepared, pose
from sdeinfer.layers import AbstractLayer
from sdeinfer.likelihood._increments import BranchModel, BranchPath
from sdeinfer.observation import validate_branches

BRANCH, LAYER = "branch", "layer"

READ = ["input", "mean"]
"""What the branches read, which no parameter of theirs changes."""


@dataclasses.dataclass(frozen=True)
class Branches(AbstractProblem):
    """Increments of residual branches.

    Attributes:
        order: the blocks of the layers, with their declared strengths, gains and temperatures.
        priors: priors by name, which replace those of strengths and make gains and temperatures latent.
    """

    model: BranchModel
    order: BlockOrder
    priors: Mapping[str, Any]

    def prepare(self, data: xr.Dataset) -> Prepared:
        """Compute the coefficients of the log densities."""
        path = BranchPath.of(data, self.order, self.priors)
        return Prepared(path, path, data)

    def labels(self, prepared: Prepared) -> Labels:
        """Strengths of each layer have the dimension `layer`."""
        coords = {name: prepared.kept[name].values for name in (NETWORK, BRANCH)}
        found = labels_by_trace(self.model, prepared.each, coords, {LAYER: LAYER})
        return found._replace(densities=found.densities | {"increments": [NETWORK, BRANCH]})

    def observed(self, prepared: Prepared) -> dict[str, xr.Dataset]:
        """The increments, what the branches read, and the coefficients of the log densities."""
        data = prepared.kept
        return {
            "observed_data": data.drop_vars(READ),
            "constant_data": data[READ],
            "coefficients": labelled(np.asarray(prepared.each.coefficients), self.order, data),
        }

    def attributes(self, data: xr.Dataset, labels: Labels, prepared: Prepared, draws: Draws) -> dict[str, Any]:
        """Those of the data, the declared values as `declared_attention.strength`, and the fixed ones."""
        del labels
        path, order = prepared.each, self.order
        return {
            **data.attrs,
            **{f"declared_{name}": value for name, value in (order.strengths | order.shapes).items()},
            **{f"fixed_{name}": each.value for name, each in path.prior if isinstance(each.value, float)},
            "model": self.model.name,
            "identified": " ".join(name for name in draws.log_prior if not name.endswith("_offset")),
            "normed": " ".join(order.normed),
            **stamp(),
        }


@pose.register
def pose_branches(
    model: BranchModel, data: xr.Dataset, *, architecture: Any, law: str, prior: Mapping[str, Any] | None
) -> tuple[xr.Dataset, Branches]:
    """Validate increments; return them, and the problem."""
    del law
    if "increment" not in data:
        raise InputError(f"data: {model.name} takes increments of branches, as of si.observe_branches")
    data = validate_branches(data)
    if not isinstance(architecture, AbstractLayer):
        raise InputError("architecture: a si.blocks.Block, or a si.Stack of the blocks of a layer, is needed")
    return data, Branches(model, BlockOrder.of_data(architecture, data), prior or {})
