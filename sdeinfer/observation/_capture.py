"""One pass of a network of PyTorch, Flax or Equinox, with taps at modules, which show an observer what passes there."""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from sdeinfer._arguments import at_least_one, shown
from sdeinfer._files import InputError
from sdeinfer._progress import ProgressBar
from sdeinfer._seeds import of_seed
from sdeinfer.observation._arrays import as_array, first_array, library


class Tap(NamedTuple):
    """A module, and what is seen of it: its "input", the first array that it gets, or what it returns."""

    where: str
    part: str
    module: Any


class Recorder:
    """The taps of one pass, in the order in which they must be seen, each once."""

    def __init__(self, what: str, taps: Sequence[Tap], take: Callable[[int, np.ndarray], None]):
        self.what, self.taps = what, taps
        self._take = take
        self._seen: list[int] = []
        self._in_order = True
        self._error: InputError | None = None

    def see(self, number: int, values: Any) -> None:
        """Take what the tap of a number shows."""
        self._in_order &= number == len(self._seen)
        self._seen.append(number)
        if self._error is None and self._in_order:
            tap = self.taps[number]
            try:  # `finish` raises: JAX would wrap errors of the pass
                self._take(number, as_array(values, f"{tap.part}: {tap.where}"))
            except InputError as error:
                self._error = error

    def finish(self) -> None:
        """Check the pass."""
        for number, tap in enumerate(self.taps):
            if number not in self._seen:
                raise InputError(
                    f"{self.what}: {tap.where}: its {tap.part} is not seen: the model does not call the module, "
                    "or a fused kernel replaces it"
                )
        for expected, number in enumerate(self._seen):
            if number != expected:
                raise InputError(f"{self.what}: {self.taps[number].where}: is called twice or out of order")
        if self._error is not None:
            raise self._error

    def by_module(self, kind: type, modules: str) -> dict[int, list[int]]:
        """The numbers of the taps of each module, by its id."""
        found = defaultdict(list)
        for number, tap in enumerate(self.taps):
            if not isinstance(tap.module, kind):
                raise InputError(f"{self.what}: {tap.where}: {modules} is needed, got {shown(tap.module)}")
            found[id(tap.module)].append(number)
        return found


def one_by_one[Part](observed: Callable[[int], Part], networks: int, *, progress: bool) -> list[Part]:
    """Observe each network, by its number, with one network in memory at a time."""
    at_least_one(networks=networks)
    found = []
    with ProgressBar(total=networks, desc="networks", show=progress) as bar:
        for number in range(networks):
            found.append(observed(number))
            bar.update()
    return found


def torch_pass(model: Any, inputs: Any, recorder: Recorder) -> None:
    """Run a module of PyTorch once, in evaluation mode and without gradients, with hooks."""
    torch = library("torch")

    def before(number: int, module: Any, arguments: tuple, keywords: dict) -> None:
        del module
        place = first_array(arguments, keywords)
        if place is not None:  # otherwise `finish` says that nothing was seen
            recorder.see(number, keywords[place] if isinstance(place, str) else arguments[place])

    def after(number: int, module: Any, arguments: tuple, output: Any) -> None:
        del module, arguments
        recorder.see(number, output[0] if isinstance(output, tuple) else output)

    with ExitStack() as stack:
        for number, tap in enumerate(recorder.taps):
            if tap.part == "input":
                hook = tap.module.register_forward_pre_hook(functools.partial(before, number), with_kwargs=True)
            else:
                hook = tap.module.register_forward_hook(functools.partial(after, number))
            stack.callback(hook.remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluated(torch, model))
        torch_called(torch, model, inputs)
    recorder.finish()


def torch_names(model: Any) -> dict[int, str]:
    """The name of each module in a model of PyTorch, by its id."""
    return {id(module): name for name, module in model.named_modules()}


def torch_network(torch: Any, make: Callable[[int], Any], seed: int, number: int) -> Any:
    """Draw a network of PyTorch by a seed of its own; the state of PyTorch's generators is restored."""
    own = int(np.random.SeedSequence(seed).generate_state(number + 1)[number])
    with torch.random.fork_rng():
        torch.manual_seed(own)
        return of_seed(make, own)


def torch_called(torch: Any, model: Any, inputs: Any) -> Any:
    """The output of a module of PyTorch, of arrays of NumPy and numbers as tensors where its weights are."""

    def tensor(value: Any) -> Any:
        if isinstance(value, torch.Tensor) or not (isinstance(value, np.ndarray) or _numbers(value)):
            return value
        weights = next((each for each in model.parameters() if each.is_floating_point()), torch.zeros(()))
        found = torch.as_tensor(value, device=weights.device)
        return found.to(weights.dtype) if found.is_floating_point() else found

    given = isinstance(inputs, Mapping)
    # A compiled module runs as it is without: its graph would have the hooks in it.
    with torch.compiler.set_stance("force_eager"):
        return _called(model, {name: tensor(each) for name, each in inputs.items()} if given else tensor(inputs))


