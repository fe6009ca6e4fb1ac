import jax.random as jr
import numpy as np
import pytest
import xarray as xr

import sdeinfer as si
from sdeinfer.observation import covariance_dataset, truth_of, validate


@pytest.fixture
def covariance() -> np.ndarray:
    X = np.random.default_rng(0).normal(size=(3, 4, 2, 8))
    return X @ np.swapaxes(X, -1, -2) / 8


def test_a_width_that_is_not_the_number_of_features_is_refused():
    X = jr.normal(jr.key(0), (1, 2, 3, 16))
    xr.testing.assert_identical(si.observe(X, width=16), si.observe(X))
    with pytest.raises(si.InputError, match="width: hidden_states: layer 0 has 16 features, got width 32"):
        si.observe(X, width=32)


def test_dimensions_may_come_in_any_order(covariance):
    data = covariance_dataset(covariance, width=8)
    shuffled = data.transpose("token_b", "layer", "token_a", "network")
    xr.testing.assert_equal(validate(shuffled), data)


def test_truth_and_architecture_are_attributes(covariance):
    data = covariance_dataset(covariance, width=[8, 16, 8], architecture="mlp", truth={"c_plus": 1})
    assert data.attrs["architecture"] == "mlp"
    assert truth_of(data.attrs) == {"c_plus": 1.0}
    assert list(data["width"].values) == [8, 16, 8]


def changed(data: xr.Dataset, place, value) -> xr.Dataset:
    data["covariance"][place] = value
    return data


BROKEN = {
    "asymmetric": (
        lambda data: changed(data, (1, 2, 0, 1), data["covariance"][1, 2, 0, 1] + 0.1),
        r"network 1, layer 2: not symmetric: \|V − Vᵀ\| reaches 0.1",
    ),
    "indefinite": (
        lambda data: changed(data, (2, 3), np.array([[1.0, 2.0], [2.0, 1.0]])),
        "network 2, layer 3: not positive semi-definite: smallest eigenvalue -1",
    ),
    "nan": (lambda data: changed(data, (0, 1, 1, 1), np.nan), "network 0, layer 1: 1 entries are NaN or infinite"),
    "names": (
        lambda data: data.rename(token_a="row"),
        "needs dimensions network, layer, token_a, token_b, got network, layer, row, token_b",
    ),
    "rectangular": (lambda data: data.isel(token_a=[0]), "token_a and token_b must have one length, got 1 and 2"),
    "single layer": (lambda data: data.isel(layer=[0]), "at least 2 layers are needed"),
    "no layers": (lambda data: data.drop_vars("layer"), "layer: a coordinate"),
    "fractional layer": (lambda data: data.assign_coords(layer=[0, 1, 2, 2.5]), "layer numbers must be whole"),
    "repeated layer": (lambda data: data.assign_coords(layer=[0, 1, 1, 2]), "must start at 0 or later and increase"),
    "time as layer": (
        lambda data: data.assign_coords(layer=np.arange(4).astype("timedelta64[s]")),
        "layer numbers must be whole",
    ),
    "no width": (lambda data: data.drop_vars("width"), "width: a coordinate on network"),
    "zero width": (
        lambda data: data.assign_coords(width=("network", [8, 0, 8])),
        "every width must be at least 1",
    ),
    "complex width": (lambda data: data.assign_coords(width=8 + 1j), "every width must be at least 1"),
    "narrow": (lambda data: data.assign_coords(width=1), "width: must be at least the number of tokens, 2, got 1"),
    "no variable": (lambda data: data.rename(covariance="V"), "no variable `covariance`"),
    "integers": (lambda data: data.astype(int), "real floating-point numbers are needed"),
    "no network": (lambda data: data.isel(network=[]), "no network in the data"),
    "correlations": (
        lambda data: (
            data
            / np.sqrt(
                data["covariance"].values.diagonal(0, 2, 3)[..., :, None]
                * data["covariance"].values.diagonal(0, 2, 3)[..., None, :]
            )
        ),
        "network 0, layer 0: no token changes its norm in any layer: these are correlations",
    ),
    "one that is zero": (lambda data: changed(data, (1, 2), 0.0), "network 1, layer 2: the covariance is zero"),
    "a layer twice": (
        lambda data: changed(data, (1, 2), data["covariance"].values[1, 1]),
        "network 1, layer 1: the covariance of the next layer is the same: a layer was recorded twice",
    ),
    "networks for layers": (
        lambda data: changed(data, 1, data["covariance"].values[1, 0]),
        "network 1, layer 0: the covariance is the same after every layer: networks are in the place of layers",
    ),
    "truth in words": (
        lambda data: data.assign_attrs(truth_note="hello"),
        "truth_note: a number is needed, got 'hello'",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_bad_data_get_one_line_that_says_what_and_where(covariance, what):
    make, message = BROKEN[what]
    with pytest.raises(ValueError, match=message) as refusal:
        validate(make(covariance_dataset(covariance, width=8)))
    assert "\n" not in str(refusal.value)


def test_masked_entries_are_refused(covariance):
    with pytest.raises(si.InputError, match="covariance: 24 entries are masked"):
        covariance_dataset(
            np.ma.masked_where(np.arange(4)[:, None, None] % 2 > np.zeros_like(covariance), covariance), width=8
        )
    with pytest.raises(si.InputError, match="outputs: 1 entries are masked"):
        si.observe_outputs(np.ma.masked_equal(np.arange(24.0).reshape(3, 2, 4), 5), np.eye(2), width=8, depth=3)


def test_one_width_serves_all_networks(covariance):
    data = covariance_dataset(covariance, width=8)
    xr.testing.assert_identical(validate(data.assign_coords(width=8)), data)


def test_hidden_states_are_sent_to_observe(unchecked):
    with pytest.raises(si.InputError, match="data: a Dataset of covariances is needed, got ndarray; sdeinfer.observe"):
        si.validate(np.zeros((2, 3, 4, 8)))
