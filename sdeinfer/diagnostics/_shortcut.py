"""The strength γ by hidden states: on average a residual branch adds nothing along them, whatever the noise of V is."""

import math

import numpy as np

from sdeinfer.diagnostics._posterior import Posterior
from sdeinfer.diagnostics._thresholds import DEVIATIONS, FEWEST_OF_A_LAYER
from sdeinfer.diagnostics._verdict import Verdict, at_most
from sdeinfer.observation._dataset import SHORTCUT

BRANCHES = {"transformer": 2, "attention": 1, "feedforward": 1}
"""Residual branches of a layer by its architecture."""


def of_shortcuts(posterior: Posterior) -> list[Verdict]:
    """The verdict on λ = √(1 − γ²) by the posterior against that by the hidden states.

    The last weights of a branch have mean 0 and are independent of what comes before, so that E[X | X′] = λ^k X′ for a
    layer of k branches: exactly, at every width and in every range. The noise of V determines γ only for independent
    normal weights.
    """
    data, draws = posterior.data, posterior.tree["posterior"].to_dataset()
    branches = BRANCHES.get(posterior.known_kind.name)
    if branches is None or not posterior.one_layer or SHORTCUT not in data.coords:
        return []
    gamma = draws["gamma"].values if "gamma" in draws else np.array([posterior.fixed.get("gamma", np.nan)])
    kept = data[SHORTCUT].values[:, 1:]
    if kept.size < FEWEST_OF_A_LAYER or gamma.ndim > 2 or not np.isfinite(kept).all() or np.isnan(gamma).any():
        return []
    expected = (1 - gamma**2) ** (branches / 2)
    mean, error = float(kept.mean()), float(kept.std() / math.sqrt(kept.size))
    away = abs(mean - expected.mean()) / math.hypot(error, float(expected.std()))
    by_states = math.sqrt(max(0.0, 1 - max(mean, 0.0) ** (2 / branches)))
    advice = (
        f"gamma is {by_states:.3g} by what hidden states keep of those before, and {gamma.mean():.3g} by the noise of "
        "covariances: weights are not independent normals, as orthogonal ones, states between layers are missing, or "
        "λ² + γ² = 1 does not hold"
    )
    return [at_most("calibrated", "gamma by hidden states, sds", away, DEVIATIONS, advice)]
