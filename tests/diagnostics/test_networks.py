"""Networks that share weights: prompts of one network that were taken for networks."""

import numpy as np
import pytest
import xarray as xr
from helpers.numpy_networks import states_of

import sdeinfer as si

NAME = "correlation between networks"


def checked_with(fitted: xr.DataTree, X: np.ndarray):
    """The verdicts on other networks of the fitted parameters, by their covariances alone."""
    tree, V = fitted.copy(), X @ X.swapaxes(-1, -2) / X.shape[-1]
    data = tree["observed_data"].to_dataset()
    tree["observed_data"] = xr.DataTree(data.assign(covariance=data["covariance"].copy(data=V)))
    return si.check(tree)


@pytest.mark.one_case
@pytest.mark.parametrize("shared", [True, False])
def test_prompts_of_one_network_are_not_networks(fitted, checked, shared):
    sizes = {"networks": 24, "depth": 10, "tokens": 3, "gamma": 0.6}
    found = checked_with(fitted, states_of(0, start="prompts", shared_by="networks" if shared else "", **sizes))
    assert found.to_frame().loc[NAME, "passed"] == (not shared)
    if shared:
        assert found.cause is not None
        assert found.cause.name == NAME
        assert "share weights" in found.verdict
    assert NAME not in checked.to_frame().index  # of networks that start from the same tokens
