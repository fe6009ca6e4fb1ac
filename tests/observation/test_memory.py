"""Memory that observing takes, measured in a process of its own."""

import subprocess
import sys

import pytest

LAYERS, TOKENS, WIDTH = 64, 512, 4096

PROGRAM = f"""
import resource
import sys

import numpy as np

import sdeinfer as si

def states():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((1, {TOKENS}, {WIDTH}), dtype=np.float32)
    for _ in range({LAYERS} + 1):
        yield X
        X += rng.standard_normal(X.shape, dtype=np.float32)

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

for state in states():  # what it takes to make them, and what libraries take
    state @ np.swapaxes(state, -1, -2)
before = peak()
data = si.observe(states())
print(before, peak(), data["covariance"].nbytes / 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the unit of memory depends on the system")
def test_the_peak_is_about_a_layer_and_the_covariances():
    run = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True)
    before, peak, covariances = map(float, run.stdout.split())
    layer = TOKENS * WIDTH * 4 / 2**20
    print(f"before {before:.0f} MiB, peak {peak:.0f} MiB, a layer {layer:.0f} MiB, covariances {covariances:.0f} MiB")
    # The covariances are there twice while they are put together.
    assert peak - before < 2 * layer + 2 * covariances + 32
