"""Benchmarks print ratios to named peers measured in the same run; run them with `-m benchmark -s`."""

import time
from collections.abc import Callable

import jax
import pytest


def seconds(run: Callable[[], object], *, repeats: int = 7, least: float = 0.05) -> float:
    """Median time of one call, measured long enough to trust the clock, compilation left out."""
    jax.block_until_ready(run())
    calls, elapsed = 1, 0.0
    while elapsed < least:
        started = time.perf_counter()
        for _ in range(calls):
            result = run()
        jax.block_until_ready(result)
        elapsed = time.perf_counter() - started
        calls *= 2
    calls //= 2
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        for _ in range(calls):
            result = run()
        jax.block_until_ready(result)
        times.append((time.perf_counter() - started) / calls)
    return sorted(times)[repeats // 2]


@pytest.fixture
def timed() -> Callable[..., float]:
    return seconds
