"""The blocks of a network in the order of its branches. Tests: `tests/blocks/test_arguments.py`."""

import dataclasses

import xarray as xr

from sdeinfer._files import InputError
from sdeinfer.blocks._attention import SelfAttention
from sdeinfer.blocks._block import STRENGTH, Block
from sdeinfer.blocks._latent import LatentAttention
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.layers import AbstractLayer, Stack
from sdeinfer.parameters import Coordinates

ATTENTIONS = (SelfAttention, LatentAttention)
"""Types of branches that have an attention pattern."""


@dataclasses.dataclass(frozen=True, eq=False)
class BlockOrder:
    """The blocks of one layer with their names, and the number of the block of each observed branch (`part`)."""

    blocks: tuple[Block, ...]
    names: tuple[str, ...]
    part: tuple[int, ...]

    @property
    def name(self) -> str:
        """The names of the blocks, for messages."""
        return " and ".join(self.names)

    @property
    def strengths(self) -> dict[str, float]:
        """The declared strengths, by the names of their sites such as "attention.strength"."""
        return {f"{name}.strength": float(block.strength) for name, block in self.named()}

    @property
    def shapes(self) -> dict[str, float]:
        """The gains and temperatures of the blocks, by the names of their sites such as "mlp.gain"."""
        branches = ((name, block.branch) for name, block in self.named())
        return {f"{name}.{branch.shape.name}": float(getattr(branch, branch.shape.name)) for name, branch in branches}

    @property
    def normed(self) -> tuple[str, ...]:
        """The names of the blocks whose branch reads tokens after a norm."""
        return tuple(name for name, block in self.named() if block.norm and block.position == "pre")

    @property
    def coordinates(self) -> Coordinates:
        """The parameters of the increments of all blocks, as they are before any norm."""
        return Coordinates(
            {
                f"{name}.{parameter.name}": parameter
                for name, block in self.named()
                for parameter in (STRENGTH, *block.branch.declared().values())
            }
        )

    def named(self) -> list[tuple[str, Block]]:
        """The blocks with their names."""
        return list(zip(self.names, self.blocks, strict=True))

    @classmethod
    def of(cls, layer: AbstractLayer, *, depth: int) -> "BlockOrder":
        """The blocks of a layer, repeated."""
        layers = tuple(layer.layers) if isinstance(layer, Stack) else (layer,)
        blocks = tuple(block for block in layers if isinstance(block, Block))
        if len(blocks) < len(layers):
            raise InputError("architecture: a si.blocks.Block, or a si.Stack of blocks, is needed for increments")
        names = layer.names if isinstance(layer, Stack) else (layer.part_name,)
        return cls(blocks, names, tuple(range(len(blocks))) * depth)

    @classmethod
    def of_network(cls, layer: AbstractLayer, *, tokens: int, width: int, depth: int) -> "BlockOrder":
        """The blocks of the first layer of a network, repeated, of which each supports the width."""
        # A profile may be out of its range at depth-time 0, where no layer is.
        order = cls.of(layer.at(0.5 / width), depth=depth)
        for block in order.blocks:
            block.check_width(width)
        if width < tokens:
            raise InputError(f"width: at least {tokens}, the number of tokens, is needed, got {width}")
        return order

    @classmethod
    def of_data(cls, layer: AbstractLayer, data: xr.Dataset) -> "BlockOrder":
        """The blocks of the branches of a Dataset, whose kinds have to be those of the layer, repeated."""
        order = cls.of(layer, depth=1)
        kinds, count = [block.branch.kind for block in order.blocks], data.sizes["branch"]
        part = tuple(number % len(kinds) for number in range(count))
        for branch, (kind, block) in enumerate(zip(data["kind"].values, part, strict=True)):
            if kinds[block] != kind:
                raise InputError(
                    f"architecture: branch {branch} is of kind {str(kind)!r} in the data, and {kinds[block]!r} in the "
                    "architecture: give the blocks in the order of the branches"
                )
        seen = Pattern.in_attributes(data.attrs)
        if "attention" in kinds and seen != order.pattern:
            raise InputError(
                f"pattern: {order.pattern} in the architecture, {seen} in the data: give both the same si.Pattern"
            )
        return dataclasses.replace(order, part=part)

    @property
    def pattern(self) -> Pattern:
        """Which tokens each token attends to, by the first block with attention."""
        branches = (block.branch for block in self.blocks)
        return next((branch.pattern for branch in branches if isinstance(branch, ATTENTIONS)), EVERY_TOKEN)
