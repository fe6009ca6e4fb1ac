"""What networks of several widths tell that those of one width cannot: the mean of c₊ and c₋."""

import functools

import jax.random as jr
import numpy as np
import pytest
import xarray as xr

import sdeinfer as si

TRUTH = {"gamma": 0.7, "c_plus": 0.0, "c_minus": -3.0}
PRIOR_SD = np.sqrt(2.0)


@functools.cache
def networks(width: int) -> xr.Dataset:
    V0 = si.equicorrelated(tokens=3, correlation=-0.3, norm=1.0)
    key = jr.fold_in(jr.key(4), width)
    return si.sample_networks(si.ResidualFeedForward(**TRUTH), V0, width=width, depth=16, networks=1500, key=key)


def mean_of_slopes(*widths: int) -> tuple[float, float]:
    """Posterior mean and sd of (c₊ + c₋)/2."""
    data = xr.concat([networks(width) for width in widths], "network", combine_attrs="override")
    post = si.fit(si.models.full_path, data, chains=2, draws=500, warmup=500, predictions=1, key=jr.key(6))
    draws = post["posterior"].to_dataset()
    half_sum = (draws["c_plus"] + draws["c_minus"]) / 2
    return float(half_sum.mean()), float(half_sum.std())


@pytest.mark.slow
def test_several_widths_identify_the_mean_of_the_slopes_and_one_leaves_it_to_the_prior():
    (_, one), (mean, several) = mean_of_slopes(64), mean_of_slopes(64, 256, 1024)
    print(f"(c₊ + c₋)/2: prior sd {PRIOR_SD:.2f}, one width {one:.2f}, three {mean:.2f} ± {several:.2f}, truth -1.5")
    # One width knows q, in which the gap can make up for the sum: the prior of the two decides.
    assert one > 0.7 * PRIOR_SD
    assert several < 0.5 * one
    assert abs(mean + 1.5) < 4 * several
