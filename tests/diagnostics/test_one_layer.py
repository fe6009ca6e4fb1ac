"""A layer whose noise is unlike that of the others: of a state that was not observed."""

import jax.random as jr
import numpy as np
import pytest
import xarray as xr
from helpers.internals import FEWEST_TRANSITIONS, LEVEL, Residuals, ScoreSums, check_unlike_layers
from scipy import stats

import sdeinfer as si

TOKENS = 3


def noise_of(sds, networks=FEWEST_TRANSITIONS):
    """The sums of normal innovations, with their standard deviation in each layer."""
    y = np.random.default_rng(5).normal(size=(networks, len(sds), TOKENS * (TOKENS + 1) // 2)) * np.array(sds)[:, None]
    squared = (y**2).mean(axis=-1)
    return np.stack([(squared**moment).sum(axis=0) for moment in range(3)])


def verdicts_on(noise):
    """Of innovations with these sums."""
    layers = xr.Dataset(coords={"layer": np.arange(noise.shape[1] + 1), "token_a": np.arange(TOKENS)})
    residuals, nothing = Residuals(xr.DataTree(), layers, None), dict.fromkeys(ScoreSums._fields, np.zeros(0))
    vars(residuals)["sums"] = ScoreSums(**nothing | {"noise": noise, "transitions": 0})
    return check_unlike_layers(residuals).verdicts


def test_one_layer_is_unlike_the_others():
    (found,) = verdicts_on(noise_of([1, 1, 2**0.5, 1, 1], networks=64))
    assert not found.passed
    assert found.value == pytest.approx(2 / 1.2, rel=0.2)  # over the mean of all five
    assert found.advice.startswith("from layer 2 to 3 the noise is 1.")
    (found,) = verdicts_on(noise_of([1, 1, 1, 1, 0.5], networks=64))
    assert not found.passed


def test_equal_layers_pass_whatever_their_common_noise():
    assert all(each.value == 1.0 for sd in (0.7, 1.0, 1.3) for each in verdicts_on(noise_of([sd] * 8)))


@pytest.mark.parametrize("share", [0.9, 1.1])
def test_squares_that_are_alike_are_no_evidence(share):
    """Of the least noise that is found: the mean of y² has at least the variance 2/p of p normal innovations."""
    normal_error = np.sqrt(2 / 6 / FEWEST_TRANSITIONS)
    less = -np.expm1(-share * stats.norm.isf(LEVEL / 4) * normal_error)
    mean = np.array([1 + less, 1 - less])
    (found,) = verdicts_on(FEWEST_TRANSITIONS * np.stack([mean**0, mean, mean**2]))
    assert (found.value > 1) == (share > 1)


def test_layers_of_few_transitions_are_not_tested():
    assert verdicts_on(noise_of([1, 1, 3], networks=FEWEST_TRANSITIONS - 1)) == ()


def test_states_that_were_not_observed_are_found(fitted, checked, networks):
    truth = si.ShapedTransformer(gamma=0.6, tau0=1.0, c_plus=1.0, c_minus=-3.0)
    V0 = si.equicorrelated(tokens=3, correlation=0.1, norm=1.4)
    longer = si.sample_networks(truth, V0, width=96, depth=12, networks=24, key=jr.key(1))
    kept = networks["covariance"].copy(data=longer["covariance"].values[:, [0, *range(3, 13)]])
    tree = fitted.copy()
    tree["observed_data"] = tree["observed_data"].to_dataset().assign(covariance=kept)
    found = {each.name: each for each in si.check(tree).verdicts}["noise of one layer"]
    assert not found.passed
    assert found.advice.startswith("from layer 0 to 1 ")
    assert {each.name: each for each in checked.verdicts}["noise of one layer"].passed
