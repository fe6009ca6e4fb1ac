"""Networks that share weights: prompts of one network that were taken for networks."""

import warnings

import numpy as np
import pytest
import xarray as xr
from numpy_networks import states_of

import sdeinfer as si

NAME = "correlation between networks"


def checked_with(fitted: xr.DataTree, X: np.ndarray):
    """The verdicts on other networks of the fitted parameters, by their covariances alone."""
    tree, V = fitted.copy(), X @ X.swapaxes(-1, -2) / X.shape[-1]
    data = tree["observed_data"].to_dataset()
    tree["observed_data"] = xr.DataTree(data.assign(covariance=data["covariance"].copy(data=V)))
    return si.check(tree)


@pytest.mark.parametrize("shared", [True, False])
def test_prompts_of_one_network_are_not_networks(fitted, shared):
    sizes = {"networks": 24, "depth": 10, "tokens": 3, "gamma": 0.6}
    found = checked_with(fitted, states_of(0, start="prompts", shared_by="networks" if shared else "", **sizes))
    assert found.to_frame().loc[NAME, "passed"] == (not shared)
    if shared:
        assert found.cause is not None
        assert found.cause.name == NAME
        assert "share weights" in found.verdict


def test_networks_that_start_from_the_same_tokens_are_not_compared(checked):
    assert NAME not in checked.to_frame().index


@pytest.mark.parametrize("tokens", [2, 4])
def test_observe_warns_of_shared_weights_whatever_the_tokens(tokens):
    for start, width in (("prompts", 96), ("prompts", 32), ("orthogonal", 96)):
        sizes = {"tokens": tokens, "width": width, "depth": 6, "start": start}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            data = si.observe(states_of(1, **sizes))
        assert "shared_weights" not in data.attrs
    with pytest.warns(si.SharedWeightsWarning, match=r"give the prompts a dimension of their own"):
        data = si.observe(states_of(1, start="prompts", shared_by="networks", tokens=tokens, depth=6))
    assert data.attrs["shared_weights"]


def test_a_strength_or_a_final_normalisation_does_not_matter():
    for gamma in (0.02, 0.8):
        with pytest.warns(si.SharedWeightsWarning):
            si.observe(states_of(2, start="prompts", shared_by="networks", gamma=gamma))
        X = states_of(2, gamma=gamma, depth=4)
        X[:, -1] /= np.sqrt(np.mean(X[:, -1] ** 2, axis=-1, keepdims=True))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            si.observe(X)


def test_a_dimension_of_prompts_is_no_reason_to_warn():
    X = states_of(3, start="prompts", shared_by="networks", networks=2, tokens=2, depth=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        si.observe(state[None] for state in X.swapaxes(0, 1))


def test_what_observe_has_seen_is_not_forgotten(fitted):
    tree = fitted.copy()
    data = tree["observed_data"].to_dataset().assign_attrs(shared_weights=1.0)
    tree["observed_data"] = xr.DataTree(data)
    found = si.check(tree)
    assert found.cause is not None
    assert found.cause.name == NAME
