"""What is compiled: how far the compiler optimises, and for which sizes."""

import math

RUN_ONCE: dict[str, bool | int | float | str] = {"xla_backend_optimization_level": 0}
"""For programs that take longer to compile than to run: half the compilation, but a run several times slower."""

BALANCED: dict[str, bool | int | float | str] = {"xla_backend_optimization_level": 1}
"""For the largest programs: three quarters of the compilation, and a run as fast."""


def padded_size(count: int, *, least: int) -> int:
    """The smallest of least, 4 · least, 16 · least, … that is not smaller: few sizes are compiled for."""
    return least * 4 ** max(0, math.ceil(math.log(count / least, 4) - 1e-9))
