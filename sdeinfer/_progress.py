"""The current phase, on one line of standard error in a terminal or notebook, cleared at the end."""

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm import tqdm

DELAY = 2.0
"""Seconds before a function shows what it does."""


class _Line:
    """The name of the phase, which shows after some seconds."""

    def __init__(self, delay: float) -> None:
        self.text = ""
        self._bar: tqdm | None = None
        self._lock, self._timer = threading.RLock(), threading.Timer(delay, self._open)
        if delay > 0:
            self._timer.daemon = True
            self._timer.start()
        else:
            self._open()

    def _open(self) -> None:
        with self._lock:
            if self._timer.finished.is_set():  # closed while it waited for the lock
                return
            self._bar = tqdm(bar_format="{desc}", desc=self.text, leave=False, position=0)

    def show(self, text: str) -> None:
        with self._lock:
            if self._bar is not None and text != self.text:
                self._bar.set_description_str(text)
            self.text = text

    def clear(self) -> None:
        """Make room for a bar; for its `display`, which tqdm calls with its own lock held."""
        if self._bar is not None:
            self._bar.clear(nolock=True)

    def close(self) -> None:
        self._timer.cancel()
        with self._lock:
            if self._bar is not None:
                self._bar.close()


_line: ContextVar[_Line | None] = ContextVar("_line", default=None)


@contextmanager
def progress_line(*, show: bool, delay: float = 0.0) -> Iterator[None]:
    """Show a line with the name of the current phase, if anybody watches; a nested call keeps the outer line."""
    if not show or _line.get() is not None or not _watched():
        yield
        return
    line = _Line(delay)
    token = _line.set(line)
    try:
        yield
    finally:
        _line.reset(token)
        line.close()


def phase(text: str) -> None:
    """Show the name of the next phase, if there is a line; "" clears the line."""
    if (line := _line.get()) is not None:
        line.show(f"{text} …" if text else "")


def done(share: float) -> None:
    """Show what share of the phase's pass over the data is done, if there is a line."""
    if (line := _line.get()) is not None and share > 0:
        line.show(f"{line.text.split(' …')[0]} … {share:.0%}")


def with_progress_line[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that it shows its phases after two seconds, unless its keyword `progress` is False."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with progress_line(show=bool(kwargs.get("progress", True)), delay=DELAY):
            return function(*args, **kwargs)

    return wrapped


class ProgressBar(tqdm):
    """A bar for a step longer than two seconds, which replaces the name of the phase on the line."""

    def __init__(self, *, total: int, desc: str, show: bool, **settings: Any) -> None:
        settings |= {} if show and _watched() else {"disable": True}  # TQDM_DISABLE=1 disables all
        super().__init__(total=total, desc=desc, delay=DELAY, position=0, leave=False, **settings)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Show the bar."""
        if (line := _line.get()) is not None:
            line.clear()
        super().display(msg, pos)


def _watched() -> bool:
    return _in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def _in_notebook() -> bool:
    """Whether this process is a notebook kernel; a program that starts a kernel imports IPython as well."""
    ipython = sys.modules.get("IPython")
    return ipython is not None and getattr(ipython.get_ipython(), "kernel", None) is not None
