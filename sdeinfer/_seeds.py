"""Models of a seed, or of PyTorch's generator alone. Tests: `tests/auditing/test_audit.py`."""

import inspect
from collections.abc import Callable
from typing import Any


def of_seed(make: Callable[..., Any], seed: int) -> Any:
    """Call with a seed; without one if a function takes no argument, or a type names no `seed`."""
    signature = inspect.signature(make)
    if isinstance(make, type):
        return make(seed=seed) if "seed" in signature.parameters else make()
    try:
        signature.bind(seed)
    except TypeError:
        return make()
    return make(seed)
