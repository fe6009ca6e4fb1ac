"""The places to which views move entries: heads that are split or joined across tokens, and which side keys are.

Tests: `tests/auditing/test_torch_kinds.py`.
"""

import contextlib
import math
from collections.abc import Container, Iterator
from typing import Any

import numpy as np

from sdeinfer.passes._graph import Graph
from sdeinfer.passes._operations import is_a
from sdeinfer.passes._record import Node, Record


def torn_heads(graph: Graph, softmax: Node, product: Node, values: list[Node]) -> str:
    """The place at which heads are made of several tokens, "split" or "joined"; "" if they are not.

    Arguments:
        graph: the graph.
        softmax: the softmax of an attention.
        product: the product of queries and keys.
        values: the products of probabilities and values.
    """
    if len(softmax.shape) < 2:
        return ""
    in_order = "left_axes" not in product.about  # axes of JAX's products are in another one
    for side, tokens in zip(product.inputs, softmax.shape[-2:], strict=True) if in_order else ():
        for source in graph.sources(side):
            if source.node.kind == "product" and any(_splits(graph.record, source.node, product, softmax, tokens)):
                return "split"
    tokens = softmax.shape[-2]
    for value in values:
        if value.shape[-2:-1] == (tokens,) and _features_last(graph, value) and any(_joins(graph.record, value)):
            return "joined"
    return ""


def is_across_heads(record: Record, norm: Node) -> bool:
    """Whether what a norm of queries or keys divides by one number is neither a row nor a column of their product."""
    if len(norm.shape) < 3 or is_a(norm.operation, "batch"):
        return False
    for _, rows in _moved(record, norm, _row_numbers(record, norm.shape)):
        if rows.ndim > 2 and (rows != rows[..., :1]).any() and (rows != rows[..., :1, :]).any():
            return True
    return False


def _features_last(graph: Graph, value: Node) -> bool:
    """Whether rows of a product of probabilities and values are of features, and not of tokens."""
    for source in (source for side in value.inputs for source in graph.sources(side)):
        if source.node.kind == "product":
            for reader, rows in _moved(graph.record, source.node, _row_numbers(graph.record, source.node.shape)):
                if reader is value:
                    return not (rows != rows[..., :1]).any()
    return value.shape[-1] != value.shape[-2]


def keys_first(record: Record, product: Node) -> bool:
    """Whether the first side of a product of queries and keys has the keys, which are the last axis of its logits."""
    if "left_axes" not in product.about:
        return False
    moved = _moved(record, product, numbers_along(product.shape, product.about["left_axes"]))
    return any((values != values[..., :1]).any() for _, values in moved)


def numbers_along(shape: tuple[int, ...], axes: Container[int]) -> np.ndarray:
    """An array of this shape that counts its entries along some axes, and is constant along the others."""
    sizes = [size if axis in axes else 1 for axis, size in enumerate(shape)]
    return np.broadcast_to(np.arange(math.prod(sizes), dtype=np.int32).reshape(sizes), shape)


def _splits(record: Record, projection: Node, product: Node, softmax: Node, tokens: int) -> Iterator[bool]:
    """Whether a token has several rows of one head, of queries or keys as they are in their product."""
    if len(projection.shape) < 2:
        return
    heads = (*softmax.shape[:-2], tokens)
    for reader, values in _moved(record, projection, _row_numbers(record, projection.shape)):
        if reader is product or (values.shape[:-1] == heads and heads[-2] != tokens):
            values = values if not (values != values[..., :1]).any() else values.swapaxes(-1, -2)
            rows = np.sort(values[..., 0], axis=-1)
            yield values.shape[-2] == tokens and bool((rows[..., 1:] == rows[..., :-1]).any())


def _joins(record: Record, contraction: Node) -> Iterator[bool]:
    """Whether rows that a matrix reads are of several tokens."""
    shape = contraction.shape
    tokens = _row_numbers(record, shape) % shape[-2]
    for reader, values in _moved(record, contraction, tokens):
        if reader.kind == "product" and values.shape[-1:] == (reader.about["fan_in"],):
            yield bool((values != values[..., :1]).any())


def _row_numbers(record: Record, shape: tuple[int, ...]) -> Any:
    """An array of this shape with the number of each row."""
    numbers = record.columns((shape[-1], math.prod(shape[:-1]))).swapaxes(0, 1).reshape(shape)
    return numbers.contiguous() if hasattr(numbers, "contiguous") else numbers  # PyTorch's views need it


def _moved(record: Record, node: Node, values: Any) -> Iterator[tuple[Node, np.ndarray]]:
    """Numbers of a tensor's entries at their places after views and factors that follow it, each before a reader."""
    stack = [(node, values)]
    while stack:
        node, values = stack.pop()
        for reader in record.readers.get(node.number, []):
            if reader.kind == "view" and reader.moved is not None:
                with contextlib.suppress(Exception):  # a move that these numbers cannot make
                    stack.append((reader, reader.moved(values)))
                continue
            yield reader, np.asarray(values)
            if reader.kind == "scale" and reader.shape == node.shape:
                stack.append((reader, values))
