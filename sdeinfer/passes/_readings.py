"""Readings: the mean square of each matrix's input, whether through a norm, and the norms of each branch.

Tests: `tests/auditing/test_kinds.py`.
"""

import dataclasses
import math

import numpy as np

from sdeinfer.passes._account import Account, Matrix
from sdeinfer.passes._graph import PRODUCTS
from sdeinfer.passes._operations import is_a
from sdeinfer.passes._record import Node
from sdeinfer.passes._stream import Link

LOG_SD_TOLERANCE = 0.02
"""A difference of log σ counts if its whole interval is beyond this; a factor in the code may differ by half of it."""

LARGEST_EPSILON = 1e-4
"""The largest number that norms are known to add to a mean square."""


@dataclasses.dataclass(frozen=True)
class Reading:
    """The input of a matrix.

    Attributes:
        name: the matrix.
        role: its role.
        layer: its layer.
        square: the mean square.
        product: the product that reads.
        origin: its input without views and factors: a norm if there is one.
        read: the input of that norm, or the origin.
        norms: parameters of the norm, and those that multiply after it.
        factor: the root of the mean square, where a unit norm has 1; NaN without a norm.
        least: the least factor of a unit norm, as it divides by √(mean square + ε).
        even: whether the tokens have one mean square, as after a norm over features.
        zeros: names of the tensors of zeros that multiply on the way.
    """

    name: str
    role: str
    layer: int | None
    square: float
    product: Node
    origin: Node
    read: Node
    norms: tuple[str, ...] = ()
    factor: float = math.nan
    least: float = 1.0
    even: bool = True
    zeros: tuple[str, ...] = ()

    def multiplies_by(self, gain: float) -> bool:
        """Whether the factor is this one, up to ε."""
        least, most = self.least * (1 - LOG_SD_TOLERANCE) * abs(gain), (1 + LOG_SD_TOLERANCE) * abs(gain)
        return least <= self.factor <= most

    @property
    def normed(self) -> bool:
        """Whether it is what a norm returns."""
        return self.origin.kind == "norm"


@dataclasses.dataclass(frozen=True)
class BranchNorms:
    """The norms of a branch: whether all that it reads of the stream, its sum, and what it adds are normed.

    `back` is how many sums before its own the state is that it reads; −1 if it reads no state of its stream.
    """

    link: Link
    readers: tuple[Reading, ...]
    after_sum: bool
    of_branch: bool
    back: int

    @property
    def reads_normed(self) -> bool | None:
        """Whether all matrices that read the stream read a norm of it; None if none was seen."""
        start = self.link.skip.origin
        return all(reader.normed and reader.origin is not start for reader in self.readers) if self.readers else None


def readings_of(account: Account) -> list[Reading]:
    """The input of each matrix at each use; a table of tokens that is used as a matrix is a head."""
    readings = []
    for matrix in account.matrices.values():
        role = "head" if matrix.role == "embedding" else matrix.role
        for product in account.uses.get(matrix.array, ()) if matrix.linear or role == "head" else ():
            if product.kind in PRODUCTS and product.inputs:
                readings.append(_reading(account, dataclasses.replace(matrix, role=role), product))
    return readings


