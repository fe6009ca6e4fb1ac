"""Benchmarks print ratios to named peers measured in the same run; run them with `-m benchmark -s`."""

import math
import time
from collections.abc import Callable, Iterator

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


@pytest.fixture
def bounded() -> Iterator[Callable[..., str]]:
    """Says what was found and its bound; the benchmark fails at its end if a bound was missed."""
    missed = []

    def said(name: str, found: float, *, most: float = math.inf, least: float = -math.inf) -> str:
        bounds = [f"at most {most:g}"] * (most < math.inf) + [f"at least {least:g}"] * (least > -math.inf)
        text = f"{name} {found:.3g} ({', '.join(bounds) or 'no bound'})"
        if not least <= found <= most:
            missed.append(text)
        return text

    yield said
    assert not missed, "; ".join(missed)
