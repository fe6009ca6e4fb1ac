"""The strength γ by hidden states: on average a residual branch adds nothing along them, whatever the noise of V is."""

import math

import numpy as np

from sdeinfer.diagnostics._residuals import Residuals
from sdeinfer.diagnostics._thresholds import FEWEST_SHORTCUTS, SHORTCUT_DEVIATIONS
from sdeinfer.diagnostics._verdict import Check, at_most
from sdeinfer.layers._templates import is_named
from sdeinfer.likelihood._transitions import used_of
from sdeinfer.observation._dataset import SHORTCUT

BRANCHES = {"transformer": 2, "attention": 1, "feedforward": 1}
"""Residual branches of a layer by its architecture."""


def check_shortcuts(residuals: Residuals) -> Check:
    """The verdict on λ = √(1 − γ²) by the posterior against that by the hidden states, of transitions that were fitted.

    The last weights of a branch have mean 0 and are independent of what comes before, so that the mean of X_ℓ given
    X_ℓ₋₁ is λ^k X_ℓ₋₁ for a layer of k branches: exactly, at every width and in every range. The noise of V determines
    γ only for the sizes that were fitted, and for independent normal weights.
    """
    kind, data, draws = residuals.known_kind, residuals.data, residuals.draws
    observed = SHORTCUT in data.coords and set(data[SHORTCUT].dims) == {"network", "layer"}
    if not observed or not residuals.one_layer or not is_named(kind) or kind.name not in BRANCHES:
        return Check()
    shortcuts = data[SHORTCUT].transpose("network", "layer").values[:, 1:][used_of(data)]
    shortcuts = shortcuts[np.isfinite(shortcuts)]
    gamma = draws["gamma"].values if "gamma" in draws else np.array([residuals.fixed.get("gamma", np.nan)])
    if len(shortcuts) < FEWEST_SHORTCUTS or np.isnan(gamma).any():
        return Check()
    branches = BRANCHES[kind.name]
    expected = (1 - gamma**2) ** (branches / 2)
    mean, error = float(shortcuts.mean()), float(shortcuts.std() / math.sqrt(len(shortcuts)))
    away = abs(mean - expected.mean()) / math.hypot(error, float(expected.std()))
    by_states = math.sqrt(max(0.0, 1 - max(mean, 0.0) ** (2 / branches)))
    advice = (
        f"gamma is {by_states:.3g} by the regression of hidden states on those before, and {gamma.mean():.3g} in the "
        "fit: the layer has other sizes (heads, output projection, expansion), states between layers are missing, the "
        "softmax is out of range, weights are not drawn as independent normals, or λ² + γ² = 1 does not hold"
    )
    return Check((at_most("calibrated", "gamma by hidden states, sds", away, SHORTCUT_DEVIATIONS, advice),))
