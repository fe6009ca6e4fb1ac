"""Tests of increments of branches."""

import numpy as np
import pytest
from helpers.internals import BRANCH_LEVEL, BranchTests
from scipy import stats


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_another_gain_is_preferred_by_twice_its_log_likelihood(share):
    """A χ² of one degree of freedom, by Wilks."""
    tests = object.__new__(BranchTests)
    gain = share * stats.chi2.isf(BRANCH_LEVEL, 1) / 2
    tests.log_factors, tests.profiles = np.log([0.5, 1.0, 2.0]), {"mlp.gain": np.array([-1.0, 0.0, gain])}
    (found,) = tests.shapes().verdicts
    assert found.value == pytest.approx(2 if share > 1 else 1)
