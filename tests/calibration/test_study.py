"""What the calibration studies would notice."""

import numpy as np
import pytest
from calibration.judged import distance
from calibration.study import p_values, power
from helpers.spending import SHARE
from scipy import stats


def ranks(data_sets: int, *, narrow: float = 1.0, moved: float = 0.0) -> np.ndarray:
    """Ranks of posteriors whose sds are too small, and whose means are off by so many of their sds."""
    return stats.norm.cdf(narrow * stats.norm.ppf((np.arange(data_sets) + 0.5) / data_sets) + moved)


@pytest.mark.parametrize(("data_sets", "narrow"), [(64, 1.7), (128, 1.5), (200, 1.4)])
def test_posteriors_that_are_too_narrow_are_noticed(data_sets, narrow):
    """1.4: 50 % intervals that hold .37 of the truths."""
    assert power(data_sets, narrow) > 0.9
    assert power(data_sets, 1.0) == pytest.approx(SHARE)
    assert {test for test, p in p_values(ranks(data_sets, narrow=narrow)).items() if p < SHARE} == {"width"}


def test_posteriors_in_the_wrong_place_are_noticed_and_right_ones_are_not():
    found = p_values(ranks(200, moved=0.4))
    assert found["place"] < SHARE < found["width"]
    assert min(p_values(ranks(200)).values()) > 0.1
    beyond = p_values(np.append(ranks(199), 0.0))  # a truth beyond all draws is as far as draws can tell
    assert SHARE < beyond["width"] < 1


def test_distances_are_quantiles_where_draws_are_and_sds_beyond():
    draws = -stats.expon.ppf((np.arange(4000) + 0.5) / 4000)
    assert distance(np.log(0.01), draws) == pytest.approx(stats.norm.ppf(0.01), abs=0.01)
    assert distance(-20.0, draws) == pytest.approx((-20 + 1) / 1, rel=0.02)
