"""Networks with observed outputs but no observed hidden states."""

from collections.abc import Hashable, Mapping

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer.layers import Architecture
from sdeinfer.observation._arrays import as_array
from sdeinfer.observation._dataset import covariance_dataset

OUTPUTS = "outputs"
"""Name of the attribute that holds q, in a Dataset whose last covariances are sample covariances of q outputs."""


@checked
def observe_outputs(
    outputs: ArrayLike,
    initial: ArrayLike,
    *,
    width: ArrayLike,
    depth: int,
    architecture: str | Architecture | None = None,
    truth: Mapping[str, float] | None = None,
) -> xr.Dataset:
    """Reduce outputs X_out ~ N(0, V_T ⊗ I_q) (Eq. 21) to their sample covariance, which is sufficient for V_T.

    Arguments:
        outputs: X_out of every network, shape (networks, tokens, q).
        initial: covariance of the initial tokens, shape (tokens, tokens), or (networks, tokens, tokens).
        width: n, one number or one per network.
        depth: d, the number of layers before the outputs.
        architecture: the architecture or its name, if known.
        truth: the networks' true parameters, if known.

    Returns:
        A Dataset of two layers: 0 with the initial covariance, and d with X_out X_outᵀ/q; its attribute `outputs` is q.

    Raises:
        InputError: for arrays of other shapes, outputs that are not finite, and an `initial` that is not a covariance.
    """
    X = as_array(outputs, "outputs").astype(np.float64)
    V0 = as_array(initial, "initial").astype(np.float64)
    if X.ndim != 3 or 0 in X.shape:
        raise InputError(f"outputs: shape (networks, tokens, outputs) is needed, got {X.shape}")
    if not np.isfinite(X).all():
        raise InputError(f"outputs: {np.count_nonzero(~np.isfinite(X))} entries are NaN or infinite")
    each = (*X.shape[:2], X.shape[1])
    if V0.shape not in (each, each[1:]):
        raise InputError(f"initial: shape {each} or {each[1:]} is needed, got {V0.shape}")
    S = X @ np.swapaxes(X, -1, -2) / X.shape[-1]
    covariance = np.stack([np.broadcast_to(V0, each), S], axis=1)
    data = covariance_dataset(
        covariance, width=width, layers=np.array([0, depth]), architecture=architecture, truth=truth
    )
    return data.assign_attrs({OUTPUTS: X.shape[-1]})


def outputs_of(data: xr.Dataset | Mapping[Hashable, object]) -> int:
    """The number of outputs per network, from a Dataset or its attributes; 0 if covariances were observed directly.

    Raises:
        InputError: if the attribute is not a positive integer.
    """
    attrs = data.attrs if isinstance(data, xr.Dataset) else data
    count = attrs.get(OUTPUTS, 0)
    if not isinstance(count, int | np.integer) or (OUTPUTS in attrs and count < 1):
        raise InputError(f"outputs: a positive whole number is needed, got {count!r}")
    return int(count)
