"""The problem of increments of branches. Tests: `tests/models/test_branches.py`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from sdeinfer._files import InputError
from sdeinfer.blocks._attributes import BLOCKS, attributes_of_blocks, stack_in
from sdeinfer.blocks._coefficients import labelled_coefficients
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.infer._chains import Draws
from sdeinfer.infer._problem import NETWORK, AbstractProblem, Labels, Prepared, labels_by_trace, stamp
from sdeinfer.layers import AbstractLayer
from sdeinfer.likelihood._increments import BranchModel, BranchPath
from sdeinfer.observation import validate_branches
from sdeinfer.observation._networks import MEASURED, NO_BLOCKS


@dataclasses.dataclass(frozen=True)
class Branches(AbstractProblem):
    """Increments of residual branches; priors replace those of strengths, and make gains and temperatures latent."""

    model: BranchModel
    order: BlockOrder
    priors: Mapping[str, Any]
    measured: bool = False  # whether gains and temperatures are those of the weights

    def prepare(self, data: xr.Dataset, largest_logit: float) -> Prepared:
        del largest_logit
        path = BranchPath.of(data, self.order, self.priors)
        return Prepared(path, path, data)

    def labels(self, prepared: Prepared) -> Labels:
        coords = {name: prepared.data[name].values for name in (NETWORK, "branch")}
        names = labels_by_trace(self.model, prepared.networks, coords, {"layer": "layer"})
        return names._replace(densities=names.densities | {"increments": [NETWORK, "branch"]})

    def observed(self, prepared: Prepared) -> dict[str, xr.Dataset]:
        data, read = prepared.data, ["input", "mean"]  # of the branches, which no parameter of theirs changes
        return {
            "observed_data": data.drop_vars(read),
            "constant_data": data[read],
            "coefficients": labelled_coefficients(np.asarray(prepared.networks.coefficients), self.order, data),
        }

    def attributes(self, labels: Labels, prepared: Prepared, draws: Draws) -> dict[str, Any]:
        del labels
        path, order = prepared.networks, self.order
        return {
            **{name: value for name, value in prepared.data.attrs.items() if name not in (MEASURED, BLOCKS)},
            **attributes_of_blocks(order),
            **{f"declared_{name}": value for name, value in (order.strengths | order.shapes).items()},
            **{f"fixed_{name}": prior.value for name, prior in path.prior if isinstance(prior.value, float)},
            "model": self.model.name,
            "identified": " ".join(name for name in draws.log_prior if not name.endswith("_offset")),
            "normed": " ".join(order.normed),
            **({MEASURED: 1.0} if self.measured else {}),
            **stamp(),
        }


def pose_branches(
    model: BranchModel, data: xr.Dataset, *, architecture: Any, law: str, prior: Mapping[str, Any] | None
) -> tuple[xr.Dataset, Branches]:
    """Validate increments; return them, and the problem."""
    del law
    if "increment" not in data:
        raise InputError(f"data: {model.name} takes increments of branches, as of si.observe_branches")
    data = validate_branches(data)
    measured = architecture is None and data.attrs.get(MEASURED) == 1.0
    if architecture is None and NO_BLOCKS in data.attrs:
        raise InputError(f"architecture: no blocks describe the network ({data.attrs[NO_BLOCKS]}): give its si.Stack")
    if architecture is None and BLOCKS in data.attrs:
        architecture = stack_in(data.attrs)
    if not isinstance(architecture, AbstractLayer):
        raise InputError("architecture: a si.blocks.Block, or a si.Stack of the blocks of a layer, is needed")
    return data, Branches(model, BlockOrder.of_data(architecture, data), prior or {}, measured)
