"""Whether hidden states change along their layers as states of layers do, or along another axis."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from sdeinfer._files import InputError

SEEN = 4
"""Largest numbers of layers, networks, prompts and tokens that are looked at."""

CLOSER = 0.5
"""Ratio of the changes along an axis to those along layers below which the axis is one of layers: a residual layer of
strength γ leaves a cosine of √(1 − γ²), while networks of the same input lose γ² at once."""


def require_layers(states: Sequence[np.ndarray], *, declared: bool) -> None:
    """Check that neighbouring layers are closer to each other than neighbouring networks, or undeclared prompts.

    Arguments:
        states: hidden states after the first layers, each of shape (networks, tokens, width) or (networks, prompts,
            tokens, width).
        declared: whether the caller said that the second axis is one of prompts.

    Raises:
        InputError: naming the axis that looks like one of layers.
    """
    if not states:
        return
    shape, axes = states[0].shape, ("networks", "prompts", "tokens", "width")
    names = axes if len(shape) == 4 else (axes[0], *axes[2:])
    read = ", ".join(f"{size} {name}" for size, name in zip(shape, names, strict=True))
    X = np.stack([state[(slice(SEEN),) * (len(shape) - 1)].astype(np.float64) for state in states])
    for name in ("networks",) if declared or len(shape) == 3 else ("prompts", "networks"):
        if _like_layers(np.moveaxis(X, 1 + names.index(name), 1)):
            raise InputError(
                f"hidden_states: read as layers of {read}, but states are closer along the {name} than along the "
                "layers: one array (networks, layers, tokens, width), or a list of layers (networks, tokens, width), "
                "is needed" + ("; if these are prompts, say so by prompts=slice(None)" if name == "prompts" else "")
            )


def _like_layers(X: Float[np.ndarray, "..."]) -> bool:
    """Whether the second axis starts from one state in all layers, or its neighbours are much closer than layers."""
    if min(X.shape[:2]) < 2:
        return False
    same = (X[1:] == X[:1]).all(axis=(0, *range(2, X.ndim)))
    along_layers = _changes(X).mean()
    # Networks may start from the same tokens, and are the same at layer 0.
    along_others = _changes(X[1:].swapaxes(0, 1)).max()
    return bool((same[0] and not same.all()) or 0 < along_others < CLOSER * along_layers)


def _changes(X: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """1 − cos of neighbours, the mean over tokens; those that are zero do not count."""
    before, after = X[:-1], X[1:]
    norms = np.linalg.norm(before, axis=-1) * np.linalg.norm(after, axis=-1)
    cosines = (before * after).sum(axis=-1) / np.where(norms > 0, norms, 1.0)
    axes = tuple(range(1, cosines.ndim))
    return 1 - cosines.sum(axis=axes) / np.maximum((norms > 0).sum(axis=axes), 1)
