"""The record of a pass through a function of JAX, by walking its jaxpr, whatever library made it.

Tests: `tests/auditing/test_audit.py`.
"""

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sdeinfer.passes._inputs import Inputs
from sdeinfer.passes._models import function_of
from sdeinfer.passes._operations import of_jax
from sdeinfer.passes._record import Node, Record, StoredTensor, Watch
from sdeinfer.passes._recorder import Recorder, has_summary, is_move, is_vector, keeps_rows, summary_of, sums_over


def record_of(network: Any, inputs: Inputs, watch: Watch | None = None) -> Record:
    """Run a model once, primitive by primitive.

    Arguments:
        network: a module of Equinox or Flax (NNX), or a pair of a function and its parameters.
        inputs: its positional and its keyword arguments.
        watch: for each watched node, by its order, the function that takes its array.
    """
    import jax

    function, leaves, name = function_of(network)
    given, run = _flat(function, inputs)
    walk = _Walk(leaves, watch or {})
    outputs = walk.evaluate(jax.make_jaxpr(run)(list(leaves.values()), given), list(leaves.values()), given)
    return Record(
        name,
        walk.nodes,
        walk.stored_parameters(),
        {},
        [node for node, _ in outputs],
        lambda shape: np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape),
    )


def _flat(function: Callable[..., Any], inputs: Inputs) -> tuple[list[Any], Callable]:
    """The arrays of inputs, and the function of lists of parameters and of these."""
    import jax

    given, structure = jax.tree.flatten(inputs)

    def run(values: list[Any], arguments: list[Any]) -> Any:
        args, kwargs = jax.tree.unflatten(structure, arguments)
        return function(values, *args, **kwargs)

    return given, run


class Compiled:
    """A compiled pass that returns the values of some nodes, for networks of one kind.

    Arguments:
        network: the first network.
        inputs: their positional and keyword arguments.
        orders: the nodes.
    """

    def __init__(self, network: Any, inputs: Inputs, orders: tuple[int, ...]):
        import jax

        function, leaves, _ = function_of(network)
        given, run = _flat(function, inputs)

        def values(arrays: list[Any]) -> dict[int, Any]:
            closed, node_values = jax.make_jaxpr(run)(arrays, given), {}
            watch = {order: functools.partial(node_values.__setitem__, order) for order in orders}
            walk = _Walk(dict(zip(leaves, arrays, strict=True)), watch, measures=False)
            walk.evaluate(closed, arrays, given)
            return node_values

        self.values = jax.jit(values)

    def show(self, network: Any, watch: Watch) -> bool:
        """Show the values of a network with the arrays of the first; False for one that cannot be compiled."""
        _, leaves, _ = function_of(network)
        try:
            values = self.values(list(leaves.values()))
        except Exception:  # a branch that depends on values
            return False
        for order in sorted(values):
            watch[order](values[order])
        return True


def _rows(value: Any) -> np.ndarray | None:
    x = np.asarray(value)
    if _kind(x.dtype) != "f" or not x.size:
        return None
    x = x.astype(np.float64) if x.dtype.itemsize >= 4 else x.astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        return np.square(x).mean(-1).ravel() if x.ndim > 1 else np.array([np.square(x).mean()])


def _kind(dtype: Any) -> str:
    """The kind of a type as NumPy has it, which does not know that bfloat16 is floating-point."""
    return "f" if dtype.name.startswith(("bfloat", "float")) else dtype.kind


def _opened(jaxpr: Any) -> tuple[Any, Any]:
    """A jaxpr, closed or not, and its constants."""
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "jaxpr") else (jaxpr, getattr(jaxpr, "consts", ()))


