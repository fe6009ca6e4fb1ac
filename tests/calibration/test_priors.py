"""Simulation-based calibration with priors that are not the default, on real finite networks of width 64.

Parameters come from the prior, data from the exact covariance chain, and fits assume that prior: the range rule, the
mode, the expansion and the adjustment have to follow it.

    OPENBLAS_NUM_THREADS=1 pytest -m slow -s tests/calibration/test_priors.py
"""

import jax.random as jr
import numpyro.distributions as dist
import pytest
from calibration.finite_width import TRANSFORMER, data_set
from calibration.study import assert_calibrated, posterior, ranks_of_sets, statistics
from helpers.internals import Assumptions, checked_priors

WIDTH, DATA_SETS = 64, 200

PRIORS = {
    "τ0 ~ Uniform(.2, 3)": {"tau0": dist.Uniform(0.2, 3.0)},
    "γ ~ Beta(8, 2)": {"gamma": dist.Beta(8.0, 2.0)},
    "τ0 = 1": {"tau0": 1.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRIORS)
def test_posteriors_by_other_priors_are_calibrated(name, key):
    assumptions = Assumptions(TRANSFORMER, "finite-width", checked_priors(PRIORS[name], TRANSFORMER))
    free = [site for site in TRANSFORMER.coordinates.identified if site not in assumptions.fixed]

    def one(key):
        key_data, key_fit = jr.split(key)
        truth, data = data_set(WIDTH, key_data, assumptions)
        return None if data is None else posterior(statistics(data, assumptions), key_fit).ranks(truth, free)

    assert_calibrated(ranks_of_sets(one, DATA_SETS, key), name)