@contextmanager
def evaluated(torch: Any, model: Any) -> Iterator[None]:
    """Evaluation mode, without the kernels that replace the modules of a Transformer's block."""
    modes = [(module, module.training) for module in model.modules()]
    fast = torch.backends.mha.get_fastpath_enabled()
    model.eval()
    try:
        torch.backends.mha.set_fastpath_enabled(False)  # noqa: FBT003
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        for module, mode in modes:
            module.training = mode


def flax_pass(model: Any, inputs: Any, recorder: Recorder) -> None:
    """Run a module of Flax once; it keeps the taps, so that it must be a copy."""
    modules = {id(tap.module): tap.module for tap in recorder.taps}
    for each, numbers in recorder.by_module(library("flax.nnx").Module, "a module of Flax").items():
        modules[each].recorded_taps = tuple((number, recorder) for number in numbers)
        object.__setattr__(modules[each], "__class__", _tapped_class(type(modules[each])))
    jax.block_until_ready(jax.tree.leaves(_called(model, inputs)))
    recorder.finish()


def equinox_pass(model: Any, inputs: Any, recorder: Recorder) -> None:
    """Run a module of Equinox once, whose parts are replaced by `_Tapped` ones."""
    paths = module_paths(model)
    for tap in recorder.taps:
        if id(tap.module) not in paths:
            raise InputError(f"{recorder.what}: {tap.where}: is not a module of the model")
    tapped = _with_taps(model, recorder.by_module(eqx.Module, "a module of Equinox"), recorder)
    jax.block_until_ready(jax.tree.leaves(_called(tapped, inputs)))
    recorder.finish()


def module_paths(model: eqx.Module) -> dict[int, str]:
    """The place of each module in the model, by its id."""
    paths = {}

    def note(path: tuple, node: Any) -> bool:
        if isinstance(node, eqx.Module):
            paths[id(node)] = jax.tree_util.keystr(path, simple=True, separator=".")
        return False

    jax.tree_util.tree_flatten_with_path(model, is_leaf=note, is_leaf_takes_path=True)
    return paths


class _Tapped(eqx.Module):
    """An Equinox module, with its attributes, whose input or output is seen."""

    recorded_taps: tuple[tuple[int, Recorder], ...] = eqx.field(static=True)
    recorded_module: Any

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the module."""
        return _tapped_call(self.recorded_module, self.recorded_taps, arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        """The module's attribute."""
        if name == "recorded_module":  # while it is being built
            raise AttributeError(name)
        return getattr(self.recorded_module, name)


def _with_taps(module: eqx.Module, taps: Mapping[int, Iterable[int]], recorder: Recorder) -> eqx.Module:
    """A module whose parts, or which itself, have taps: a writer may be inside a reader."""
    inside = jax.tree.map(
        lambda each: _with_taps(each, taps, recorder) if isinstance(each, eqx.Module) else each,
        module,
        is_leaf=lambda each: each is not module and isinstance(each, eqx.Module),
    )
    own = tuple((number, recorder) for number in taps.get(id(module), ()))
    return _Tapped(own, inside) if own else inside


@functools.cache
def _tapped_class(kind: type) -> type:
    """A class of Flax modules whose calls are seen; a module keeps its identity, and so every reference to it."""

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        return _tapped_call(functools.partial(kind.__call__, self), self.recorded_taps, arguments, keywords)

    return type(kind)(kind.__name__, (kind,), {"__call__": call}, pytree=getattr(kind, "_pytree__is_pytree", True))


def _tapped_call(
    call: Callable[..., Any], taps: Iterable[tuple[int, Recorder]], arguments: tuple, keywords: dict[str, Any]
) -> Any:
    """Call a module of JAX, and show what it gets and returns to recorders."""
    place, given = first_array(arguments, keywords), {**dict(enumerate(arguments)), **keywords}
    reads = [(number, recorder) for number, recorder in taps if recorder.taps[number].part == "input"]
    writes = [tap for tap in taps if tap not in reads]
    for number, recorder in reads if place is not None else ():
        given[place] = _shown(given[place], number, recorder)
    output = call(*(given[index] for index in range(len(arguments))), **{name: given[name] for name in keywords})
    for number, recorder in writes:
        first, *others = output if isinstance(output, tuple) else (output,)
        first = _shown(first, number, recorder)
        output = (first, *others) if isinstance(output, tuple) else first
    return output


def _shown(values: Any, number: int, recorder: Recorder) -> Any:
    """An array, unchanged; a callback shows it with the axes of all `jax.vmap` around it, the outermost first."""

    def show(values: Any) -> np.ndarray:
        recorder.see(number, values)
        return np.asarray(values)

    return jax.pure_callback(
        show, jax.ShapeDtypeStruct(values.shape, values.dtype), values, vmap_method="broadcast_all"
    )


def _called(model: Any, inputs: Any) -> Any:
    """The output for one positional argument, or for a mapping of keyword arguments."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)


def _numbers(value: Any) -> bool:
    """Whether a value is a list of numbers, or of such lists."""
    return isinstance(value, list) and all(_numbers(each) or type(each) in (int, float) for each in value)
