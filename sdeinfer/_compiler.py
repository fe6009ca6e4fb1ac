"""How programs that run once are compiled, for which array sizes, and room for more programs.

Tests: `tests/test_cache.py`.
"""

import gc
import math
import time
from pathlib import Path

from sdeinfer._files import InputError

RUN_ONCE: dict[str, bool | int | float | str] = {"xla_backend_optimization_level": 0}
"""Compiler options of programs that take longer to compile than to run: half the compile time, several times the run
time. Without them a first run of README's example takes an eighth more CPU seconds."""


def padded_size(count: int, *, least: int) -> int:
    """The smallest of least, 4 · least, 16 · least, … that is at least `count`, so that few sizes are compiled."""
    return least * 4 ** max(0, math.ceil(math.log(count / least, 4) - 1e-9))


_looked = -math.inf


def make_room() -> None:
    """Drop all compiled programs of the process where memory maps run out; they are compiled again when needed.

    XLA takes three maps for every kernel, 1,500 to 1,900 for a fit of a new shape, and ends the process where Linux
    allows no more. The results do not change. Inside of a JAX transformation nothing is dropped.
    """
    global _looked
    limit = Path("/proc/sys/vm/max_map_count")
    if time.monotonic() < _looked + 1 or not limit.exists():
        return
    import jax
    import jax.numpy as jnp
    from jax.core import Tracer

    _looked, allowed = time.monotonic(), int(limit.read_text())
    if _maps() < 0.5 * allowed or isinstance(jnp.zeros(()), Tracer):
        return
    jax.clear_caches()
    gc.collect()
    if (left := _maps()) > 0.8 * allowed:
        raise InputError(
            f"memory maps: the process holds {left} of the {allowed} that Linux allows it, and compiling needs more: "
            "start a new process, or raise vm.max_map_count"
        )


def _maps() -> int:
    return Path("/proc/self/maps").read_bytes().count(b"\n")
