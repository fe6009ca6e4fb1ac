"""The matrices in one array: queries, keys and values, a gate beside a first matrix, experts; with their entries.

Tests: `tests/auditing/test_parts.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from sdeinfer.auditing._graph import Source
from sdeinfer.auditing._record import Node, Parameter, Record

MOST_EXPERTS = 256
"""Number of equal blocks of an array up to which each is a matrix."""

TRANSPOSES = ("t", "transpose", "permute", "swapaxes", "movedim")


@dataclasses.dataclass(frozen=True, eq=False)
class Places:
    """Where the entries of a matrix are in an array of equal blocks, of outputs × inputs or inputs × outputs."""

    block: int  # number of the block
    inputs: int
    outputs: int
    columns: np.ndarray  # numbers of the outputs
    outputs_first: bool

    @property
    def size(self) -> int:
        return self.inputs * len(self.columns)

    @property
    def shape(self) -> tuple[int, int]:
        """As the array has it."""
        rows, columns = len(self.columns), self.inputs
        return (rows, columns) if self.outputs_first else (columns, rows)

    def __call__(self, index: np.ndarray) -> np.ndarray:
        """Flat indices of the array, of flat indices of the matrix."""
        first = self.block * self.inputs * self.outputs
        if self.outputs_first:
            return first + self.columns[index // self.inputs] * self.inputs + index % self.inputs
        return first + (index // len(self.columns)) * self.outputs + self.columns[index % len(self.columns)]

    def of(self, parameter: Parameter) -> Parameter:
        """The matrix alone."""

        def read(index: Any) -> np.ndarray:
            flat = np.arange(*index.indices(self.size)) if isinstance(index, slice) else np.asarray(index)
            return parameter.read(self(flat))

        return Parameter(self.shape, read, parameter.least, parameter.largest, parameter.dtype)


def places_of(
    product: Node, parameter: Parameter, columns: Mapping[str, np.ndarray | None]
) -> dict[str, tuple[str, Places]]:
    """Role and places of each matrix in an array by its label; nothing if it is one matrix, or its layout is not known.

    Arguments:
        product: the product that the array is used in.
        parameter: the array.
        columns: by role the outputs of the product that have it; None where they are not known.
    """
    inputs, outputs = product.about["fan_in"], product.about["fan_out"]
    blocks, rest = divmod(parameter.size, max(inputs * outputs, 1))
    if product.kind != "product" or rest or not 1 <= blocks <= MOST_EXPERTS:
        return {}
    by_role = _disjoint(columns)
    if blocks == 1 and len(by_role) < 2:
        return {}
    by_role = by_role or {next(iter(columns), "other"): np.arange(outputs)}
    first = _outputs_first(product, parameter)
    found = {}
    for block in range(blocks):
        for role, own in by_role.items():
            label = ", ".join([role] * (len(by_role) > 1) + [str(block)] * (blocks > 1))
            found[label] = role, Places(block, inputs, outputs, own, first)
    return found


def places_of_bias(outputs: int, columns: Mapping[str, np.ndarray | None]) -> dict[str, tuple[str, Places]]:
    """The biases of several matrices in one array."""
    return {role: (role, Places(0, 1, outputs, own, True)) for role, own in _disjoint(columns).items()}  # noqa: FBT003


def _disjoint(columns: Mapping[str, np.ndarray | None]) -> dict[str, np.ndarray]:
    known = {role: own for role, own in columns.items() if own is not None and len(own)}
    together = np.concatenate(list(known.values())) if known else np.empty(0)
    whole = len(known) == len(columns) > 1 and len(np.unique(together)) == len(together)
    return known if whole else {}


def _outputs_first(product: Node, parameter: Parameter) -> bool:
    """Whether outputs are the first axis of each block; by the way to the product if both axes are of one length."""
    inputs, outputs = product.about["fan_in"], product.about["fan_out"]
    if inputs != outputs:
        sizes = np.cumprod(parameter.shape[::-1]).tolist()
        return inputs in sizes and not (outputs in sizes and parameter.shape[-1] == outputs)
    first, node = not product.about.get("outputs_last", True), product.about["weight"]
    while node.inputs:
        first ^= node.operation in TRANSPOSES
        node = node.inputs[0]
    return first


def columns_of(record: Record, source: Source) -> np.ndarray | None:
    """The outputs of a product that are in a tensor which is linear in it; None if these are not known."""
    found = []
    for moves in source.moves:
        if moves is None:
            return None
        values = record.columns(source.node.shape)
        try:
            for node in moves:
                values = node.moved(values)  # pyright: ignore[reportOptionalCall]
        except Exception:  # a move that numbers of columns cannot make
            return None
        found.append(np.unique(np.asarray(values)))
    return np.unique(np.concatenate(found))
