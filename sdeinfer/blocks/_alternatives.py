"""Other blocks in place of the declared ones, compared by the densities of observed increments.

Code may leave out a norm, a factor of the logits or a mask. `check` names such an alternative where the increments do
not have the law of the declared block. Tests: `tests/blocks/test_alternatives.py`.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np
import xarray as xr

from sdeinfer._files import InputError
from sdeinfer.blocks._block import Block
from sdeinfer.blocks._coefficients import branch_coefficients, reshaped
from sdeinfer.blocks._information import scale_free
from sdeinfer.blocks._order import BlockOrder

MOST_INCREMENTS = 32
"""Number of increments of a block that are compared; 8 of 4 tokens at width 128 show a norm that is left out."""

FEWER_NODES = 2
"""Logarithm of the factor by which a comparison takes fewer nodes than a fit, whose means need to be more exact."""


def evidence_of_others(data: xr.Dataset, order: BlockOrder, name: str, log_factor: float = 0.0) -> dict[str, float]:
    """Log density of the increments of a block by each alternative less that by the block, without their scale.

    The block has its gain or temperature times e^`log_factor`.
    """
    part = order.names.index(name)
    branches = np.flatnonzero(np.asarray(order.part) == part)
    branches = branches[:: -(-len(branches) // MOST_INCREMENTS)]
    networks = max(1, MOST_INCREMENTS // len(branches))
    increments = data.isel(branch=branches, network=slice(networks))
    block = reshaped(order.blocks[part], log_factor)
    log_density = _log_density(increments, block)
    others = _alternatives(block, data)
    evidence = {words: _log_density(increments, alternative) - log_density for words, alternative in others.items()}
    return {words: value for words, value in evidence.items() if np.isfinite(value)}


def _alternatives(block: Block, data: xr.Dataset) -> Mapping[str, Block]:
    """The block with another branch, or with another norm of a residual stream that was observed itself."""
    branches = block.branch.alternatives(int(data["width"].values.min()))
    others = {words: dataclasses.replace(block, branch=branch) for words, branch in branches.items()}
    if data.attrs.get("reads") == "stream" and block.position == "pre":
        norms = {"no norm": None, "an RMSNorm": "rms", "a LayerNorm": "layer"}
        others |= {
            f"{words} is before the branch": dataclasses.replace(block, norm=norm)
            for words, norm in norms.items()
            if norm != block.norm
        }
    return others


def _log_density(increments: xr.Dataset, block: Block) -> float:
    """The log density of increments of one block, each of which has a strength of its own."""
    count = increments.sizes["branch"]
    log2 = block.branch.log2_nodes - FEWER_NODES
    try:
        order = BlockOrder((block,), (block.part_name,), (0,) * count)
        coefficients = branch_coefficients(increments, order, log_factors=np.zeros(1), log2=log2)
    except InputError:  # the block has no such width, or no density here
        return -np.inf
    return float(scale_free(coefficients).sum())
