"""Results on the devices of this process, and the devices that computed them; one file of arrays, one line of JSON.

Run with XLA_FLAGS=--xla_force_host_platform_device_count=4 for four devices on one CPU.
"""

import json
import sys
import time
from collections import defaultdict
from typing import Any

import jax
import jax.random as jr
import numpy as np

import sdeinfer as si
from sdeinfer.infer import Metropolis, _chains, _metropolis
from sdeinfer.networks import _sample as sample
from sdeinfer.solve import _blocks as blocks

TRUTH = si.ShapedTransformer(gamma=0.5, tau0=0.8, c_plus=0.3, c_minus=-1.5)
QUICK = si.ShapedMLP(c_plus=0.3, c_minus=-1.5)
"""Compiles in a third of the time; how a batch is divided does not depend on the layer."""

SAMPLER = {"chains": 4, "draws": 30, "warmup": 30}

used: dict[str, set[int]] = defaultdict(set)


def record(module: Any, attribute: str, name: str) -> None:
    """Make a program record on which devices its results are, before they are gathered."""
    program = getattr(module, attribute)

    def run(*args: Any, **kwargs: Any) -> Any:
        results = program(*args, **kwargs)
        for leaf in jax.tree.leaves(results):
            used[name].update(device.id for device in leaf.devices())
        return results

    setattr(module, attribute, run)


def start(tokens: int = 2):
    return si.equicorrelated(tokens=tokens, correlation=0.2)


def paths() -> dict[str, np.ndarray]:
    # Two blocks, the second of them not full.
    return {"V": np.asarray(si.simulate(QUICK, start(), [0.05, 0.2], paths=1100, step=0.01, key=jr.key(0)))}


def networks(layer: si.layers.AbstractLayer, count: int = 150):
    return si.sample_networks(layer, start(), width=32, depth=6, networks=count, key=jr.key(1))


def chain() -> dict[str, np.ndarray]:
    found = networks(QUICK)["covariance"].values
    record(sample, "_few_chains", "chosen")
    with jax.default_device(jax.local_devices()[-1]):
        return {"covariance": found, "chosen": networks(QUICK)["covariance"].values}


def bridges() -> dict[str, np.ndarray]:
    data = networks(TRUTH, 20).isel(layer=[0, 3, 6])
    return draws(si.fit(si.models.thinned_path, data, predictions=4, sampler=Metropolis(**SAMPLER), key=jr.key(3)))


def draws(post: Any) -> dict[str, np.ndarray]:
    found = {name: post["posterior"][name].values for name in ("gamma", "tau0", "c_gap")}
    return found | {"predicted": post["posterior_predictive"]["covariance"].values}


RUNS = {"paths": paths, "chain": chain, "bridges": bridges}

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)  # noqa: FBT003
    record(blocks, "_solve_block", "paths")
    record(sample, "_few_chains", "chain")
    name, file = sys.argv[1:]
    record(_metropolis, "_advance", name)
    record(_chains, "one_per_device", name)
    started = time.perf_counter()
    np.savez(file, **RUNS[name]())
    devices, took = jax.local_device_count(), time.perf_counter() - started
    chosen = sorted(used["chosen"])
    print(json.dumps({"devices": devices, "used": len(used[name]), "chosen": chosen, "s": took}))
