"""What posteriors lose without each mechanism of a fit: coverage on real finite networks, mechanism by mechanism.

Parameters come from the prior, data from the exact covariance chain, as in `calibration/test_finite_width.py`. `-s`
shows the shares of 50 % and 90 % intervals that hold the truth, beside those of the whole fit on the same data sets.
"""

import dataclasses
import math

import jax.random as jr
import numpy as np
import pytest
from calibration.study import NODES, importance_sample, report
from calibration.test_finite_width import ASSUMED, SIZES, TRANSFORMER, data_set
from sdeinfer.models import full_path

import sdeinfer as si
from sdeinfer.infer import adjusted_statistics, in_range
from sdeinfer.likelihood import observed_path

pytestmark = pytest.mark.benchmark

DATA_SETS = 200
LAW = ASSUMED["finite-width"]


def whole(data):
    return adjusted_statistics(full_path, observed_path(data), LAW, nodes=NODES, pooled=True)


def without_adjustment(data):
    return dataclasses.replace(whole(data), adjustment=None)


def without_range(data):
    return whole(in_range(full_path, data.drop_vars("used"), LAW, math.inf)[0])


MECHANISMS = {
    "all": whole,
    "no adjustment (sandwich)": without_adjustment,
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
            for site in ranks[name]:
                ranks[name][site].append(found.rank(site, truth[site]))
    print(f"\nn = {width}, {more} × {SIZES[width]} networks and layers; refused: {refused}")
    for name, of_sites in ranks.items():
        report({site: np.array(u) for site, u in of_sites.items()}, f"n = {width}, {name}")
