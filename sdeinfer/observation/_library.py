"""Optional libraries."""

import importlib
from typing import Any

from sdeinfer._files import InputError


def library(name: str) -> Any:
    """Import an optional library; the extra that installs it has the same name.

    Raises:
        InputError: if it is not installed.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise InputError(f"{package}: not installed; pip install sdeinfer[{package}]") from error
