"""One pass of a model of any library, whose residual branches are shown to an observer."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.observation._arrays import as_array
from sdeinfer.observation._branch_observer import BranchObserver


class Recorder:
    """The branches of one network, and how often and in which order they were seen.

    Nothing is raised during the pass, in which JAX would wrap it: `finish` raises.

    Arguments:
        observer: takes each branch once it is complete.
        branches: (kind, module) or (kind, reader, writer) of each branch.
        names: the name of each module in the model, by its id.

    Raises:
        InputError: for no branch, and other entries.
    """

    def __init__(self, observer: BranchObserver, branches: Iterable[Any], names: Mapping[int, str]):
        self._observer = observer
        self._branches = list(branches)
        self._calls: list[tuple[int, str]] = []
        self._error: InputError | None = None
        self._input: Any = None
        if not self._branches:
            raise InputError("branches: no branch was given")
        for each in self._branches:
            if not isinstance(each, tuple | list) or len(each) not in (2, 3) or not isinstance(each[0], str):
                raise InputError(f"branches: (kind, module) or (kind, reader, writer) is needed, got {shown(each)}")
        self._expected = [(number, part) for number, part, _ in self.ends()]
        self._in_order = True
        self._names = [names.get(id(each[1]), f"{each[0]}.{b}") for b, each in enumerate(self._branches)]

    def ends(self) -> Iterator[tuple[int, str, Any]]:
        """The number of a branch, the part of it, and the module where that is seen."""
        for number, (_, reader, *writer) in enumerate(self._branches):
            yield number, "input", reader
            yield number, "increment", writer[0] if writer else reader

    def label(self, number: int) -> str:
        """A branch in errors."""
        return f"network {self._observer.network}, branch {number} ({self._names[number]})"

    def see(self, number: int, part: str, values: Any) -> None:
        """Take what a branch reads or adds."""
        self._calls.append((number, part))
        self._in_order &= self._calls == self._expected[: len(self._calls)]
        if self._error is not None or not self._in_order:
            return
        try:
            array = np.array(as_array(values, f"{part}: {self.label(number)}"))  # a copy: modules change U in place
            if part == "input":
                self._input = array
                return
            if array.shape != self._input.shape:
                shapes = f"reads shape {self._input.shape} and adds {array.shape}"
                raise InputError(f"branches: {self.label(number)}: {shapes}: one shape is needed")
            self._observer.add(self._input, array, kind=self._branches[number][0], name=self._names[number])
        except InputError as error:
            self._error = error

    def finish(self) -> None:
        """Check the pass.

        Raises:
            InputError: as `BranchObserver.add`, and for branches that were not called once and in order.
        """
        for number, part in self._expected:
            if (number, part) not in self._calls:
                raise InputError(
                    f"branches: {self.label(number)}: its {part} is not seen: the model does not call the module, or a "
                    "fused kernel replaces it"
                )
        if not self._in_order:
            # Every part was seen, so that the first one out of place is among the calls.
            wrong = next(b for b, call in enumerate(self._calls) if call != (*self._expected, None)[b])
            raise InputError(f"branches: {self.label(self._calls[wrong][0])}: is called twice or out of order")
        if self._error is not None:
            raise self._error


def first_array(arguments: tuple, keywords: Mapping[str, Any]) -> int | str | None:
    """The place of the first array, an index or a keyword; `hidden_states` comes before other keywords."""
    for place, value in enumerate(arguments):
        if hasattr(value, "shape"):
            return place
    order = sorted(keywords, key=lambda name: name != "hidden_states")
    return next((name for name in order if hasattr(keywords[name], "shape")), None)


def tapped_call(
    call: Callable[..., Any], taps: Sequence[tuple[int, str, Recorder]], arguments: tuple, keywords: dict[str, Any]
) -> Any:
    """Call a module of JAX, and show what it gets and returns to recorders, see `_tap`."""
    place, given = first_array(arguments, keywords), {**dict(enumerate(arguments)), **keywords}
    for number, part, recorder in taps:
        if part == "input" and place is not None:
            given[place] = _tap(given[place], number, part, recorder)
    output = call(*(given[index] for index in range(len(arguments))), **{name: given[name] for name in keywords})
    for number, part, recorder in taps:
        if part == "increment":
            first, *others = output if isinstance(output, tuple) else (output,)
            first = _tap(first, number, part, recorder)
            output = (first, *others) if isinstance(output, tuple) else first
    return output


class Tapped(eqx.Module):
    """An Equinox module, with its attributes, whose input or output is seen."""

    recorded_tap: tuple[int, str, Recorder] = eqx.field(static=True)
    recorded_module: Any

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the module."""
        return tapped_call(self.recorded_module, [self.recorded_tap], arguments, keywords)

    def __getattr__(self, name: str) -> Any:
        """The module's attribute."""
        if name == "recorded_module":  # while it is being built
            raise AttributeError(name)
        return getattr(self.recorded_module, name)


def _tap(values: Any, number: int, part: str, recorder: Recorder) -> Any:
    """An array, unchanged; a callback shows it with the axes of all `jax.vmap` around it, the outermost first."""

    def show(values: Any) -> np.ndarray:
        recorder.see(number, part, values)
        return np.asarray(values)

    return jax.pure_callback(
        show, jax.ShapeDtypeStruct(values.shape, values.dtype), values, vmap_method="broadcast_all"
    )
