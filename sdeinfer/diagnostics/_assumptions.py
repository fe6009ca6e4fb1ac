"""Tests of what the law assumes of networks, layers and weights, each by a statistic of its own.

Tests: `tests/diagnostics/test_skewness.py`.
"""

import math

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
from sdeinfer.layers._templates import is_named
from sdeinfer.likelihood._transitions import Path, used_of
from sdeinfer.networks._sample import sample_layer
from sdeinfer.observation._dataset import SHORTCUT

BRANCHES = {"transformer": 2, "attention": 1, "feedforward": 1}
"""Residual branches of a layer by its architecture."""


def check_shared_noise(residuals: Residuals) -> Check:
    """The verdict on the independence of networks, if some start from different covariances.

    A matrix of iid normal entries maps tokens x and y to features with the covariance x·y/n, so that prompts of one
    network have increments with correlations of about (x·y)²/(‖x‖² ‖y‖²). So have networks that deviate from a wrong
    law in the same way: differences of successive layers are compared, in which slow changes cancel. Networks that
    start from the same tokens and share weights are equal. The correlation is the mean over pairs of networks and
    layers, by the more significant of two statistics: all entries of an increment of V, and its trace.
    """
    sums = np.zeros((2, 3))
    for path, law in residuals.laws:
        count = len(path.width)
        sample = path.of_networks(np.unique(np.linspace(0, count - 1, min(count, bounds.PAIRED_NETWORKS)).astype(int)))
        V, (first, second) = sample.covariance[:, 0], np.triu_indices(len(sample.width), 1)
        different = np.abs(V[first] - V[second]).max(axis=(-2, -1)) > bounds.EQUAL_STARTS * np.abs(V).max()
        if different.any():
            # Relative to the norms of the tokens; NaN where no transition was used.
            noise = np.full(sample.covariance[:, 1:].shape, np.nan)
            norms = np.sqrt(np.diagonal(sample.starts(slice(None)), axis1=-2, axis2=-1))
            relative = changes_of(sample, law) / (norms[:, :, None] * norms[:, None, :])
            noise[sample.network, sample.layer] = relative
            traces = np.trace(noise, axis1=-2, axis2=-1)[..., None]
            entries = noise.reshape(*noise.shape[:2], -1)
            sums += [_products(values, first[different], second[different]) for values in (entries, traces)]
    if not (sums[:, 2] > 0).all():
        return Check()
    total, variance, largest = sums.T
    p = stats.norm.sf(total / np.sqrt(variance))
    first = int(np.argmin(p))
    correlation = if_significant(total[first] / largest[first], 2 * p[first], bounds.RARE_LEVEL)
    advice = (
        "networks share weights, as prompts of one network do, and are counted as independent ones: give the prompts a "
        "dimension of their own, shape (networks, layers, prompts, tokens, width)"
    )
    return Check(
        (at_most("calibrated", "correlation between networks", correlation, bounds.SHARED_CORRELATION, advice),)
    )


def _products(noise: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Sums over pairs of networks, of products of their differences: total, its variance, and products of norms.

    The products of different pairs, and of layers that are not neighbours, are uncorrelated for independent networks.
    """
    changes = np.nan_to_num(np.diff(noise, axis=1)).swapaxes(0, 1)
    products = (changes @ changes.swapaxes(1, 2))[:, first, second]
    norms = np.linalg.norm(changes, axis=-1)
    errors = products - products.mean()
    squares, neighbours = np.sum(errors**2), 2 * np.sum(errors[1:] * errors[:-1])
    return np.array([products.sum(), max(squares, squares + neighbours), np.sum(norms[:, first] * norms[:, second])])


def check_unlike_layers(residuals: Residuals) -> Check:
    """The verdict on the layer whose innovations have the most, or the least, variance against those of all layers.

    A parameter absorbs part of the noise of a layer that is unlike the others, and is wrong by that.
    """
    count, total, squares = residuals.sums.noise
    tested = np.flatnonzero(count >= bounds.FEWEST_TRANSITIONS)
    if len(tested) < 2:
        return Check()
    mean = total[tested] / count[tested]
    ratio = mean / (total.sum() / count.sum())
    # The mean of y² has the relative variance 2/p for p = m(m + 1)/2 normal innovations, and more in narrow networks.
    tokens = residuals.data.sizes["token_a"]
    spread = np.maximum(squares[tested] / count[tested] / mean**2 - 1, 4 / (tokens * (tokens + 1)))
    away = np.abs(np.log(ratio))
    z = away / np.sqrt(spread / count[tested])
    size = np.where(2 * stats.norm.sf(z) * len(tested) < bounds.LEVEL, np.exp(away), 1.0)
    worst = int(np.argmax(size))
    start, end = residuals.data["layer"].values[tested[worst] : tested[worst] + 2]
    advice = (
        f"from layer {start} to {end} the noise is {ratio[worst]:.2g} times that of all layers: a state between them "
        "was not observed, or this layer is not like the others"
    )
    return Check((at_most("calibrated", "noise of one layer", size[worst], bounds.SD_RATIO, advice),))


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
    if len(shortcuts) < bounds.FEWEST_TRANSITIONS or np.isnan(gamma).any():
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
    return Check((at_most("calibrated", "gamma by hidden states, sds", away, bounds.LARGEST_DEVIATION, advice),))


def check_skewness(residuals: Residuals) -> Check:
    """The verdict on the third cumulant of increments; none where exact layers cannot be drawn.

    Orthogonal weights have the means and, at another γ, the variances of independent ones, but another third cumulant
    (`docs/theory/finite_width.md`, orthogonal weights).
    """
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
    size = if_significant(abs(difference / expected), 2 * stats.norm.sf(abs(z)), bounds.RARE_LEVEL)
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
