"""Programs in threads: JAX's precision and default device belong to a thread, and each program is compiled once.

Tests: `tests/test_devices.py`.
"""

import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import jax


def on_cpu() -> bool:
    """Whether programs run on a CPU."""
    device = jax.config.jax_default_device
    if device is None:
        return jax.default_backend() == "cpu"
    return (device if isinstance(device, str) else device.platform) == "cpu"


def as_in_this_thread[**P, T](function: Callable[P, T]) -> Callable[P, T]:
    """Wrap a function so that it runs in any thread with this thread's precision and default device."""
    x64, device = jax.config.jax_enable_x64, jax.config.jax_default_device

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        with jax.enable_x64(x64), jax.default_device(device):
            return function(*args, **kwargs)

    return wrapped


def in_threads[S, T](
    run: Callable[[S], T], items: Sequence[S], *, alone: int = 1, done: Callable[[T], object] = lambda result: None
) -> list[T]:
    """Results of a function that runs programs, called in threads: one for each core, or for an accelerator.

    The first `alone` calls end before others start: threads that start together would each compile the same program.
    `done` is called with each result in this thread, in order.
    """
    results, pool = [], ThreadPoolExecutor(os.cpu_count() if on_cpu() else 1)
    try:
        for call, some in ((map, items[:alone]), (pool.map, items[alone:])):
            for result in call(as_in_this_thread(run), some):
                done(result)
                results.append(result)
    finally:
        pool.shutdown(cancel_futures=True)
    return results
