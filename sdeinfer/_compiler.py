"""Compiler options, and the array sizes for which programs are compiled."""

import math

RUN_ONCE: dict[str, bool | int | float | str] = {"xla_backend_optimization_level": 0}
"""For programs that take longer to compile than to run: half the compile time, but several times the run time."""

BALANCED: dict[str, bool | int | float | str] = {"xla_backend_optimization_level": 1}
"""For the largest programs: three quarters of the compile time and the same run time."""


def padded_size(count: int, *, least: int) -> int:
    """The smallest of least, 4 · least, 16 · least, … that is at least `count`, so that few sizes are compiled."""
    return least * 4 ** max(0, math.ceil(math.log(count / least, 4) - 1e-9))
