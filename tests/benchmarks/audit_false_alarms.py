"""Audits of correct networks of random kinds and sizes, by a recipe and beside a second draw: how many do not pass.

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
    """A network, a second draw of it, and the recipe that both follow."""
    rng = np.random.default_rng(seed)
    own.N = int(rng.choice([32, 48, 64, 96, 128]))
    own.SIZE = own.N // own.HEADS
    sd = math.exp(rng.uniform(math.log(0.005), math.log(0.2)))
    yes = {name: bool(rng.integers(2)) for name in ("rms", "bias", "rope", "causal", "gated", "scaled")}
    torch.manual_seed(seed)
    sizes = {"groups": int(rng.choice([1, 2, 4])), "layers": int(rng.integers(1, 9))}
    networks = [own.Net(sd=sd, **sizes, **yes) for _ in range(2)]
    return networks, (si.audit.recipes.gpt2 if yes["scaled"] else si.audit.recipes.normal)(sd), yes["causal"]


def main() -> None:
    number, first = (int(each) for each in (sys.argv[1:] + ["1000", "0"][len(sys.argv) - 1 :])[:2])
    start, failed = time.perf_counter(), {"recipe": 0, "like": 0}
    for seed in range(first, first + number):
        (network, second), recipe, causal = drawn(seed)
        of_recipe = si.audit(network, recipe=recipe, norm="pre", causal=causal)
        for way, found in {"recipe": of_recipe, "like": si.audit(network, like=second)}.items():
            failed[way] += not found.passed
            if not found.passed:
                print(seed, way, found, flush=True)
    seconds = (time.perf_counter() - start) / number
    counts = f"{failed['recipe']} by their recipe and {failed['like']} beside a second draw did not pass"
    print(f"{number} correct networks from seed {first}: {counts}; {seconds:.2f} s each")


if __name__ == "__main__":
    main()
