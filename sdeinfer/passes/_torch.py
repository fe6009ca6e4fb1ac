"""The record of a pass through a module of PyTorch, by its dispatch mode: what it computes, whoever calls it.

Tests: `tests/auditing/test_torch_audit.py`.
"""

import contextlib
import dataclasses
import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sdeinfer._files import InputError
from sdeinfer.passes._inputs import Inputs
from sdeinfer.passes._models import named, with_names
from sdeinfer.passes._operations import of_torch
from sdeinfer.passes._record import SAMPLED_ENTRIES, Node, Record, StoredTensor, Watch
from sdeinfer.passes._recorder import Recorder, has_summary, is_move, is_vector, keeps_rows, summary_of, sums_over

ONE_THREAD_PARAMETERS = 10_000_000
"""Number of parameters below which a pass takes one thread: others wait for each other longer than they compute."""


def record_of(module: Any, inputs: Inputs, watch: Watch | None = None) -> Record:
    """Run a module once, without gradients and in evaluation mode; it is left as it was.

    Arguments:
        module: the module.
        inputs: its positional and its keyword arguments.
        watch: for each watched node, by its order, the function that takes its tensor.
    """
    torch = sys.modules["torch"]
    every_name = with_names(module.named_parameters(remove_duplicate=False))
    parameters = {names[0]: tensor for names, tensor in every_name}
    buffers = named(module.named_buffers(remove_duplicate=False))
    for name, tensor in parameters.items():
        if tensor.is_meta:
            raise InputError(f"model: {name} is on the device 'meta': give it memory, as by model.to_empty()")
        if not (tensor.is_floating_point() or tensor.is_complex()):
            raise InputError(f"model: {name} is {tensor.dtype}: quantised weights are not those of a recipe")
    tap = _tap_class()(parameters, buffers, watch or {})
    args, kwargs = inputs
    for tensor in _tensors([*args, *kwargs.values()]):
        tap.know(tensor, Node("input", (), tuple(tensor.shape), rows=_rows(tensor)))
    with _evaluation(module), torch.no_grad(), tap:
        returned = module(*args, **kwargs)
    return Record(
        type(module).__name__,
        tap.nodes,
        {names[0]: parameter_of(tensor, names[1:]) for names, tensor in every_name},
        {name: parameter_of(tensor) for name, tensor in buffers.items()},
        [tap.node_of(tensor) for tensor in _tensors(returned)],
        lambda shape: torch.arange(shape[-1]).expand(shape),
    )


def parameter_of(tensor: Any, other_names: Sequence[str] = ()) -> StoredTensor:
    torch = sys.modules["torch"]
    flat = tensor.detach().reshape(-1)
    flat = flat.real if flat.is_complex() else flat

    def read(index: Any) -> np.ndarray:
        part = flat[index if isinstance(index, slice) else torch.as_tensor(index, device=flat.device)]
        return part.double().cpu().numpy()

    least, largest = (float(end) for end in flat.aminmax()) if flat.numel() else (0.0, 0.0)
    dtype = str(tensor.dtype).split(".")[-1]
    return StoredTensor(tuple(tensor.shape), read, least, largest, dtype, tuple(other_names))


