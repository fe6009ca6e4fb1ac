"""Audits that are given up after some time, with the reason in their row."""

import contextlib
import signal
import traceback
from collections.abc import Iterator
from typing import Any

import sdeinfer as si


class TimeOut(BaseException):
    """The time of a model is over."""


@contextlib.contextmanager
def limited(row: dict[str, Any], seconds: int) -> Iterator[None]:
    """Note in the row of a model why its audit has no result: refused, too slow, or a traceback."""

    def stop(*_: object) -> None:
        raise TimeOut

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    except si.InputError as error:
        row["refused"] = str(error)
    except TimeOut:
        row["refused"] = "too slow"
    except Exception:
        row["traceback"] = traceback.format_exc()[-600:]
    finally:
        signal.alarm(0)
