"""Libraries that only some users need."""

import importlib
from typing import Any

from sdeinfer._files import InputError


def library(name: str) -> Any:
    """Import an optional library, whose extra has its name.

    Raises:
        InputError: where it is not installed.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise InputError(f"{package}: not installed; pip install sdeinfer[{package}]") from error
