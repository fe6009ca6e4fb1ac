"""The noise of single layers: a parameter absorbs part of one that is unlike the others, and is wrong by that."""

import numpy as np
from scipy import stats

from sdeinfer.diagnostics._residuals import Residuals
from sdeinfer.diagnostics._thresholds import FEWEST_OF_A_LAYER, LEVEL, NOISE_RATIO
from sdeinfer.diagnostics._verdict import Check, at_most


def check_unlike_layers(residuals: Residuals) -> Check:
    """The verdict on the layer whose innovations have the most, or the least, variance against those of all layers."""
    count, total, squares = residuals.sums.noise
    tested = np.flatnonzero(count >= FEWEST_OF_A_LAYER)
    if len(tested) < 2:
        return Check()
    mean = total[tested] / count[tested]
    ratio = mean / (total.sum() / count.sum())
    # The mean of y² has the relative variance 2/p for p = m(m + 1)/2 normal innovations, and more in narrow networks.
    tokens = residuals.data.sizes["token_a"]
    spread = np.maximum(squares[tested] / count[tested] / mean**2 - 1, 4 / (tokens * (tokens + 1)))
    away = np.abs(np.log(ratio))
    z = away / np.sqrt(spread / count[tested])
    size = np.where(2 * stats.norm.sf(z) * len(tested) < LEVEL, np.exp(away), 1.0)
    worst = int(np.argmax(size))
    start, end = residuals.data["layer"].values[tested[worst] : tested[worst] + 2]
    advice = (
        f"from layer {start} to {end} the noise is {ratio[worst]:.2g} times that of all layers: a state between them "
        "was not observed, or this layer is not like the others"
    )
    return Check((at_most("calibrated", "noise of one layer", size[worst], NOISE_RATIO, advice),))
