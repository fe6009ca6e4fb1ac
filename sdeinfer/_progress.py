"""What is being done, on one line on standard error: on a terminal or in a notebook, and cleared at the end."""

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
    """A line for the names of phases.

    Within another one there is no second line. In a pipe or a file there is none.
    """
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
    """Name on the line, where there is one, what comes next; with "" clear the line."""
    line, text = _line.get(), f"{text} …" if text else ""
    if line is not None and text != line.desc:
        line.set_description_str(text)


def with_progress_line[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """A function whose keyword `progress` opens the line for the phases in it."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with progress_line(show=bool(kwargs.get("progress", False))):
            return function(*args, **kwargs)

    return wrapped


class ProgressBar(tqdm):
    """A bar for a step that is longer than two seconds; it replaces the name of the phase on the line."""

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
    """Whether this process is a notebook's kernel; programs that start one have merely imported it."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None
