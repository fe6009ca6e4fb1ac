"""How far one posterior is from another."""

import numpy as np
import pytest
import xarray as xr
from arviz_stats.base import array_stats
from budget import assert_mean
from scipy import stats

import sdeinfer as si


def posterior(gamma: np.ndarray, name: str = "gamma") -> xr.DataTree:
    return xr.DataTree.from_dict({"posterior": xr.Dataset({name: (("chain", "draw"), gamma)})})


def test_a_law_that_is_moved_is_as_far_as_it_was_moved():
    x = np.random.default_rng(0).normal(3.0, 0.2, (2, 500))
    row = si.distance(posterior(x + 0.1), posterior(x)).loc["gamma"]
    in_sds = 0.1 / x.std(ddof=1)
    np.testing.assert_allclose(row[["mean", "sd", "wasserstein"]].astype(float), [in_sds, 1, in_sds], rtol=1e-10)


def test_a_law_that_is_stretched_has_the_distance_of_its_quantiles():
    x = np.random.default_rng(0).normal(0.0, 0.2, (2, 500))
    x -= x.mean()
    row = si.distance(posterior(2 * x), posterior(x)).loc["gamma"]
    expected = [0, 2, np.abs(x).mean() / x.std(ddof=1)]
    np.testing.assert_allclose(row[["mean", "sd", "wasserstein"]].astype(float), expected, rtol=1e-10, atol=1e-12)


def test_samples_of_one_law_are_as_far_apart_as_the_floor():
    rng = np.random.default_rng(0)
    rows = [
        si.distance(posterior(rng.normal(size=(1, 4000))), posterior(rng.normal(size=(2, 1000)))).loc["gamma"]
        for _ in range(200)
    ]
    assert_mean([row["wasserstein"] - row["floor"] for row in rows], 0)


def test_the_floor_is_the_published_one():
    """√(1/n + 1/n′) √(2/π) ∫ √(F (1 − F)) dx, of a normal law."""
    x, rng = stats.norm.ppf((np.arange(4000) + 0.5) / 4000), np.random.default_rng(1)
    one, other = (rng.permutation(x).reshape(2, 2000) for _ in range(2))
    at = np.linspace(-9, 9, 4001)
    integral = np.trapezoid(np.sqrt(stats.norm.cdf(at) * stats.norm.sf(at)), at)
    draws = [float(array_stats.ess(chains)) for chains in (one, other)]
    expected = np.sqrt(sum(1 / n for n in draws)) * np.sqrt(2 / np.pi) * integral
    np.testing.assert_allclose(si.distance(posterior(one), posterior(other)).loc["gamma", "floor"], expected, rtol=0.01)


def test_other_parameters_are_refused():
    x = np.zeros((1, 5))
    with pytest.raises(si.InputError, match="post: has gamma; the reference has tau0"):
        si.distance(posterior(x), posterior(x, "tau0"))
