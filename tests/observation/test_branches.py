"""Residual branches, observed: against sums over indices, and with everything that may be wrong with them."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import xarray as xr
from helpers.branch_references import assert_branches, branch_sums
from helpers.internals import BRANCH_DIMS

import sdeinfer as si
from sdeinfer.observation import branches_dataset, joined_branches, validate_branches

NETWORKS, TOKENS, WIDTH = 2, 3, 8
KINDS = ("attention", "mlp", "attention", "mlp")


@pytest.fixture
def U():
    return np.random.default_rng(0).normal(size=(NETWORKS, len(KINDS), TOKENS, WIDTH)) + 0.3


@pytest.fixture
def D():
    return 0.1 * np.random.default_rng(1).standard_t(4, size=(NETWORKS, len(KINDS), TOKENS, WIDTH))


def observed(U, D, **settings):
    """One network, branch by branch."""
    observer = si.BranchObserver(**settings)
    for u, d, kind in zip(U, D, KINDS, strict=False):
        observer.add(u, d, kind=kind)
    return observer


@pytest.fixture
def data(U, D):
    return joined_branches([observed(*each) for each in zip(U, D, strict=True)])


def test_an_observer_sums_over_features(data, U, D):
    assert_branches(data, U, D)
    assert {name: data[name].dims for name in data} == BRANCH_DIMS
    assert data["kind"].values.tolist() == list(KINDS)
    assert data["name"].values.tolist() == ["attention.0", "mlp.1", "attention.2", "mlp.3"]
    assert data["width"].values.tolist() == [WIDTH] * NETWORKS
    assert data["network"].values.tolist() == [0, 1]
    assert data["other_branch"].values.tolist() == data["branch"].values.tolist() == [0, 1, 2, 3]
    assert data.attrs == {"reads": "branch"}


def test_gaussian_increments_have_kurtosis_one():
    D = np.linalg.cholesky(np.eye(3) + 0.5) @ np.random.default_rng(0).normal(size=(3, 200_000))
    np.testing.assert_allclose(observed([D], [D]).dataset()["kurtosis"], 1, atol=0.02)


@pytest.mark.parametrize("form", [np.float32, jnp.asarray, lambda X: np.float64(X).tolist()])
def test_arrays_of_any_library(form, U, D):
    exact = np.float32(U[0]), np.float32(D[0])
    found = observed(*([form(branch) for branch in part] for part in exact)).dataset()
    assert_branches(found, exact[0][None], exact[1][None])


def test_prompts_are_flattened_as_observe_does(U, D):
    prompts = [X[0].reshape(2, 2, TOKENS, WIDTH) for X in (U, D)]
    wide = [np.concatenate([X, np.sin(2 * X)], -1) for X in prompts]
    found = observed(*wide, pattern=si.CAUSAL).dataset()
    assert_branches(found, *(X.reshape(1, 2, 2 * TOKENS, 2 * WIDTH) for X in wide))
    assert found.attrs == {"causal": 1.0, "prompts": "3,3", "reads": "branch"}
    first = observed(*wide, pattern=si.CAUSAL, tokens=[0]).dataset()
    assert_branches(first, *(X[None, :, :, 0] for X in wide))
    assert first.attrs == {"causal": 1.0, "prompts": "1,1", "reads": "branch"}
    assert observed(*wide, tokens=[1]).dataset().attrs == {"incomplete": 1.0, "reads": "branch"}
    assert observed(U[0][:, None], D[0][:, None]).dataset().attrs == {"reads": "branch"}


def test_a_branch_may_join_prompts_and_tokens(U, D):
    prompts = [X[0].reshape(2, 2, TOKENS, WIDTH) for X in (U, D)]
    wide = [np.concatenate([X, np.sin(2 * X)], -1) for X in prompts]
    observer = si.BranchObserver()
    observer.add(wide[0][0], wide[1][0], kind="attention")
    observer.add(*(X[1].reshape(2 * TOKENS, -1) for X in wide), kind="mlp")
    assert_branches(observer.dataset(), *(X.reshape(1, 2, 2 * TOKENS, 2 * WIDTH) for X in wide))


@pytest.mark.parametrize("form", [np.asarray, lambda X: list(np.swapaxes(X, 0, 1)), jnp.asarray])
def test_the_stream_is_read_by_differences(form, U, D):
    stream = np.cumsum(np.concatenate([U[:, :1], D], axis=1), axis=1)
    data = si.observe_branches(form(stream), ("attention", "mlp"), width=WIDTH, pattern=si.CAUSAL)
    assert_branches(data, stream[:, :-1], D)
    assert data["kind"].values.tolist() == list(KINDS)
    assert data.attrs == {"causal": 1.0, "reads": "stream"}


def test_a_stream_of_prompts(U, D):
    stream = np.cumsum(np.concatenate([U[:, :1], D], axis=1), axis=1)
    data = si.observe_branches(np.swapaxes(stream, 0, 1)[None, :, :, :2], ["mlp"])
    assert data.attrs == {"prompts": "2,2", "reads": "stream"}
    prompts = np.swapaxes(stream, 0, 1)[:, :, :2].reshape(1, 5, 4, WIDTH)
    assert_branches(data, prompts[:, :-1], np.diff(prompts, axis=1))


def test_a_stream_that_is_rounded(U, D):
    stream = np.cumsum(np.concatenate([U[:, :1], 0.1 * D], axis=1), axis=1)
    with pytest.warns(si.LowPrecisionWarning, match="bfloat16 rounds by"):
        si.observe_branches(stream.astype(ml_dtypes.bfloat16), ["mlp"])


def test_a_dataset_of_arrays(data, U, D):
    sums = [branch_sums(*each) for each in zip(U, D, strict=True)]
    arrays = {name: np.stack([each[name] for each in sums]) for name in BRANCH_DIMS}
    found = branches_dataset(**arrays, width=WIDTH, kinds=KINDS)
    xr.testing.assert_allclose(found, data, rtol=1e-9)
    named = branches_dataset(**arrays, width=[8, 9], kinds=KINDS, names=list("abcd"), reads="stream")
    assert named["name"].values.tolist() == list("abcd")
    assert named["width"].values.tolist() == [8, 9]


def test_a_file_holds_all_in_any_order_of_dimensions(data, tmp_path):
    data.transpose("token_b", "other_branch", "branch", ...).to_netcdf(tmp_path / "data.nc", engine="h5netcdf")
    with xr.open_dataset(tmp_path / "data.nc", engine="h5netcdf") as file:
        xr.testing.assert_identical(validate_branches(file.load()), data)