class _Walk(Recorder):
    """An interpreter of jaxprs that keeps a node beside each value."""

    def __init__(self, leaves: Mapping[str, Any], watch: Watch, *, measures: bool = True):
        super().__init__(watch)
        self.measures = measures
        self.arrays: dict[str, Any] = {n: np.asarray(value) if measures else value for n, value in leaves.items()}
        self.parameters = {name: self.parameter(name) for name in leaves}
        self.stacked: set[str] = set()
        self.stacks: set[str] = set()

    def parameter(self, name: str) -> Node:
        x = self.arrays[name]
        summary = summary_of(x) if is_vector(x.shape) and x.size and self.measures else {}
        return self.add(Node("parameter", (), x.shape, name, (name,), fixed=True, about=summary))

    def stored_parameters(self) -> dict[str, StoredTensor]:
        """All parameters; a stack that a scan cuts counts by its pieces."""
        parameters = {}
        for name, x in self.arrays.items():
            if name not in self.stacked:
                flat = x.reshape(-1).astype(np.float64)
                ends = (float(flat.min()), float(flat.max())) if flat.size else (0.0, 0.0)
                parameters[name] = StoredTensor(x.shape, flat.__getitem__, *ends, str(x.dtype))
        return parameters

    def seen(self, node: Node, value: Any) -> Node:
        """Add the node of a value, which is shown if it is watched."""
        self.add(node)
        if node.order in self.watch:
            self.watch[node.order](value)
        return node

    def constant(self, value: Any) -> Node:
        if not self.measures:
            return self.add(Node("constant", (), np.shape(value), fixed=True))
        x = np.asarray(value)
        summarised = has_summary(x.size) and _kind(x.dtype) in "fiubc"
        return self.add(Node("constant", (), x.shape, fixed=True, about=summary_of(x) if summarised else {}))

    def evaluate(self, closed: Any, arrays: list[Any], given: list[Any]) -> list[tuple[Node, Any]]:
        """Evaluate a function of parameters and inputs."""
        self.stacks = _stacks(closed.jaxpr, list(self.parameters))
        arguments = []
        for value in given:
            rows = _rows(value) if self.measures else None
            arguments.append(self.seen(Node("input", (), np.shape(value), rows=rows), value))
        nodes = [*self.parameters.values(), *arguments]
        return self.run(closed.jaxpr, closed.consts, nodes, [*arrays, *given])

    def run(self, jaxpr: Any, consts: Any, nodes: list[Node], values: list[Any]) -> list[tuple[Node, Any]]:
        """Evaluate a jaxpr; its outputs as nodes and values."""
        known: dict[Any, tuple[Node, Any]] = {}
        for variable, value in zip(jaxpr.constvars, consts, strict=True):
            known[variable] = self.constant(value), value
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
        primitive, parameters = equation.primitive, equation.params
        if primitive.name == "slice" and (number := self.cut(parameters, nodes[0])) is not None:
            value = values[0][number : number + 1]
            piece = self.piece(nodes[0], number, value.shape[1:])
            return [(self.add(Node("view", (piece,), value.shape, "slice", piece.parameters, fixed=True)), value)]
        if primitive.name == "scan":
            return self.scan(equation, nodes, values)
        if primitive.name == "cond":
            branch = parameters["branches"][int(values[0])]
            return self.run(*_opened(branch), nodes[1:], values[1:])
        inner = next((parameters[key] for key in ("jaxpr", "call_jaxpr", "fun_jaxpr") if key in parameters), None)
        if inner is not None and primitive.name != "while":
            return self.run(*_opened(inner), nodes, values)
        returned = primitive.bind(*values, **parameters)
        outputs = []
        for place, value in enumerate(returned if primitive.multiple_results else [returned]):
            node = of_jax(primitive.name, parameters, nodes, tuple(np.shape(value)))
            node.others = tuple(argument for argument in nodes if argument not in node.inputs)
            if not self.measures:
                outputs.append((self.seen(node, value), value))
                continue
            is_key = str(value.dtype).startswith("key<")
            if keeps_rows(node) and not is_key:
                node.rows = _rows(value)
            if node.fixed and not is_key and has_summary(value.size) and _kind(value.dtype) in "fc":
                node.about |= summary_of(np.asarray(value))
            if node.kind == "contraction":
                axes, _ = parameters["dimension_numbers"]
                node.about["sums"] = [_sums(operand, dims) for operand, dims in zip(values, axes, strict=True)]
            if is_move(node):
                node.moved = functools.partial(_same_move, equation, place)
            outputs.append((self.seen(node, value), value))
        return outputs

    def scan(self, equation: Any, nodes: list[Node], values: list[Any]) -> list[tuple[Node, Any]]:
        """The steps of a loop; stacked parameters are cut into those of its steps."""
        parameters = equation.params
        (jaxpr, held), length = _opened(parameters["jaxpr"]), parameters["length"]
        # A stacked array has one axis more outside than inside.
        carries = sum(a.aval.ndim == b.aval.ndim for a, b in zip(equation.outvars, jaxpr.outvars, strict=True))
        stacks_in = sum(a.aval.ndim != b.aval.ndim for a, b in zip(equation.invars, jaxpr.invars, strict=True))
        consts = len(values) - carries - stacks_in
        pairs = list(zip(nodes, values, strict=True))
        constants, carry, stacked = pairs[:consts], pairs[consts : consts + carries], pairs[consts + carries :]
        stacks: list[list[tuple[Node, Any]]] = []
        for number in range(length - 1, -1, -1) if parameters["reverse"] else range(length):
            pieces = [(self.piece(node, number, value.shape[1:]), value[number]) for node, value in stacked]
            given = [*constants, *carry, *pieces]
            outputs = self.run(jaxpr, held, [node for node, _ in given], [value for _, value in given])
            carry = outputs[:carries]
            stacks.append(outputs[carries:])
        stacks = stacks[::-1] if parameters["reverse"] else stacks
        joined = []
        for steps in zip(*stacks, strict=True):
            stack = np.stack if self.measures else sys.modules["jax.numpy"].stack
            value = stack([value for _, value in steps])
            live = tuple(node for node, _ in steps if not node.fixed)
            joined.append((self.add(Node("join", live, value.shape, "stack", fixed=not live)), value))
        return [*carry, *joined]

    def cut(self, parameters: Mapping[str, Any], node: Node) -> int | None:
        """The number of a layer in a stack of all layers, if a slice is that of one."""
        first, last, shape = parameters["start_indices"], parameters["limit_indices"], node.shape
        whole = tuple(first[1:]) == (0,) * (len(shape) - 1) and tuple(last[1:]) == shape[1:]
        stack = node.kind == "parameter" and node.operation in self.stacks
        return first[0] if stack and whole and last[0] == first[0] + 1 else None

    def piece(self, node: Node, number: int, shape: tuple[int, ...]) -> Node:
        """One of the arrays in a stack; of a parameter it is a parameter."""
        stack = node
        while stack.kind == "view" and stack.fixed and stack.inputs and stack.inputs[0].shape == stack.shape:
            stack = stack.inputs[0]
        if stack.kind == "parameter":
            name = f"{stack.operation}[{number}]"
            self.arrays[name] = self.arrays[stack.operation][number]
            self.stacked.add(stack.operation)
            return self.parameter(name)
        uniform = dict(node.about) if node.about.get("uniform") else {}
        return self.add(Node("view", (node,), shape, "slice", node.parameters, fixed=node.fixed, about=uniform))


