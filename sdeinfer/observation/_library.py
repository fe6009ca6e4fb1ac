"""Optional libraries."""

import importlib
from typing import Any

from sdeinfer._files import InputError


def library(name: str, extra: str | None = None) -> Any:
    """Import an optional library.

    Arguments:
        name: name of the module.
        extra: the extra that installs it; None if that has the same name.

    Raises:
        InputError: if it is not installed.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise InputError(f"{package}: not installed; pip install 'sdeinfer[{extra or package}]'") from error
