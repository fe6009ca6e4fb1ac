"""Seconds of the same calls, cold and warm, on the devices that JAX finds.

    JAX_PLATFORMS=cpu python tests/benchmarks/devices.py
    python tests/benchmarks/devices.py [--fits-there]

Prints one line of JSON for each call as it ends; the first line names the device.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.random as jr

import sdeinfer as si
from sdeinfer import meanfield

TRUTH = si.ShapedTransformer(gamma=0.6, tau0=1.0, c_plus=2.0, c_minus=-2.0)


def start(tokens: int) -> jax.Array:
    return si.equicorrelated(tokens=tokens, correlation=0.0, norm=1.6)


def networks(tokens: int, count: int, *, width: int = 128, depth: int = 16) -> Any:
    return si.sample_networks(TRUTH, start(tokens), width=width, depth=depth, networks=count, key=jr.key(0))


def paths(tokens: int, count: int) -> jax.Array:
    return si.simulate(TRUTH, start(tokens), [0.0625, 0.125], paths=count, key=jr.key(1))


def of_data(call: Callable[[Any], Any]) -> Callable[[], Any]:
    """The call with the networks of README's example."""
    data = networks(4, 64)
    return lambda: call(data)


def checked() -> Callable[[], Any]:
    data = networks(4, 64)
    post = si.fit(si.models.full_path, data, key=jr.key(2))
    return lambda: si.check(post, data)


def flow(tokens: int) -> Callable[[], Any]:
    x = jr.normal(jr.key(3), (tokens, 3))
    x = x / jax.numpy.linalg.norm(x, axis=1, keepdims=True)
    return lambda: meanfield.solve(meanfield.SelfAttentionFlow(beta=9.0), x, [5.0])


CALLS: dict[str, Callable[[], Callable[[], Any]]] = {
    "fit": lambda: of_data(lambda data: si.fit(si.models.full_path, data, key=jr.key(2))),
    "check": checked,
    "sample 128 networks, 8 tokens, n = 1024, 128 layers": lambda: lambda: networks(8, 128, width=1024, depth=128),
    "simulate 512 paths, 4 tokens": lambda: lambda: paths(4, 512),
    "simulate 262,144 paths, 4 tokens": lambda: lambda: paths(4, 2**18),
    "simulate 16,384 paths, 24 tokens": lambda: lambda: paths(24, 2**14),
    "mean-field flow of 1,024 tokens to T = 5": lambda: flow(1024),
    "mean-field flow of 8,192 tokens to T = 5": lambda: flow(8192),
}


def seconds(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fits-there", action="store_true", help="run fits on the device, not on the CPU beside it")
    arguments = parser.parse_args()
    jax.config.update("jax_enable_x64", True)  # noqa: FBT003
    print(json.dumps({"device": jax.devices()[0].device_kind}))
    with jax.default_device(jax.devices()[0] if arguments.fits_there else None):
        for name, call in CALLS.items():
            timed = call()
            cold, warm = seconds(timed), min(seconds(timed) for _ in range(2))
            print(json.dumps({"call": name, "cold": cold, "warm": warm}), flush=True)


if __name__ == "__main__":
    main()
