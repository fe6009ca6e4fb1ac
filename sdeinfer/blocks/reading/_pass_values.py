"""Values of a pass as arrays, and the products whose values they are. Tests: `tests/blocks/test_of.py`."""

from typing import Any

import numpy as np

from sdeinfer.passes._account import Account, Matrix
from sdeinfer.passes._record import Node


def float_array(values: Any) -> np.ndarray:
    """A tensor or array in double precision."""
    if hasattr(values, "cpu"):
        values = values.cpu().double() if values.is_floating_point() else values.cpu()
    array = np.asarray(values)
    return (array.view(array.real.dtype) if np.iscomplexobj(array) else array).astype(np.float64)


def outputs_of_matrix(values: Any, matrix: Matrix) -> np.ndarray:
    """The outputs of a matrix, of the product in which it is used; shape (tokens, outputs)."""
    products = float_array(values)
    if matrix.places is not None:
        return products.reshape(-1, matrix.places.outputs)[:, matrix.places.columns]
    return products.reshape(-1, matrix.fan_out)


def with_bias(account: Account, product: Node) -> Node:
    """A product with the bias that is added to it."""
    later = account.graph.record.nodes[product.number + 1 :]
    sums = (node for node in later if node.kind == "sum" and len(node.inputs) == 1 and node.parameters)
    return next((node for node in sums if account.graph.term(node.inputs[0]).origin is product), product)
