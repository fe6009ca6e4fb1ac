"""A fit over its number of tokens m: seconds and memory, and the power of m with which they grow.

Each fit runs twice in a process of its own. Of m, either the number of transitions is the same, or that of terms,
m(m + 1)/2 a transition. Exponents are those of m from `MANY` tokens on; with fewer, other costs are larger. Seconds are
of processors: those of the clock depend on what else the machine does.
"""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

pytestmark = pytest.mark.benchmark

SCRIPT = """
import json, resource, sys, time
import jax
import jax.random as jr
jax.config.update("jax_enable_x64", True)
import sdeinfer as si
tokens, networks = map(int, sys.argv[1:])
truth = si.ShapedTransformer(gamma=0.6, tau0=1.0, c_plus=2.0, c_minus=-2.0)
V0 = si.equicorrelated(tokens=tokens, correlation=0.2)
data = si.sample_networks(truth, V0, width=1024, depth=32, networks=networks, key=jr.key(0))
found = []
for _ in range(2):
    started = time.process_time()
    si.fit(si.models.full_path, data, draws=250, warmup=250, predictions=40, key=jr.key(0))
    found.append(time.process_time() - started)
print(json.dumps([*found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10]))
"""
COSTS = ("first fit, CPU s", "next fit, CPU s", "peak MiB")
TOKENS, MANY = (4, 8, 16, 32, 64), 16
DEPTH, TRANSITIONS, TERMS = 32, 512, 2**17


def fitted(tokens: int, transitions: int) -> list[float]:
    """The costs of a fit of about so many transitions, in a process of its own without a cache of programs."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_", "PYTHONDONT"))}
    networks = max(2, round(transitions / DEPTH))
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tokens), str(networks)]
    environment = kept | {"SDEINFER_NO_CACHE": "1"}
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


@pytest.mark.parametrize("same", [f"{TRANSITIONS} transitions", f"{TERMS} terms"])
def test_fits_over_the_number_of_tokens(same):
    many = [place for place, tokens in enumerate(TOKENS) if tokens >= MANY]
    transitions = [TRANSITIONS if "transitions" in same else TERMS // (m * (m + 1) // 2) for m in TOKENS]
    found = np.array([fitted(*sizes) for sizes in zip(TOKENS, transitions, strict=True)])
    print(f"\n| {same}, depth {DEPTH} | " + " | ".join(f"m = {m}" for m in TOKENS) + " | exponent |")
    for cost, values in zip(COSTS, found.T, strict=True):
        exponent = np.polyfit(np.log(TOKENS)[many], np.log(values[many]), 1)[0]
        print(f"| {cost} | " + " | ".join(f"{value:.3g}" for value in values) + f" | {exponent:.1f} |")
