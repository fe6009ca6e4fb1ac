"""Audits of correct networks of random kinds and sizes: how many fail.

Run `OMP_NUM_THREADS=1 python tests/benchmarks/audit_false_alarms.py [NUMBER] [FIRST_SEED]`.
"""

import math
import sys
import time
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import reported_models as own

import sdeinfer as si


def drawn(seed: int):
    """A network, and the recipe that it follows."""
    rng = np.random.default_rng(seed)
    own.N = int(rng.choice([32, 48, 64, 96, 128]))
    own.SIZE = own.N // own.HEADS
    sd = math.exp(rng.uniform(math.log(0.005), math.log(0.2)))
    yes = {name: bool(rng.integers(2)) for name in ("rms", "bias", "rope", "causal", "gated", "scaled")}
    torch.manual_seed(seed)
    network = own.Net(sd=sd, groups=int(rng.choice([1, 2, 4])), layers=int(rng.integers(1, 9)), **yes)
    return network, (si.audit.recipes.gpt2 if yes["scaled"] else si.audit.recipes.normal)(sd)


def main() -> None:
    number, first = (int(each) for each in (sys.argv[1:] + ["1000", "0"][len(sys.argv) - 1 :])[:2])
    start, failed = time.perf_counter(), 0
    for seed in range(first, first + number):
        network, recipe = drawn(seed)
        found = si.audit(network, recipe=recipe)
        failed += not found.passed
        if not found.passed:
            print(seed, found, flush=True)
    seconds = (time.perf_counter() - start) / number
    print(f"{number} correct networks from seed {first}: {failed} failed; {seconds:.2f} s each")


if __name__ == "__main__":
    main()
