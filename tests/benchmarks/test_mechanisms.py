"""Losses without each mechanism: coverage on real finite networks, seconds.

Parameters come from the prior, data from the exact covariance chain, as in `calibration/finite_width.py`. `-s`
shows the shares of 50 % and 90 % intervals that hold the truth, beside those of the whole fit on the same data sets.
"""

import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from calibration.finite_width import ASSUMED, SIZES, TRANSFORMER, data_set
from calibration.study import importance_sample, report, statistics
from helpers.internals import NetworkKeys, problem_of
from helpers.ranges import marked

import sdeinfer as si
from sdeinfer.models import full_path

pytestmark = pytest.mark.benchmark

DATA_SETS = 200
LAW = ASSUMED["full"]["finite-width"]


def without_range(data):
    return statistics(marked(problem_of(full_path, LAW), data.drop_vars("used"), math.inf), LAW)


MECHANISMS = {
    "all": lambda data: statistics(data, LAW),
    "no adjustment (sandwich)": lambda data: dataclasses.replace(statistics(data, LAW), adjustment=None),
    "no range rule": without_range,
}


@pytest.mark.parametrize(("width", "more"), [(32, 1), (32, 10), (64, 1)])
def test_coverage_without_each_mechanism(width, more, key):
    ranks = {name: {site: [] for site in TRANSFORMER.coordinates.identified} for name in MECHANISMS}
    refused = dict.fromkeys(MECHANISMS, 0)
    drawn = fitted = 0
    while fitted < DATA_SETS:
        key_data, key_fit = jr.split(jr.fold_in(jr.fold_in(key, width), drawn))
        truth, data = data_set(width, key_data, more=more)
        drawn += 1
        if data is None:
            continue
        fitted += 1
        for name, prepared in MECHANISMS.items():
            try:
                found = importance_sample(prepared(data), key_fit)
            except si.InputError:
                refused[name] += 1
                continue
            for site, rank in found.ranks(truth, ranks[name]).items():
                ranks[name][site].append(rank)
    print(f"\nn = {width}, {more} × {SIZES[width]} networks and layers; refused: {refused}")
    for name, of_sites in ranks.items():
        report({site: np.array(u) for site, u in of_sites.items()}, f"n = {width}, {name}")


def by_jax(keys: NetworkKeys, shape, dtype, *, stream=0, block=0):
    """`NetworkKeys.normals` by `jax.random`."""

    def one(high, low):
        key = jr.fold_in(jr.fold_in(jr.wrap_key_data(jnp.stack([high, low])), stream), block)
        return jr.normal(key, shape, dtype)

    return jax.vmap(one, out_axes=-1)(keys.high, keys.low)


def by_jax_with_uniforms(keys: NetworkKeys, shape, dtype, *, stream=0, block=0):
    def one(high, low):
        key = jr.fold_in(jr.fold_in(jr.wrap_key_data(jnp.stack([high, low])), stream + 1000), block)
        return jr.uniform(key, shape, dtype)

    return by_jax(keys, shape, dtype, stream=stream, block=block), jax.vmap(one, out_axes=-1)(keys.high, keys.low)


class ByJax(si.ShapedTransformer):
    """A Transformer whose chain is JAX's, as that of blocks and of layers of one's own."""

    @property
    def on_host(self) -> bool:
        return False


def test_the_generator_against_jax_random(monkeypatch):
    """Seconds to sample networks of four tokens, the first time and later."""
    truth = ByJax(gamma=0.6, tau0=1.0, c_plus=2.0, c_minus=-2.0)
    V0, seconds = si.equicorrelated(tokens=4, correlation=0.0, norm=1.6), {}
    for name in ("own", "jax.random"):
        if name == "jax.random":
            monkeypatch.setattr(NetworkKeys, "normals", by_jax)
            monkeypatch.setattr(NetworkKeys, "normals_and_uniforms", by_jax_with_uniforms)
        jax.clear_caches()
        seconds[name] = []
        for number in range(4):
            started = time.perf_counter()
            si.sample_networks(truth, V0, width=128, depth=16, networks=2048, key=jr.key(number))
            seconds[name].append(time.perf_counter() - started)
    for name, (first, *later) in seconds.items():
        print(f"\n{name}: first {first:.2f} s, later {min(later):.2f} s", end="")
    print()
