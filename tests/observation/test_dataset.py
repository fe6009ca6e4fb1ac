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
    with pytest.raises(si.InputError, match="width: the hidden states have 16 features at .*, got width 32"):
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


def broken(covariance, what: str) -> xr.Dataset:
    data = covariance_dataset(covariance, width=8)
    V = data["covariance"]
    match what:
        case "asymmetric":
            V[1, 2, 0, 1] += 0.1
        case "indefinite":
            V[2, 3] = np.array([[1.0, 2.0], [2.0, 1.0]])
        case "nan":
            V[0, 1, 1, 1] = np.nan
        case "names":
            data = data.rename(token_a="row")
        case "rectangular":
            data = data.isel(token_a=[0])
        case "single layer":
            data = data.isel(layer=[0])
        case "no layers":
            data = data.drop_vars("layer")
        case "fractional layer":
            data = data.assign_coords(layer=[0.0, 1.0, 2.0, 2.5])
        case "repeated layer":
            data = data.assign_coords(layer=[0, 1, 1, 2])
        case "no width":
            data = data.drop_vars("width")
        case "zero width":
            data = data.assign_coords(width=("network", [8, 0, 8]))
        case "no variable":
            data = data.rename(covariance="V")
        case "integers":
            data["covariance"] = V.astype(int)
        case "narrow":
            data = data.assign_coords(width=1)
        case "complex width":
            data = data.assign_coords(width=8 + 1j)
        case "time as layer":
            data = data.assign_coords(layer=np.arange(4).astype("timedelta64[s]"))
        case "truth in words":
            data.attrs["truth_note"] = "hello"
        case "no network":
            data = data.isel(network=[])
    return data


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("asymmetric", r"network 1, layer 2: not symmetric: \|V − Vᵀ\| reaches 0.1"),
        ("indefinite", "network 2, layer 3: not positive semi-definite: smallest eigenvalue -1"),
        ("nan", "network 0, layer 1: 1 entries are NaN or infinite"),
        ("names", "needs dimensions network, layer, token_a, token_b, got network, layer, row, token_b"),
        ("rectangular", "token_a and token_b must have one length, got 1 and 2"),
        ("single layer", "at least 2 layers are needed"),
        ("no layers", "layer: a coordinate"),
        ("fractional layer", "layer numbers must be whole"),
        ("repeated layer", "must start at 0 or later and increase"),
        ("no width", "width: a coordinate on network"),
        ("zero width", "every width must be at least 1"),
        ("no variable", "no variable `covariance`"),
        ("integers", "real floating-point numbers are needed"),
        ("no network", "no network in the data"),
        ("narrow", "width: must be at least the number of tokens, 2, got 1"),
        ("complex width", "every width must be at least 1"),
        ("time as layer", "layer numbers must be whole"),
        ("truth in words", "truth_note: a number is needed, got 'hello'"),
    ],
)
def test_bad_data_get_one_line_that_says_what_and_where(covariance, what, message):
    with pytest.raises(ValueError, match=message) as refusal:
        validate(broken(covariance, what))
    assert "\n" not in str(refusal.value)


def test_one_width_serves_all_networks(covariance):
    data = covariance_dataset(covariance, width=8)
    xr.testing.assert_identical(validate(data.assign_coords(width=8)), data)


def test_hidden_states_are_sent_to_observe(unchecked):
    with pytest.raises(si.InputError, match="data: a Dataset of covariances is needed, got ndarray; sdeinfer.observe"):
        si.validate(np.zeros((2, 3, 4, 8)))
