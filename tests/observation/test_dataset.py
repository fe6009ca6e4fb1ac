import numpy as np
import xarray as xr
from helpers.internals import truth_of

from sdeinfer.observation import covariance_dataset, validate


def test_a_dataset_has_its_labels_in_any_order_of_dimensions_and_with_one_width():
    X = np.random.default_rng(0).normal(size=(3, 4, 2, 8))
    V = X @ np.swapaxes(X, -1, -2) / 8
    data = covariance_dataset(V, width=[8, 16, 8], architecture="mlp", truth={"c_plus": 1})
    assert data.attrs["architecture"] == "mlp"
    assert truth_of(data.attrs) == {"c_plus": 1.0}
    assert list(data["width"].values) == [8, 16, 8]
    data = covariance_dataset(V, width=8)
    xr.testing.assert_equal(validate(data.transpose("token_b", "layer", "token_a", "network")), data)
    xr.testing.assert_identical(validate(data.assign_coords(width=8)), data)
