"""The current phase, on one line of standard error in a terminal or notebook, cleared at the end."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

_line: ContextVar[tqdm | None] = ContextVar("_line", default=None)


@contextmanager
def progress_line(*, show: bool) -> Iterator[None]:
    """Show a line with the name of the current phase, if anybody watches; a nested call keeps the outer line."""
    if not show or _line.get() is not None or not _watched():
        yield
        return
    with tqdm(bar_format="{desc}", leave=False, position=0) as line:
        token = _line.set(line)
        try:
            yield
        finally:
            _line.reset(token)


def phase(text: str) -> None:
    """Show the name of the next phase, if there is a line; "" clears the line."""
    line, text = _line.get(), f"{text} …" if text else ""
    if line is not None and text != line.desc:
        line.set_description_str(text)


def done(share: float) -> None:
    """Show what share of the phase's pass over the data is done, if there is a line."""
    if (line := _line.get()) is not None and share > 0:
        line.set_description_str(f"{line.desc.split(' …')[0]} … {share:.0%}")


def with_progress_line[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that its keyword `progress` opens the line for its phases."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with progress_line(show=bool(kwargs.get("progress", False))):
            return function(*args, **kwargs)

    return wrapped


class ProgressBar(tqdm):
    """A bar for a step longer than two seconds, which replaces the name of the phase on the line."""

    def __init__(self, *, total: int, desc: str, show: bool, **settings: Any) -> None:
        super().__init__(total=total, desc=desc, disable=not show, delay=2, position=0, **settings)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Show the bar."""
        line = _line.get()
        if line is not None:
            line.clear(nolock=True)  # tqdm calls this method with the lock held
        super().display(msg, pos)


def _watched() -> bool:
    return _in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def _in_notebook() -> bool:
    """Whether this process is a notebook kernel; a program that starts a kernel imports IPython as well."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None
