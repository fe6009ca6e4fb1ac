"""Seconds of the first and of later calls of `simulate` or its gradient: `orders.py TOKENS SOLVER simulate|gradient`.

Prints a list of both, in JSON. Imports are not counted.
"""

import json
import math
import sys
import time

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

import sdeinfer as si

TIMES, PATHS = [0.4, 0.8], 1024


def mean_log_norm(gamma, V0, solver):
    """A function of the paths; one whose gradient is taken."""
    layer = si.ShapedTransformer(gamma=gamma, tau0=1.0, c_plus=0.0, c_minus=-1.0)
    return jnp.log(si.simulate(layer, V0, TIMES, paths=PATHS, solver=solver, key=jr.key(0))[:, -1, 0, 0]).mean()


def main(tokens: int, name: str, what: str) -> None:
    """Time the first call, and the best of three later ones."""
    solver = getattr(si.solve, name)()
    V0 = np.asarray(si.equicorrelated(tokens=tokens, correlation=0.2), np.float32)
    call = jax.jit(jax.grad(lambda gamma: mean_log_norm(gamma, V0, solver))) if what == "gradient" else None
    seconds = []
    for number in range(4):
        gamma = 1 / math.sqrt(8) + number / 100
        started = time.perf_counter()
        jax.block_until_ready(mean_log_norm(gamma, V0, solver) if call is None else call(gamma))
        seconds.append(time.perf_counter() - started)
    print(json.dumps([seconds[0], min(seconds[1:])]))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
