"""Outputs of networks with known covariances."""

import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import PRNGKeyArray

from sdeinfer._arguments import at_least_one, checked
from sdeinfer._files import InputError
from sdeinfer.layers import architecture_in
from sdeinfer.observation import observe_outputs, truth_of, validate


@checked
def sample_outputs(data: xr.Dataset, *, outputs: int, key: PRNGKeyArray) -> xr.Dataset:
    """Draw outputs of observed networks: X_out = X W_out with N(0, 1/n) weights is N(0, V_T ⊗ I_q) given V_T (Eq. 21).

    Arguments:
        data: networks observed from layer 0 on; the outputs follow their last observed layer.
        outputs: q, number of outputs per network.
        key: PRNG key.

    Returns:
        The Dataset of `observe_outputs`, with the networks' architecture and truth.

    Raises:
        InputError: for invalid data, data that do not start at layer 0, and fewer than one output.
    """
    data = validate(data)
    at_least_one(outputs=outputs)
    layers = data["layer"].values
    if layers[0] != 0:
        raise InputError(f"layer: the initial covariance, of layer 0, is needed; the first layer is {layers[0]:g}")
    V = data["covariance"].values.astype(np.float64)
    normals = np.asarray(jr.normal(key, (*V.shape[:1], V.shape[-1], outputs)), np.float64)
    values, vectors = np.linalg.eigh(V[:, -1])
    root = vectors * np.sqrt(np.maximum(values, 0.0))[:, None]
    return observe_outputs(
        root @ normals,
        V[:, 0],
        width=data["width"].values,
        depth=int(layers[-1]),
        architecture=architecture_in(data.attrs),
        truth=truth_of(data.attrs),
    )
