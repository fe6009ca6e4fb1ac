"""What the values of hidden states say against them: rounding, shared weights, networks in the place of layers."""

import math
from collections.abc import Sequence

import ml_dtypes
import numpy as np
from jaxtyping import Float

from sdeinfer._files import InputError


class LowPrecisionWarning(UserWarning):
    """The rounding of hidden states is not small against the change from layer to layer."""


class SharedWeightsWarning(UserWarning):
    """The networks of one array have the same weights, as prompts of one network have."""


def spacing_of(dtype: np.dtype) -> float:
    """The spacing above 1 of a type's numbers if it is coarser than that of float32, otherwise 0."""
    spacing = 0.0 if dtype.kind in "iu" else float(ml_dtypes.finfo(dtype).eps)
    return spacing if spacing > np.finfo(np.float32).eps else 0.0


def rounding_share(covariances: Sequence[np.ndarray] | np.ndarray, *, width: float, spacing: float) -> float:
    """The ratio of rounding to the change between layers, both as root mean squares with equal weight for all pairs.

    A type with unit roundoff u (2⁻¹¹ for float16, 2⁻⁸ for bfloat16) stores x as x(1 + δ), |δ| ≤ u, with errors that are
    uniform between neighbours. Over many powers of two, E[(xδ)²] = σ²E[x²] with σ² = (2 ln 2/9) u² ≈ (0.39 u)². For
    nearly Gaussian features, rounding therefore adds to V_αβ = Σᵢ x_αi x_βi/n an error of

        mean 0, or σ²V_αα on the diagonal,    variance 2σ² (V_αα V_ββ + 2V_αβ²)/n, twice that on the diagonal,

    and to a difference of two layers twice this variance. One layer changes V_αβ by noise of variance
    a (V_αα V_ββ + V_αβ²)/n (Theorems 3.2 and 4.2). Both fall as 1/n: the ratio of σ to √a matters, that is, of u to the
    residual strength. Because a is unknown before the fit, rounding is compared with the observed changes. The bias
    σ²V_αα is nearly the same in every layer and cancels in differences.
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


class SharedWeights:
    """Whether the networks of one array share weights, layer by layer; of at most 16 networks and tokens.

    A layer adds D to the hidden states X of a network, with D Dᵀ/n ≈ c XXᵀ/n. If networks r and s have the same
    weights, D_r D_sᵀ ≈ c X_r X_sᵀ as well; if each has its own, D_r D_sᵀ has mean 0. The slope of D_r D_sᵀ on
    c X_r X_sᵀ is about 1 or 0, whatever the strength of the layers and however small the products of different tokens.
    """

    def __init__(self):
        self._before: np.ndarray | None = None
        self._total = self._information = 0.0

    def add(self, state: Float[np.ndarray, "networks tokens width"]) -> None:
        """Take the hidden states of the next layer."""
        X = np.array(state[:16, :16], np.float64)
        before, self._before = self._before, X
        if before is None or len(X) < 2:
            return
        networks, tokens, width = X.shape
        squares = np.sum(before**2, axis=-1, keepdims=True)
        # A final normalisation rescales each token, whatever the weights.
        D = X - before * (np.sum(X * before, axis=-1, keepdims=True) / np.where(squares > 0, squares, 1.0))
        if not (before.any() and D.any()):
            return
        states, increments = (x.reshape(-1, width) / np.linalg.norm(x) for x in (before, D))
        number = np.repeat(np.arange(networks), tokens)
        same = number[:, None] == number
        expected = np.where(same, 0.0, states @ states.T)
        found = increments @ increments.T
        own = np.where(same, found, 0.0) @ expected
        slope, variance = np.sum(expected**2), 2 * np.sum(own * own.T) / width
        if variance > 0:
            self._total += slope * np.sum(expected * found) / variance
            self._information += slope**2 / variance

    @property
    def found(self) -> bool:
        """Whether networks share weights: the slope is far from 0, also in standard errors."""
        if self._information == 0:
            return False
        slope = self._total / self._information
        return bool(slope > max(0.25, 4 / math.sqrt(self._information)))


def require_layers(states: Sequence[np.ndarray], shape: tuple[int, ...], *, declared: bool) -> None:
    """Check that neighbouring layers are closer to each other than neighbouring networks, or undeclared prompts."""
    if not states:
        return
    X = np.stack(states)
    names = ("networks", "prompts", "tokens", "width") if X.ndim == 5 else ("networks", "tokens", "width")
    read = ", ".join(f"{size} {name}" for size, name in zip(shape, names, strict=True))
    for name in ("networks",) if declared or X.ndim == 4 else ("prompts", "networks"):
        if _like_layers(np.moveaxis(X, 1 + names.index(name), 1)):
            raise InputError(
                f"hidden_states: read as layers of {read}, but states are closer along the {name} than "
                "along the layers: one array (networks, layers, tokens, width), or a list of layers (networks, tokens, "
                "width), is needed" + ("; if these are prompts, say so by prompts=slice(None)" * (name == "prompts"))
            )


def _like_layers(X: Float[np.ndarray, "..."]) -> bool:
    """Whether the second axis starts from one state in all layers, or its neighbours are much closer than layers."""
    if min(X.shape[:2]) < 2:
        return False
    same = (X[1:] == X[:1]).all(axis=(0, *range(2, X.ndim)))
    # Networks may start from the same tokens, and are the same at layer 0.
    along_layers, along_others = _changes(X).mean(), _changes(X[1:].swapaxes(0, 1)).max()
    return bool((same[0] and not same.all()) or 0 < along_others < 0.5 * along_layers)


def _changes(X: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """1 − cos of neighbours, the mean over tokens; those that are zero do not count."""
    before, after = X[:-1], X[1:]
    norms = np.linalg.norm(before, axis=-1) * np.linalg.norm(after, axis=-1)
    cosines = (before * after).sum(axis=-1) / np.where(norms > 0, norms, 1.0)
    axes = tuple(range(1, cosines.ndim))
    return 1 - cosines.sum(axis=axes) / np.maximum((norms > 0).sum(axis=axes), 1)
