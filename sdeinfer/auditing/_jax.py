"""The record of a pass through a function of JAX, by walking its jaxpr, whatever library made it.

Tests: `tests/auditing/test_audit.py`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from sdeinfer.auditing._jax_models import function_of
from sdeinfer.auditing._jax_numpy import evaluated
from sdeinfer.auditing._jax_operations import node_of_primitive
from sdeinfer.auditing._record import Node, Parameter, Record, about

INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")
"""Parameters in which primitives that call a function have its jaxpr."""


def record_of(network: Any, inputs: Mapping[str, Any]) -> Record:
    """Run a model once, primitive by primitive.

    Arguments:
        network: a module of Equinox or Flax (NNX), or a pair of a function and its parameters.
        inputs: its inputs by name; "" for one positional argument.
    """
    import jax

    function, leaves, name = function_of(network)
    given = dict(inputs)
    keys = list(given)

    def run(values: list[Any], arguments: list[Any]) -> Any:
        named = dict(zip(keys, arguments, strict=True))
        return function(values, *([named.pop("")] if "" in named else []), **named)

    closed = jax.make_jaxpr(run)(list(leaves.values()), list(given.values()))
    walk = _Walk(leaves)
    arguments = [Node("input", (), value.shape, key, rows=_rows(value)) for key, value in given.items()]
    for node in arguments:
        walk.add(node)
    nodes = [*walk.parameters.values(), *arguments]
    outputs = walk.run(closed.jaxpr, closed.consts, nodes, [*leaves.values(), *given.values()])
    return Record(
        name,
        walk.nodes,
        walk.known(),
        {},
        {},
        [node for node, _ in outputs],
        {key: value.shape for key, value in given.items()},
    )


def _rows(value: Any) -> np.ndarray | None:
    x = np.asarray(value)
    if not np.issubdtype(x.dtype, np.floating) and x.dtype.name != "bfloat16" or not x.size:
        return None
    x = x.astype(np.float64) if x.dtype.itemsize >= 4 else x.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.square(x).mean(-1).ravel() if x.ndim > 1 else np.array([np.square(x).mean()])


def _opened(jaxpr: Any) -> tuple[Any, Any]:
    """A jaxpr, closed or not, and its constants."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "jaxpr") else (jaxpr, getattr(jaxpr, "consts", ()))


