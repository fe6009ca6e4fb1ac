"""A softmax that chooses: γ depends on a τ0 that the data do not identify, and no verdict trusts a wrong one."""

import pytest
from calibration.judged import is_miss
from calibration.runs import run_all
from calibration.softmax import judged


@pytest.mark.slow
def test_no_wrong_gamma_is_trusted(kept_results, first_seed):
    cases = [(width, first_seed + seed) for width in (96, 256) for seed in range(100)]
    assert not any(map(is_miss, run_all(judged, cases, kept_results)))


@pytest.mark.long
def test_gamma_depends_on_a_tau0_that_the_data_do_not_identify():
    found = judged(96, 2)
    assert "only by the prior of tau0: gamma" in found["verdict"]
