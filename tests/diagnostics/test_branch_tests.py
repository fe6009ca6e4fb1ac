"""Tests of increments of branches."""

import numpy as np
import pytest
from helpers.internals import BranchTests
from scipy import stats


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_another_gain_is_preferred_by_twice_its_log_likelihood(share):
    """A χ² of one degree of freedom, by Wilks."""
    tests = object.__new__(BranchTests)
    gain = share * stats.chi2.isf(BranchTests.level, 1) / 2
    tests._profiles = [("mlp.gain", np.log(2), np.zeros(3), gain)]
    (found,) = tests.shapes()
    assert found.value == pytest.approx(2 if share > 1 else 1)
