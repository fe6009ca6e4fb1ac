"""Much data from finite networks: 384,000 terms, of which the limit's law makes a posterior that is sure and wrong."""

import jax.random as jr
import pytest
from calibration.study import posterior, statistics
from helpers.budget import assert_within
from helpers.internals import Assumptions, problem_of
from helpers.ranges import marked

import sdeinfer as si
from sdeinfer.layers import template
from sdeinfer.models import full_path

TRUTH = {"gamma": 0.6, "tau0": 0.5, "c_plus": 0.3, "c_minus": -1.5}
SEEDS = 10


@pytest.mark.slow
def test_gamma_is_recovered_from_two_thousand_networks_of_width_64():
    V0 = si.equicorrelated(tokens=3, correlation=0.2, norm=1.0)
    assumed = {law: Assumptions(template("transformer"), law) for law in ("finite-width", "limit")}
    deviations = {law: [] for law in assumed}
    for seed in range(SEEDS):
        key_data, key_fit = jr.split(jr.key(seed))
        layer = si.ShapedTransformer(**TRUTH)
        data = si.sample_networks(layer, V0, width=64, depth=32, networks=2000, key=key_data)
        data = marked(problem_of(full_path, assumed["finite-width"]), data)
        left_out = 1 - float(data["used"][:, :-1].mean())
        line = f"seed {seed}: {left_out:.1%} left out"
        for law, assumptions in assumed.items():
            found = posterior(statistics(data, assumptions), key_fit)
            mean, sd = found.mean_and_sd("gamma")
            deviations[law].append((mean - TRUTH["gamma"]) / sd)
            line += f"; {law}: gamma {mean:.5f} ± {sd:.5f} ({deviations[law][-1]:+.1f} sd)"
        print(line, flush=True)
    assert_within(deviations["finite-width"])