def _stacks(jaxpr: Any, names: list[str]) -> set[str]:
    """Arrays of which a function uses nothing but each of the parts along the first axis."""
    parts: dict[Any, set[int]] = {variable: set() for variable in jaxpr.invars[: len(names)]}
    for equation in jaxpr.eqns:
        for variable in equation.invars:
            if not hasattr(variable, "val") and variable in parts:
                first = equation.params.get("start_indices", (-1,)) if equation.primitive.name == "slice" else (-1,)
                parts[variable].add(first[0])
    stacks = set()
    for name, (variable, numbers) in zip(names, parts.items(), strict=True):
        layers = variable.aval.shape[0] if variable.aval.shape else 0
        if layers > 1 and numbers == {*range(layers)}:
            stacks.add(name)
    return stacks


def _same_move(equation: Any, place: int, values: Any) -> Any:
    """The same move of another array."""
    parameters = dict(equation.params)
    if equation.primitive.name == "convert_element_type":
        return values
    returned = equation.primitive.bind(np.asarray(values), **parameters)
    return returned[place] if equation.primitive.multiple_results else returned


def _sums(value: Any, axes: tuple[int, ...]) -> tuple[float, float, float] | None:
    x = np.asarray(value, np.float32)
    if x.ndim < 2 or len(axes) != 1 or not x.size:
        return None
    other_axis = x.ndim - 2 if axes[0] == x.ndim - 1 else x.ndim - 1
    return sums_over(x, axes[0], other_axis, str(value.dtype))
