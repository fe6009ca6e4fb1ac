"""Tuning at width n over tuning by the limit, and tuning of blocks, each in a process of its own: cold, and warm."""

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.benchmark

SCRIPT = """
import json, sys, time
started = time.perf_counter()
import jax
import numpy as np
jax.config.update("jax_enable_x64", True)
import sdeinfer as si
from sdeinfer.criteria import LargestCorrelation, NormFactor, probability, quantile
imported = time.perf_counter() - started
V0 = np.asarray(si.equicorrelated(tokens=4, correlation=0.2, norm=1.0))
goals = [probability(NormFactor(), below=2) >= 0.95, quantile(LargestCorrelation(), 0.95) <= 0.7]
blocks = si.Stack((
    si.blocks.Block(si.blocks.SelfAttention(heads=4, pattern=si.CAUSAL), norm="layer"),
    si.blocks.Block(si.blocks.MLP(), norm="layer"),
))
known, of_blocks = {"tau0": 1.0, "c_gap": 1.0}, {"gain": 1.0, "temperature": 1.0}
shaped = ("transformer", {"maximise": "gamma", "fixed": known, "depth": 64, "paths": 4096})
settings = {
    "limit": (*shaped, {"law": "limit"}),
    "finite-width": (*shaped, {}),
    "blocks": (blocks, {"maximise": "strength", "fixed": of_blocks, "depth": 12, "paths": 1024}, {}),
}
what, arguments, law = settings[sys.argv[1]]
times = []
for seed in (0, 1, 2):
    started = time.perf_counter()
    found = si.tune(what, V0, width=256, subject_to=goals, key=jax.random.key(seed), **arguments, **law)
    times.append(time.perf_counter() - started)
print(json.dumps([imported, *times, found.found["evaluations"]]))
"""


ROWS = {
    "limit": "γ under two bounds, 64 layers, 4,096 paths, by the limit",
    "finite-width": "the same by width n, 4,096 networks",
    "blocks": "strength of Pre-LN blocks, 12 layers, 1,024 networks",
}


def test_width_over_limit(record):
    """4,096 networks of n = 256 and d = 64; blocks: 1,024 of 12 layers."""
    found = {}
    for name in ("limit", "finite-width", "blocks"):
        run = subprocess.run([sys.executable, "-c", SCRIPT, name], check=True, capture_output=True, text=True)
        imported, cold, *warm, evaluations = json.loads(run.stdout.splitlines()[-1])
        found[name] = (cold, min(warm))
        record("time_of_tuning", {ROWS[name]: [f"{each:.1f} s" for each in (imported, *found[name])]})
        print(f"\n{name}: imports {imported:.1f} s, cold {cold:.1f} s, warm {warm[0]:.1f} and {warm[1]:.1f} s, "
              f"{evaluations} evaluations")  # fmt: skip
    ratios = [f"{found['finite-width'][place] / found['limit'][place]:.1f}" for place in (0, 1)]
    record("time_of_tuning", {"width n over the limit": ["", *ratios]})
    for place, when in enumerate(("cold", "warm")):
        print(f"finite width over limit, {when}: {found['finite-width'][place] / found['limit'][place]:.1f}")
