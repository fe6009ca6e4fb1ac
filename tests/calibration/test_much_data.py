"""Much data from finite networks: 384,000 terms."""

import jax.random as jr
import pytest
from calibration.study import posterior, statistics
from helpers.budget import assert_within
from helpers.internals import Assumptions, in_range, problem_of

import sdeinfer as si
from sdeinfer.layers import template
from sdeinfer.models import full_path

TRUTH = {"gamma": 0.6, "tau0": 0.5, "c_plus": 0.3, "c_minus": -1.5}
SEEDS = 10


@pytest.mark.slow
def test_gamma_is_recovered_from_two_thousand_networks_of_width_64():
    V0 = si.equicorrelated(tokens=3, correlation=0.2, norm=1.0)
    assumptions, deviations = Assumptions(template("transformer")), []
    for seed in range(SEEDS):
        key_data, key_fit = jr.split(jr.key(seed))
        data = si.sample_networks(si.ShapedTransformer(**TRUTH), V0, width=64, depth=32, networks=2000, key=key_data)
        data, _ = in_range(problem_of(full_path, assumptions), data)
        mean, sd = posterior(statistics(data, assumptions), key_fit).mean_and_sd("gamma")
        deviations.append((mean - TRUTH["gamma"]) / sd)
    assert_within(deviations)
