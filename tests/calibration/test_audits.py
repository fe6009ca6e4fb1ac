"""How often audits of networks of random blocks fail although they are as declared, and pass although they are not."""

import collections

import numpy as np
import pytest
from calibration.audits import IN_LAYER, audits_of, drawn_data, found_factor, moved, passed
from calibration.runs import run_all
from scipy import stats

from sdeinfer.auditing._judge import log_densities
from sdeinfer.auditing._observe import scaled

NETWORKS, MORE = 200, 40
"""Number of networks, and of those beside them for networks that are refused."""

FALSE_ALARMS = 0.02
"""Largest share of networks as declared that do not pass."""


@pytest.mark.slow
def test_audits_of_random_blocks(kept_results, first_seed, record):
    cases = [(first_seed + seed,) for seed in range(NETWORKS + MORE)]
    every = run_all(audits_of, cases, kept_results)
    found = [each for each in every if "refused" not in each][:NETWORKS]
    assert len(found) == NETWORKS
    alarms = [each for each in found if not each["passed"]]
    misses = [each for each in found if each["passed_kind"]]
    by_layer = np.array([each["passed_layer"] for each in found if "passed_layer" in each])
    factor = found_factor(by_layer.mean(0))
    words = collections.Counter(each["verdict"][17:60] for each in alarms)
    print(f"\n{len(found)} networks of {len(every)}, some refused: not passed {len(alarms)}: {dict(words)}")
    print(f"factor 1.2 in one kind of branch: passed {len(misses)}")
    shares = ", ".join(f"{each}: {share:.3f}" for each, share in zip(IN_LAYER, 1 - by_layer.mean(0), strict=True))
    print(f"factor in one of 12 layers, share found ({len(by_layer)} networks): {shares}; 95 % from {factor}")
    rows = {"as declared": (len(found), len(alarms))}
    rows["1.2 in one kind of branch"] = (len(found), len(found) - len(misses))
    for each, share in zip(IN_LAYER, 1 - by_layer.mean(0), strict=True):
        rows[f"{each:g} in one layer"] = (len(by_layer), round(share * len(by_layer)))
    record("random_audits", {name: list(map(str, counts)) for name, counts in rows.items()})
    assert len(alarms) <= stats.binom.isf(1e-4, len(found), FALSE_ALARMS)
    assert not misses
    assert factor <= max(IN_LAYER)


def test_audits_of_one_network():
    layer, data = drawn_data(38)
    coefficients = log_densities(data, layer)
    assert passed(data, layer, coefficients)[0]
    branches = np.arange(data.sizes["branch"])
    in_kind = np.where(branches % 2, 1.2, 1.0)
    assert not passed(data, layer, coefficients, in_kind)[0]
    assert not passed(data, layer, coefficients, np.where(branches == 2, 3.0, 1.0))[0]
    of_changed = log_densities(scaled(data, in_kind[None]), layer)
    np.testing.assert_allclose(moved(coefficients, in_kind)[..., :3], of_changed[..., :3], rtol=1e-6, atol=1e-6)


def test_the_factor_that_is_found():
    assert found_factor(np.array([1.0, 0.04, 0.06, 0.02, 0.0])) == IN_LAYER[3]
    assert found_factor(np.ones(5)) == np.inf