class _Walk:
    """An interpreter of jaxprs that keeps a node beside each value."""

    def __init__(self, leaves: Mapping[str, Any]):
        self.nodes: list[Node] = []
        self.arrays: dict[str, np.ndarray] = {name: np.asarray(value) for name, value in leaves.items()}
        self.parameters = {name: self.parameter(name) for name in leaves}
        self.stacked: set[str] = set()

    def parameter(self, name: str) -> Node:
        x = self.arrays[name]
        vector = x.size in (1, max(x.shape, default=1))
        return self.add(
            Node("parameter", (), x.shape, name, (name,), fixed=True, about=about(x) if vector and x.size else {})
        )

    def known(self) -> dict[str, Parameter]:
        """All parameters; a stack that a scan cuts counts by its pieces."""
        found = {}
        for name, x in self.arrays.items():
            if name not in self.stacked:
                flat = x.reshape(-1).astype(np.float64)
                found[name] = Parameter(
                    x.shape, lambda index, flat=flat: flat[index], bool(np.isfinite(flat).all()), str(x.dtype)
                )
        return found

    def add(self, node: Node) -> Node:
        for each in node.inputs:
            if each.number < 0:
                self.add(each)
        node.number = len(self.nodes)
        self.nodes.append(node)
        return node

    def constant(self, value: Any) -> Node:
        x = np.asarray(value)
        real = x.dtype.kind in "fiubc" and 0 < x.size <= 1 << 16
        return self.add(Node("constant", (), x.shape, fixed=True, about=about(x) if real else {}))

    def run(self, jaxpr: Any, consts: Any, nodes: list[Node], values: list[Any]) -> list[tuple[Node, Any]]:
        """Evaluate a jaxpr; its outputs as nodes and values."""
        known: dict[Any, tuple[Node, Any]] = {}
        for variable, value in zip(jaxpr.constvars, consts, strict=True):
            known[variable] = (
                value if isinstance(value, tuple) and isinstance(value[0], Node) else (self.constant(value), value)
            )
        for variable, node, value in zip(jaxpr.invars, nodes, values, strict=True):
            known[variable] = node, value

        def read(variable: Any) -> tuple[Node, Any]:
            return (self.constant(variable.val), variable.val) if hasattr(variable, "val") else known[variable]

        for equation in jaxpr.eqns:
            pairs = [read(variable) for variable in equation.invars]
            outputs = self.step(equation, [node for node, _ in pairs], [value for _, value in pairs])
            for variable, output in zip(equation.outvars, outputs, strict=True):
                known[variable] = output
        return [read(variable) for variable in jaxpr.outvars]

    def step(self, equation: Any, nodes: list[Node], values: list[Any]) -> list[tuple[Node, Any]]:
        """One equation."""
        name, parameters = equation.primitive.name, equation.params
        if name == "scan":
            return self.scan(equation, nodes, values)
        if name == "cond":
            branch = parameters["branches"][int(values[0])]
            return self.run(*_opened(branch), nodes[1:], values[1:])
        inner = next((parameters[key] for key in INNER if key in parameters), None)
        if inner is not None and name != "while":
            return self.run(*_opened(inner), nodes, values)

        found = []
        for value in evaluated(equation, values):
            node = node_of_primitive(name, parameters, nodes, tuple(getattr(value, "shape", ())), values)
            if str(value.dtype).startswith("key<"):
                pass
            elif node.fixed:
                small = 0 < value.size <= 1 << 16 and np.asarray(value).dtype.kind in "fc"
                node.about |= about(value) if small else {}
            elif node.kind != "view":
                node.rows = _rows(value)
            found.append((self.add(node), value))
        return found

    def scan(self, equation: Any, nodes: list[Node], values: list[Any]) -> list[tuple[Node, Any]]:
        """The steps of a loop; stacked parameters are cut into those of its steps."""
        parameters = equation.params
        (jaxpr, held), length = _opened(parameters["jaxpr"]), parameters["length"]
        # A stacked array has one axis more outside than inside.
        carries = sum(a.aval.ndim == b.aval.ndim for a, b in zip(equation.outvars, jaxpr.outvars, strict=True))
        stacks_in = sum(a.aval.ndim != b.aval.ndim for a, b in zip(equation.invars, jaxpr.invars, strict=True))
        consts = len(values) - carries - stacks_in
        carry = list(zip(nodes, values, strict=True))[consts : consts + carries]
        stacks: list[list[tuple[Node, Any]]] = []
        order = range(length - 1, -1, -1) if parameters["reverse"] else range(length)
        for number in order:
            pieces = [
                (self.piece(node, number, value.shape[1:]), value[number])
                for node, value in list(zip(nodes, values, strict=True))[consts + carries :]
            ]
            given = [*list(zip(nodes, values, strict=True))[:consts], *carry, *pieces]
            outputs = self.run(jaxpr, held, [node for node, _ in given], [value for _, value in given])
            carry = outputs[:carries]
            stacks.append(outputs[carries:])
        stacks = stacks[::-1] if parameters["reverse"] else stacks
        stacked = []
        for each in zip(*stacks, strict=True):
            value = np.stack([value for _, value in each])
            live = tuple(node for node, _ in each if not node.fixed)
            stacked.append((self.add(Node("join", live, value.shape, "stack", fixed=not live)), value))
        return [*carry, *stacked]

    def piece(self, node: Node, number: int, shape: tuple[int, ...]) -> Node:
        at = node
        while at.kind == "view" and at.fixed and at.inputs and at.inputs[0].shape == at.shape:
            at = at.inputs[0]
        if at.kind == "parameter":
            name = f"{at.operation}[{number}]"
            self.arrays[name] = self.arrays[at.operation][number]
            self.stacked.add(at.operation)
            return self.parameter(name)
        return self.add(
            Node(
                "view",
                (node,),
                shape,
                "slice",
                node.parameters,
                fixed=node.fixed,
                about=dict(node.about) if node.about.get("uniform") else {},
            )
        )
