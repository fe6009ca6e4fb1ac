"""The skewness of layers against that of exact ones at the fit.

Orthogonal weights have the means and, at another γ, the variances of independent ones, but another third cumulant
(`docs/theory/finite_width.md`, orthogonal weights). Tests: `tests/diagnostics/test_skewness.py`.
"""

import jax.random as jr
import numpy as np
from jaxtyping import Float
from scipy import stats

from sdeinfer.covariance._factors import cholesky_of, whiten_by
from sdeinfer.diagnostics import _thresholds as bounds
from sdeinfer.diagnostics._innovations import changes_of
from sdeinfer.diagnostics._residuals import Residuals
from sdeinfer.diagnostics._verdict import Check, at_most, if_significant
from sdeinfer.infer._innovations import LawAt
from sdeinfer.likelihood._transitions import Path
from sdeinfer.networks._sample import sample_layer


def check_skewness(residuals: Residuals) -> Check:
    """The verdict on the third cumulant of increments; none where exact layers cannot be drawn."""
    difference, variance, expected = 0.0, 0.0, 0.0
    for path, law in residuals.laws:
        chosen = path.thinned(bounds.SKEWED_TRANSITIONS)
        times = max(bounds.FEWEST_REPEATS, min(bounds.MOST_REPEATS, bounds.SKEWED_DRAWS // len(chosen)))
        repeats = np.repeat(np.arange(len(chosen)), times)
        starts, widths = chosen.starts(repeats), chosen.width[chosen.network[repeats]]
        layer = residuals.known_kind.with_coordinates(law.u)
        ends = sample_layer(layer, starts, width=widths, key=jr.key(0))
        if ends is None:
            return Check()
        drawn = third_moments(chosen.between(starts, ends, widths), law).reshape(-1, times)
        difference += float((third_moments(chosen, law) - drawn.mean(axis=1)).sum())
        variance += float((1 + 1 / times) * drawn.var(axis=1, ddof=1).sum())
        expected += float(drawn.mean(axis=1).sum())
    if not variance > 0:
        return Check()
    z = difference / np.sqrt(variance)
    size = if_significant(abs(difference / expected), 2 * stats.norm.sf(abs(z)), bounds.SKEWNESS_LEVEL)
    advice = (
        f"the skewness of layers is {1 + difference / expected:.2g} times that of independent weights ({abs(z):.2g} "
        "standard errors off): weights that are orthogonal, or depend on each other otherwise, have another gamma than "
        "the fitted one; observe hidden states, which show it by themselves"
    )
    return Check((at_most("calibrated", "skewness of layers", size, bounds.SKEWNESS, advice),))


def third_moments(path: Path, law: LawAt) -> Float[np.ndarray, " transitions"]:
    """The trace of Z³ − 3 (m + 1) Z, with the innovations Z of each transition, of unit variance off the diagonal.

    The second term makes it orthogonal to the scores of the parameters, to first order.
    """
    Z = whiten_by(cholesky_of(path.starts(slice(None))), changes_of(path, law))
    return np.trace(Z @ Z @ Z - 3 * (path.tokens + 1) * Z, axis1=-2, axis2=-1)