def _reading(account: Account, matrix: Matrix, product: Node) -> Reading:
    origin = node = product.inputs[0]
    whole, zeros, names = True, [], []
    while True:
        if origin.kind == "scale":
            if origin.factors[0] == 0:
                zeros.append(tensor_name(origin.about.get("by")))
            names += origin.parameters[:1]
        elif origin.kind == "sum" and len(origin.inputs) == 1:
            whole &= not any(fixed.about.get("rms", 1.0) for fixed in origin.about.get("fixed", ()))
        elif origin.kind == "view":
            whole &= is_a(origin.operation, "move") and not is_a(origin.operation, "piece")
        elif origin.kind != "join" or origin.inputs[1:]:
            break
        origin = origin.inputs[0]
    rows = _rows(node)
    square = math.nan if rows is None or not rows.size else float(rows.mean())
    reading = Reading(matrix.name, matrix.role, matrix.layer, square, product, origin, origin, zeros=tuple(zeros))
    if origin.kind != "norm" or rows is None:
        return reading
    gains = tuple([*origin.parameters[:1], *names])
    reading = dataclasses.replace(reading, read=account.graph.term(origin.inputs[0]).origin, norms=gains)
    before = _rows(origin.inputs[0])
    before = rows if before is None or before.shape != rows.shape else before
    convolves = product.kind == "convolution"  # the features of a token are not a row
    if convolves:
        rows, before = rows.mean(keepdims=True), before.mean(keepdims=True)
    factor, least = math.sqrt(np.median(rows)), math.sqrt(np.median(before / (before + LARGEST_EPSILON)))
    of_unit_length = origin.about.get("l2") and math.isclose(factor, node.shape[-1] ** -0.5, rel_tol=LOG_SD_TOLERANCE)
    if not whole or of_unit_length or is_a(origin.operation, "batch"):
        return reading
    return dataclasses.replace(reading, factor=factor, least=least, even=convolves or is_even(origin))


def is_even(norm: Node) -> bool:
    """Whether a norm is over features: no row then has a larger mean square than its gain, whatever ε is."""
    gain = norm.about.get("gain", {"mean": 1.0, "sd": 0.0})
    mean, sd = gain.get("mean", 1.0), gain.get("sd", 1.0)
    if norm.rows is None or is_a(norm.operation, "batch") or sd > LOG_SD_TOLERANCE * abs(mean):
        return True
    rows, unit = norm.rows, mean**2
    if norm.about.get("l2"):  # entries of unit length over an axis have the mean square 1/its length
        unit = float(rows.mean())
        if not any(math.isclose(unit, 1 / length, rel_tol=LOG_SD_TOLERANCE) for length in norm.shape[1:]):
            return True
    return bool(rows.max() < (1 + LOG_SD_TOLERANCE) * unit)


def _rows(node: Node) -> np.ndarray | None:
    """Mean squares of a tensor's rows, or of what it is a view of."""
    while node.rows is None and node.inputs and node.kind in ("view", "scale"):
        node = node.inputs[0]
    return node.rows


def tensor_name(fixed: Node | None) -> str:
    """The buffer or parameter that a fixed tensor was made of."""
    while fixed is not None and fixed.kind not in ("buffer", "parameter") and fixed.inputs:
        fixed = fixed.inputs[0]
    return fixed.operation if fixed is not None and fixed.kind in ("buffer", "parameter") else "a number"


def norms_of(account: Account, readings: list[Reading]) -> list[BranchNorms]:
    """The norms of each branch."""
    graph, norms = account.graph, []
    for chain in account.streams:
        for place, link in enumerate(chain):
            bits = link.inside(graph)
            reads = [reading for reading in readings if bits >> reading.product.number & 1]
            states = {state.skip.origin.number: state for state in chain[: place + 1]}
            read = {number for reading in reads for number in (reading.origin.number, reading.read.number)} & {*states}
            back = min((place - chain.index(states[number]) for number in read), default=-1)
            # A branch beside another one reads the state before that.
            recent = {number for number, state in states.items() if state.layer == link.layer}
            readers = [
                reading
                for reading in reads
                if reading.role not in ("router", "inner", "mixer output")
                and {reading.origin.number, reading.read.number} & recent
            ]
            following = chain[place + 1].normed if place + 1 < len(chain) else _ends_normed(account, link)
            writers = [source.normed for source in link.writers]
            norms.append(BranchNorms(link, tuple(readers), following, bool(writers) and all(writers), back))
    return norms


def _ends_normed(account: Account, link: Link) -> bool:
    """Whether the last sum of a stream is read through a norm."""
    graph = account.graph
    return any(
        node.kind == "norm" and node.inputs and graph.term(node.inputs[0]).origin is link.sum
        for node in graph.record.nodes[link.sum.number :]
    )
