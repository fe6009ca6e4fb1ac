"""The rounding of low-precision hidden states, compared with the change from layer to layer.

A type with unit roundoff u (2⁻¹¹ for float16, 2⁻⁸ for bfloat16) stores x as x(1 + δ), |δ| ≤ u, with errors that are
uniform between neighbours. Over many powers of two, E[(xδ)²] = σ²E[x²] with σ² = (2 ln 2/9) u² ≈ (0.39 u)². For nearly
Gaussian features, rounding therefore adds to V_αβ = Σᵢ x_αi x_βi/n an error of

    mean 0, or σ²V_αα on the diagonal,    variance 2σ² (V_αα V_ββ + 2V_αβ²)/n, twice that on the diagonal,

and to a difference of two layers twice this variance. One layer changes V_αβ by noise of variance
a (V_αα V_ββ + V_αβ²)/n (Theorems 3.2 and 4.2). Both fall as 1/n, so width does not help: the ratio of σ to √a matters,
that is, of u to the residual strength. Because a is unknown before the fit, rounding is compared with the observed
changes. A network that also runs in this type rounds X after each layer, which adds noise of the same size to its path.
The bias σ²V_αα, 2·10⁻⁶ V_αα for bfloat16, is nearly the same in every layer and cancels in differences.
"""

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np

LARGEST_SHARE = 0.1
"""Largest ratio of rounding to the change between layers, both as root mean squares, without a warning."""


class LowPrecisionWarning(UserWarning):
    """The rounding of hidden states is not small against the change from layer to layer."""


def rounding_share(covariances: Sequence[np.ndarray] | np.ndarray, *, width: float, spacing: float) -> float:
    """The ratio of rounding to the change between layers, both as root mean squares with equal weight for all pairs.

    Arguments:
        covariances: V after every observed layer, each of shape (..., m, m).
        width: n, the number of features that V averages over.
        spacing: spacing of the type's numbers above 1, which is 2u.

    Returns:
        From 0 to about 1; infinite if nothing changes, and 0 for a single layer.
    """
    variance = 2 * math.log(2) / 9 * (spacing / 2) ** 2
    rounded = changed = 0.0
    for V, after in zip(covariances[:-1], covariances[1:], strict=True):
        diagonal = np.diagonal(V, axis1=-2, axis2=-1)
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = 1 / (diagonal[..., :, None] * diagonal[..., None, :])
            terms = (1 + 2 * V**2 * scale) * (1 + np.eye(V.shape[-1]))
            changes = (after - V) ** 2 * scale
        # A token of norm 0 has no relative error.
        finite = np.isfinite(scale)
        rounded += 4 * variance / width * np.sum(terms, where=finite)
        changed += np.sum(changes, where=finite)
    if rounded == 0:
        return 0.0
    return math.sqrt(rounded / changed) if changed > 0 else math.inf


def spacing_of(dtype: np.dtype) -> float:
    """The spacing above 1 of a type's numbers if it is coarser than that of float32, otherwise 0."""
    spacing = 0.0 if dtype.kind in "iu" else float(ml_dtypes.finfo(dtype).eps)
    return spacing if spacing > np.finfo(np.float32).eps else 0.0
