"""Fits of 300 shapes in one process: the memory maps of its compiled programs, of which Linux allows 65,530.

pytest -m benchmark -s tests/benchmarks/test_memory_maps.py       # an hour on one core
"""

import itertools
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax.random as jr
import pytest

import sdeinfer as si
from sdeinfer.layers import Architecture

SHAPES = 300
TOKENS = range(2, 10)
LEAST_PEAK = 10_000
"""So many maps show that the programs of several shapes were in the process together."""


def kinds() -> Iterator[Architecture]:
    """Architectures and sizes, each of which has programs of its own."""
    yield Architecture("mlp")
    yield from (Architecture("feedforward", expansion=expansion) for expansion in (1, 2, 4))
    for pattern, heads, projection in itertools.product((si.Pattern(), si.CAUSAL), (1, 2, 4), (False, True)):
        attention = {"heads": heads, "output_projection": projection, "pattern": pattern}
        yield Architecture("attention", **attention)
        yield from (Architecture("transformer", expansion=expansion, **attention) for expansion in (1, 2, 4))


def maps() -> int:
    return Path("/proc/self/maps").read_bytes().count(b"\n")


def fit(kind: Architecture, tokens: int) -> None:
    values = {"gamma": 0.5, "tau0": 1.0, "c_plus": 1.0, "c_minus": -1.0}
    layer = kind.layer(**{name: values[name] for name in kind.parameters})
    V0 = si.equicorrelated(tokens=tokens, correlation=0.1)
    data = si.sample_networks(layer, V0, width=96, depth=4, networks=8, key=jr.key(tokens))
    settings = {"architecture": kind, "chains": 1, "draws": 20, "warmup": 20, "predictions": 2}
    si.fit(si.models.full_path, data, **settings, key=jr.key(0))


@pytest.mark.benchmark
def test_a_process_lives_through_many_shapes():
    environment = os.environ | {"JAX_ENABLE_X64": "1", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    command = [sys.executable, "-W", "ignore", __file__]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = []
        for line in process.stdout:
            print(line, end="", flush=True)
            found.append(int(line.split()[0]))
    allowed = int(Path("/proc/sys/vm/max_map_count").read_text())
    dropped = sum(later < earlier for earlier, later in itertools.pairwise(found))
    print(f"\n{len(found)} shapes: at most {max(found)} of {allowed} maps; programs were dropped {dropped} times")
    assert process.returncode == 0
    assert len(found) == SHAPES
    assert LEAST_PEAK < max(found) < allowed


if __name__ == "__main__":
    for kind, tokens in itertools.islice(itertools.product(kinds(), TOKENS), SHAPES):
        fit(kind, tokens)
        print(maps(), tokens, kind, flush=True)
