"""How far one posterior is from another."""

import numpy as np
import pytest
import xarray as xr
from budget import assert_mean

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


def test_other_parameters_are_refused():
    x = np.zeros((1, 5))
    with pytest.raises(si.InputError, match="post: has gamma; the reference has tau0"):
        si.distance(posterior(x), posterior(x, "tau0"))