@contextlib.contextmanager
def _evaluation(module: Any) -> Iterator[None]:
    """Evaluation mode, without compiled or fused layers that hide what they compute; all is as before at the end."""
    torch = sys.modules["torch"]
    attention = __import__("torch.nn.attention", fromlist=["sdpa_kernel"])
    modes = [(submodule, submodule.training) for submodule in module.modules()]
    buffers = [
        (buffer, buffer.detach().clone()) for buffer in module.buffers() if buffer is not None and not buffer.is_meta
    ]
    state, fast = torch.get_rng_state(), torch.backends.mha.get_fastpath_enabled()
    compiler = getattr(torch.compiler, "set_stance", None)
    threads = torch.get_num_threads()
    stance = compiler("force_eager") if compiler and "torch._dynamo" in sys.modules else contextlib.nullcontext()
    try:
        module.train()  # some modules forget what they kept of earlier passes
        module.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        if sum(parameter.numel() for parameter in module.parameters()) < ONE_THREAD_PARAMETERS:
            torch.set_num_threads(1)
        with stance, attention.sdpa_kernel(attention.SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch.set_num_threads(threads)
        torch.set_rng_state(state)
        for submodule, mode in modes:
            submodule.training = mode
        with torch.no_grad():
            for buffer, values in buffers:
                if buffer.shape == values.shape and not torch.equal(buffer, values):
                    buffer.copy_(values)


def _tensors(value: Any) -> list[Any]:
    """All tensors of what a call takes or returns, in order."""
    torch = sys.modules["torch"]
    if torch.is_tensor(value):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in _tensors(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _tensors(vars(value))
    return []


def _rows(tensor: Any) -> np.ndarray | None:
    torch = sys.modules["torch"]
    if not tensor.is_floating_point() or tensor.numel() == 0 or tensor.is_meta:
        return None
    if tensor.dim() < 2 or tensor.numel() // max(tensor.shape[-1], 1) > SAMPLED_ENTRIES:
        norm = torch.linalg.vector_norm(tensor, dtype=torch.float64 if tensor.dtype == torch.float64 else torch.float32)
        return np.array([float(norm) ** 2 / tensor.numel()])
    norm = torch.linalg.vector_norm(tensor.float() if tensor.element_size() < 4 else tensor, dim=-1)
    return norm.double().cpu().numpy().ravel() ** 2 / tensor.shape[-1]


def _summary(tensor: Any) -> dict[str, Any]:
    tensor = tensor.detach()
    return summary_of((tensor if tensor.is_complex() else tensor.double()).cpu().numpy())


@functools.cache
def _tap_class() -> type:
    """The class of the tap; PyTorch is imported by whoever has a model of it."""
    mode = __import__("torch.utils._python_dispatch", fromlist=["TorchDispatchMode"]).TorchDispatchMode

    class Tap(_Notes, mode):
        def __init__(self, *arguments: Any):
            mode.__init__(self)
            _Notes.__init__(self, *arguments)

        def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            returned = func(*args, **(kwargs or {}))
            self.note(func, args, kwargs or {}, returned)
            return returned

    return Tap


class _Notes(Recorder):
    """Nodes of the tensors of a pass, for as long as these live."""

    def __init__(self, parameters: dict[str, Any], buffers: dict[str, Any], watch: Watch):
        super().__init__(watch)
        self.known: dict[int, tuple[Any, Node]] = {}
        self.in_memory: dict[int, list[int]] = {}
        self.storages: dict[int, tuple[str, str]] = {}
        for kind, tensors in (("buffer", buffers), ("parameter", parameters)):
            for name, tensor in tensors.items():
                if tensor.numel():
                    self.storages[_memory(tensor)] = kind, name
                self.know(tensor, self._fixed(tensor, kind, name))

    def _fixed(self, tensor: Any, kind: str, name: str) -> Node:
        shape, names = tuple(tensor.shape), (name,) if kind == "parameter" else ()
        summarised = has_summary(tensor.numel()) and (kind != "parameter" or is_vector(shape))
        return Node(kind, (), shape, name, names, fixed=True, about=_summary(tensor) if summarised else {})

    def know(self, tensor: Any, node: Node) -> Node:
        if node.order < 0:
            self.add(node)
            if node.order in self.watch:
                self.watch[node.order](tensor.detach().clone())  # modules change tensors in place
        self.known[id(tensor)] = weakref.ref(tensor), node
        self.in_memory.setdefault(_memory(tensor), []).append(id(tensor))
        return node

    def node_of(self, tensor: Any) -> Node:
        reference, node = self.known.get(id(tensor), (None, None))
        if reference is not None and node is not None and reference() is tensor:
            return node
        kind, name = self.storages.get(_memory(tensor), ("constant", ""))
        node = self._fixed(tensor, kind, name)
        if kind == "constant" and tensor.requires_grad and tensor.is_leaf:
            node.about["trains"] = True
        return self.know(tensor, node)

    def note(self, operation: Any, args: tuple, kwargs: dict[str, Any], returned: Any) -> None:
        """Add the nodes of what an operation returned."""
        name = operation._schema.name.split("::")[-1]
        in_place = name.endswith("_") and not name.endswith("__")
        name = name.rstrip("_") if in_place else name
        outputs = _tensors(returned)
        if not outputs or name in ("empty", "empty_like", "new_empty", "empty_strided", "resize"):
            return
        tensors = _tensors([*args, *kwargs.values()])
        inputs = [self.node_of(tensor) for tensor in tensors]
        first = outputs[0]
        if not in_place and any(first is operand for operand in tensors):
            return
        node = of_torch(name, args, kwargs, inputs, tuple(first.shape))
        node.others = tuple(argument for argument in inputs if argument not in node.inputs)
        self._measure(node, first, tensors)
        self.know(first, node)
        moves = is_move(node) and not in_place and len(tensors) == 1
        for place, output in enumerate(outputs):  # pieces of one tensor, or statistics
            piece = node
            if place:
                kind = "view" if node.kind == "view" else "other"
                piece = Node(kind, node.inputs, tuple(output.shape), name, node.parameters, fixed=node.fixed)
                piece.others = node.others
                piece.rows = None if node.rows is None else _rows(output)
                self.know(output, piece)
            if moves:
                piece.moved = _same_move(operation, args, kwargs, place)
        if in_place:
            self._written(first, node)

    def _measure(self, node: Node, tensor: Any, tensors: list[Any]) -> None:
        if keeps_rows(node):
            node.rows = _rows(tensor)
        if node.kind == "contraction" and not node.fixed and len(tensors) == 2:
            node.about["sums"] = [_sums(operand, axis) for operand, axis in zip(tensors, (-1, -2), strict=True)]
        if node.fixed and has_summary(tensor.numel()) and tensor.is_floating_point():
            node.about |= _summary(tensor)

    def _written(self, tensor: Any, node: Node) -> None:
        """Tell the other tensors of this memory, of which it may be a view, that it was written to."""
        alive = []
        for key in dict.fromkeys(self.in_memory.get(_memory(tensor), ())):
            reference, past = self.known[key]
            alias = reference()
            if alias is None or _memory(alias) != _memory(tensor):
                continue
            alive.append(key)
            if alias is not tensor:
                inputs = (node,) if past.fixed else (past, node)
                self.know(alias, Node("join", inputs, tuple(alias.shape), "written", fixed=past.fixed and node.fixed))
        self.in_memory[_memory(tensor)] = alive


def _memory(tensor: Any) -> int:
    return tensor.untyped_storage().data_ptr() if str(tensor.layout) == "torch.strided" else 0


def _same_move(operation: Any, args: tuple, kwargs: dict[str, Any], place: int) -> Callable[[Any], Any]:
    """The same move of another tensor, without the tensor."""
    torch = sys.modules["torch"]
    if not (args and torch.is_tensor(args[0])):
        return lambda values: None
    tail, options = args[1:], {key: value for key, value in kwargs.items() if key not in ("dtype", "device", "layout")}

    def moved(values: Any) -> Any:
        return _tensors(operation(values, *tail, **options))[place]

    return moved


def _sums(tensor: Any, axis: int) -> tuple[float, float, float] | None:
    if tensor.dim() < 2 or not tensor.is_floating_point() or not tensor.numel():
        return None
    return sums_over(tensor.float(), axis, -3 - axis, str(tensor.dtype).split(".")[-1])
