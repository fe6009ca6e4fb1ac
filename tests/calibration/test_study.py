"""What the calibration studies would notice."""

import numpy as np
import pytest
from budget import SHARE
from calibration.study import covered, p_values, power
from scipy import stats


def ranks(data_sets: int, *, narrow: float = 1.0, moved: float = 0.0) -> np.ndarray:
    """Ranks of posteriors whose sds are too small, and whose means are off by so many of their sds."""
    return stats.norm.cdf(narrow * stats.norm.ppf((np.arange(data_sets) + 0.5) / data_sets) + moved)


@pytest.mark.parametrize(("data_sets", "narrow"), [(64, 1.7), (128, 1.5), (200, 1.4), (256, 1.35)])
def test_posteriors_that_are_too_narrow_are_noticed(data_sets, narrow):
    """With 200 data sets, 50 % intervals that hold .37 of the truths; the test says how often."""
    print(f"\n{data_sets} data sets, sds {narrow} too small: {covered(0.5, narrow):.3f}/{covered(0.9, narrow):.3f}")
    assert power(data_sets, narrow) > 0.9
    assert power(data_sets, 1.0) == pytest.approx(SHARE)
    rejected = {test for test, p in p_values(ranks(data_sets, narrow=narrow)).items() if p < SHARE}
    assert rejected == {"width"}


def test_posteriors_in_the_wrong_place_are_noticed():
    found = p_values(ranks(200, moved=0.4))
    assert found["place"] < SHARE < found["width"]


def test_posteriors_of_the_right_width_are_not():
    assert min(p_values(ranks(200)).values()) > 0.1


def test_truths_beyond_all_draws_are_as_far_as_draws_can_tell():
    found = p_values(np.append(ranks(199), 0.0))
    assert SHARE < found["width"] < 1


def test_half_of_the_truths_in_a_third_of_the_intervals_is_no_calibration():
    """Coverage of .325 for .5, which 200 data sets have to notice."""
    narrow = float(stats.norm.ppf(0.75) / stats.norm.ppf(0.5 + 0.325 / 2))
    assert covered(0.5, narrow) == pytest.approx(0.325)
    assert power(200, narrow) > 0.99
