"""The rate at which a squared distance falls with the width, with its error."""

import math
from typing import Any

import numpy as np

CURVATURE = 4.0
"""Assumed size of the next order in 1/n, as a multiple of D²/n; 2 to 3.5 were measured."""

SIGNAL = 3.0
"""Smallest ratio of D² to its error, required at one width at least, for a rate to be fitted."""

RATES = np.linspace(-1.0, 4.0, 501)
"""Grid of rates for the fit."""


def jackknife(without: np.ndarray) -> Any:
    """Jackknife standard error from the estimates without each part, along the last axis."""
    parts = without.shape[-1]
    return np.sqrt((parts - 1) * without.var(axis=-1))


def fit_rate(
    widths: np.ndarray, squared: np.ndarray, without: np.ndarray, error: np.ndarray
) -> tuple[float, float, float]:
    """Rate r, its error, and constant C of D² = C² n^(−2r), by weighted least squares.

    Arguments:
        widths: n.
        squared: D² at each width.
        without: D² without each part, for the jackknife; shape (widths, parts).
        error: standard errors of D².

    Returns:
        The three numbers; NaN for a single width, or if no D² exceeds `SIGNAL` times its error.
    """
    if len(widths) < 2 or not np.isfinite(squared).all() or (squared <= SIGNAL * error).all():
        return math.nan, math.nan, math.nan
    weight = 1 / (error**2 + (CURVATURE * squared / widths) ** 2)
    # In units of the widths' geometric mean, amplitude and rate are nearly uncorrelated.
    unit = np.exp(np.log(widths).mean())
    powers = (widths / unit) ** (-2 * RATES[:, None])
    curved = squared * (1 + CURVATURE / widths)
    replicates = np.stack([squared, curved, *without.T])
    # Reduction of the sum of squares by the best amplitude, for each rate.
    overlap = np.maximum((weight * replicates) @ powers.T, 0.0)
    gain = overlap**2 / (weight * powers**2).sum(axis=1)
    rate = _peak(gain)
    error_of_rate = math.hypot(float(jackknife(rate[2:])), rate[1] - rate[0])
    power = (widths / unit) ** (-2 * rate[0])
    amplitude = (weight * squared * power).sum() / (weight * power**2).sum()
    return float(rate[0]), error_of_rate, math.sqrt(amplitude) * unit ** rate[0]


def _peak(gain: np.ndarray) -> np.ndarray:
    """Rate with the largest gain in each row, by a parabola through the three nearest points."""
    best = np.clip(gain.argmax(axis=1), 1, len(RATES) - 2)
    below, at, above = (np.take_along_axis(gain, best[:, None] + i, axis=1)[:, 0] for i in (-1, 0, 1))
    bend = below - 2 * at + above
    shift = np.where(bend < 0, (below - above) / np.where(bend < 0, 2 * bend, 1.0), 0.0)
    return RATES[best] + np.clip(shift, -1, 1) * (RATES[1] - RATES[0])
