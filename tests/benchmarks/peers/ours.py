"""What the peers are measured against: `sdeinfer.fit`, with everything that it does beside sampling."""

import sys
import time

import jax
import jax.random as jr
import numpy as np

import sdeinfer as si

PARAMETERS = ("gamma", "tau0", "c_gap")


def fit(data, settings, key):
    """A fit by the limit's law, with no transition left out, as the peers have it."""
    thinned = np.diff(data["layers"]).max() > 1
    model = si.models.thinned_path if thinned else si.models.full_path
    networks = si.covariance_dataset(
        data["V"], width=int(data["width"]), layers=data["layers"], architecture="transformer"
    )
    return si.fit(model, networks, law="limit", largest_logit=float("inf"), **settings, key=key)


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)  # noqa: FBT003
    source, out, *counts = sys.argv[1:]
    settings = dict(zip(("chains", "draws", "warmup"), map(int, counts), strict=True))
    data = dict(np.load(source))
    started, cpu = time.perf_counter(), time.process_time()
    posterior = fit(data, settings, jr.key(1))["posterior"]
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    started = time.perf_counter()
    fit(data, settings, jr.key(2))
    warm = time.perf_counter() - started
    np.savez(out, **{name: posterior[name].values for name in PARAMETERS}, seconds=seconds, warm=warm, cpu=cpu)
