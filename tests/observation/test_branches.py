"""Residual branches, observed: against sums over indices, and with everything that may be wrong with them."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import xarray as xr
from branch_references import assert_branches, branch_sums

import sdeinfer as si
from sdeinfer.observation import (
    BRANCH_DIMS,
    branches_dataset,
    joined_branches,
    validate_branches,
)

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
    with pytest.raises(si.InputError, match=r"^kinds: 3 kinds do not divide the 4 branches of the hidden states$"):
        si.observe_branches(stream, ["a", "b", "c"])
    with pytest.raises(si.InputError, match="kinds: a list of at least one kind is needed, got \\(\\)"):
        si.observe_branches(stream, ())


def change(X, index, value):
    X = X.copy()
    X[index] = value
    return X


ARRAYS = {
    "finite input": (lambda U, D: (change(U, (1, 0, 0), np.nan), D), "input: {1}: 1 entries are NaN or infinite"),
    "finite": (lambda U, D: (U, change(D, (2, 1), np.inf)), "increment: {2}: 8 entries are NaN or infinite"),
    "zero": (lambda U, D: (U, change(D, (0, 1), 0)), "increment: {0}: token 1 gets no increment, which has no density"),
    "equal": (
        lambda U, D: (U, change(D, (3, 2), D[3, 0])),
        "increment: {3}: tokens 0 and 2 get parallel increments, as equal tokens or uniform attention do, which have "
        "no density: leave one of them out",
    ),
    "dependent": (
        lambda U, D: (U, change(D, (3, 2), D[3, 0] + D[3, 1])),
        "increment: {3}: tokens 0, 1, 2 get linearly dependent increments",
    ),
    "equal in single precision": (
        lambda U, D: (U, change(D, (3, 2), np.float32(D[3, 0]))),
        "increment: {3}: tokens 0 and 2 get parallel increments, as equal tokens or uniform attention do, which have "
        "no density: leave one of them out",
    ),
    "one dimension": (
        lambda U, D: (U[:, 0], D),
        "input: {0}: shape (tokens, width) or (prompts, tokens, width) is needed, got (8,)",
    ),
    "another shape": (
        lambda U, D: (U, D[..., :4]),
        "increment: {0}: has shape (3, 4), where the first has (3, 8)",
    ),
    "narrow": (
        lambda U, D: (U[..., :2], D[..., :2]),
        "input: {0}: 2 features for 3 tokens make the covariance singular, and no law of a layer has a density there: "
        "observe at most 2 tokens, or wider networks",
    ),
    "half": (
        lambda U, D: (U, D.astype(np.float16)),
        "increment: {0}: float16 rounds the sums inside the branch: run the network in float32",
    ),
    "complex": (lambda U, D: (U + 1j, D), "input: {0}: real numbers are needed, got complex128"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_arrays_that_are_no_branches(name, U, D):
    make, message = ARRAYS[name]
    places = [f"network 5, branch {b} ({kind}.{b})" for b, kind in enumerate(KINDS)]
    with pytest.raises(si.InputError) as caught:
        observed(*make(U[0], D[0]), network=5)
    assert str(caught.value) == message.format(*places)


def test_observers_that_are_refused(U, D):
    for make, message in (
        (lambda: si.BranchObserver(0), "width: a whole number of at least 1 is needed, got 0"),
        (lambda: si.BranchObserver(reads="both"), "reads: one of branch, stream is needed, got 'both'"),
        (lambda: si.BranchObserver().dataset(), "branches: no branch was given"),
        (lambda: observed(U[0], D[0], width=9), r"width: input: network 0, .* has 8 features, got width 9"),
        (lambda: joined_branches([]), "branches: no network was given"),
        (
            lambda: joined_branches([observed(U[0], D[0]), observed(U[0], D[0][:2])]),
            r"branches: network 1 has branches \['attention.0', 'mlp.1'\], where network 0 has \['attention.0', 'mlp",
        ),
        (
            lambda: joined_branches([observed(U[0], D[0]), observed(U[0, :, :2], D[0, :, :2])]),
            "branches: network 1 has tokens 2, where network 0 has 3",
        ),
        (lambda: joined_branches([observed(U[0], D[0])] * 2), "increment: networks 0 and 1: the same increments"),
    ):
        with pytest.raises(si.InputError, match=f"^{message}"):
            make()


def test_a_dataset_of_arrays(data, U, D):
    sums = [branch_sums(*each) for each in zip(U, D, strict=True)]
    arrays = {name: np.stack([each[name] for each in sums]) for name in BRANCH_DIMS}
    found = branches_dataset(**arrays, width=WIDTH, kinds=KINDS)
    xr.testing.assert_allclose(found, data, rtol=1e-9)
    named = branches_dataset(**arrays, width=[8, 9], kinds=KINDS, names=list("abcd"), reads="stream")
    assert named["name"].values.tolist() == list("abcd")
    assert named["width"].values.tolist() == [8, 9]
    for wrong, message in (
        ({"input": arrays["mean"]}, r"input: dimensions network, branch, token_a, token_b are needed, got shape"),
        ({"kurtosis": np.ones((2, 3))}, r"kurtosis: shape \(2, 4\) is needed beside `mean`, got \(2, 3\)"),
        ({"kinds": ["mlp"]}, r"kinds: one for each of 4 branches is needed, got \['mlp'\]"),
        ({"names": "abcd"}, "names: one for each of 4 branches is needed, got 'abcd'"),
        ({"width": [8]}, r"width: one number, or one for each of 2 networks, is needed, got \(1,\)"),
        ({"pattern": si.Pattern(prompts=(2, 2))}, r"pattern: prompts of 2 \+ 2 tokens for 3 tokens"),
    ):
        with pytest.raises(si.InputError, match=f"^{message}"):
            branches_dataset(**(arrays | {"width": WIDTH, "kinds": KINDS} | wrong))


def with_entry(name, value, **place):
    def make(data):
        data = data.copy(deep=True)
        data[name][place] = value
        return data

    return make


DATASETS = {
    "no dataset": (lambda data: 3, "data: a Dataset of residual branches is needed, got int"),
    "variable": (lambda data: data.drop_vars("cross"), "data: no variable `cross`, only"),
    "dimensions": (lambda data: data.isel(token_a=0), "input: needs dimensions network, branch, token_a, token_b, got"),
    "type": (lambda data: data.assign(mean=data["mean"].astype(int)), "mean: real floating-point numbers are needed"),
    "empty": (lambda data: data.isel(network=[]), "data: no network in it"),
    "lengths": (lambda data: data.isel(token_a=[0]), "data: token_a and token_b must have one length, got 1, 3"),
    "coordinate": (lambda data: data.drop_vars("kind"), "kind: a coordinate on branch is needed"),
    "width": (lambda data: data.assign_coords(width=data["width"] * 0 + 2), "width: whole numbers of at least 3"),
    "reads": (lambda data: data.assign_attrs(reads="x"), "reads: one of branch, stream is needed, got 'x'"),
    "pattern": (lambda data: data.assign_attrs(prompts="1,1"), r"pattern: prompts of 1 \+ 1 tokens for 3 tokens"),
    "finite": (
        with_entry("input", np.nan, network=1, branch=2, token_a=0),
        r"input: network 1, branch 2 \(attention.2\): 3 entries are NaN or infinite",
    ),
    "symmetric": (
        with_entry("increment", 0.5, network=0, branch=1, token_a=0, token_b=1),
        r"increment: network 0, branch 1 \(mlp.1\): not symmetric",
    ),
    "semi-definite": (
        with_entry("input", -1.0, network=0, branch=0, token_a=1, token_b=1),
        r"input: network 0, branch 0 \(attention.0\): not positive semi-definite",
    ),
    "mean": (with_entry("mean", 9.0, network=1, branch=0), r"mean: network 1, .* not positive semi-definite"),
    "cross": (with_entry("cross", 9.0, network=1, branch=3), r"cross: network 1, branch 3 .* not positive semi-def"),
    "between": (
        with_entry("between", 9.0, network=1, branch=1, other_branch=2),
        r"between: network 1, branch 1 \(mlp.1\): disagrees with `increment`, or with its transpose at branch 2",
    ),
    "not finite between": (
        with_entry("between", np.nan, network=1, branch=1, other_branch=1),
        r"between: network 1, branch 1 \(mlp.1\): disagrees",
    ),
    "kurtosis": (with_entry("kurtosis", -1.0, network=0, branch=3), r"kurtosis: network 0, branch 3 .* positive"),
    "singular": (lambda data: doubled(data), r"increment: network 0, branch 0 .*: tokens 0 and 1 get parallel"),
    "twice": (lambda data: data.isel(network=[0, 0]), "increment: networks 0 and 0: the same increments"),
}


def doubled(data):
    """Tokens 0 and 1 are the same."""
    return data.isel(token_a=[0, 0, 2], token_b=[0, 0, 2])


@pytest.mark.parametrize("name", DATASETS)
def test_datasets_that_are_refused(name, data, unchecked):
    make, message = DATASETS[name]
    with pytest.raises(si.InputError, match=f"^{message}") as caught:
        validate_branches(make(data))
    assert "\n" not in str(caught.value)


def test_canonical_order(data):
    xr.testing.assert_identical(validate_branches(data.transpose("token_b", "other_branch", "branch", ...)), data)


def test_a_file_holds_all(data, tmp_path):
    data.to_netcdf(tmp_path / "data.nc", engine="h5netcdf")
    with xr.open_dataset(tmp_path / "data.nc", engine="h5netcdf") as file:
        xr.testing.assert_identical(validate_branches(file.load()), data)
