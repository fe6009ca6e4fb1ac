"""Models of a seed, or of PyTorch's generator alone. Tests: `tests/auditing/test_audit.py`."""

import inspect
from collections.abc import Callable
from typing import Any


def of_seed(make: Callable[..., Any], seed: int) -> Any:
    """Call with a seed: of a function that names one, or that needs one argument; without it otherwise."""
    parameters = inspect.signature(make).parameters
    if "seed" in parameters:
        return make(seed=seed)
    needed = [
        argument
        for argument in parameters.values()
        if argument.default is argument.empty and argument.kind < argument.KEYWORD_ONLY
    ]
    return make(seed) if needed and not isinstance(make, type) else make()
