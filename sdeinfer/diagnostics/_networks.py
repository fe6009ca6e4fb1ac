"""Whether networks share weights: the correlation of their innovations.

A matrix W of iid normal entries maps tokens x and y to features with the covariance x·y/n. Prompts of one network that
are taken for networks therefore have increments with correlations of about (x·y)²/(‖x‖² ‖y‖²); those of independent
networks have none. Networks that deviate from a wrong law in the same way look correlated as well. Differences of the
innovations of successive layers are therefore compared, in which slow changes cancel, and only of networks that start
from different covariances: those that start from the same tokens and share weights are equal.
"""

import numpy as np
from scipy import stats

from sdeinfer.diagnostics._innovations import changes_of
from sdeinfer.diagnostics._residuals import Residuals
from sdeinfer.diagnostics._thresholds import EQUAL_STARTS, PAIRED_NETWORKS, SHARED_CORRELATION, SHARED_LEVEL
from sdeinfer.diagnostics._verdict import Check, at_most, if_significant


def check_shared_noise(residuals: Residuals) -> Check:
    """The verdict on the independence of networks, if some start from different covariances.

    The correlation is the mean over pairs of networks and layers, by the more significant of two statistics: all
    entries of an increment of V, and its trace.
    """
    sums = np.zeros((2, 3))
    for path, law in residuals.laws:
        count = len(path.width)
        sample = path.of_networks(np.unique(np.linspace(0, count - 1, min(count, PAIRED_NETWORKS)).astype(int)))
        V, (first, second) = sample.covariance[:, 0], np.triu_indices(len(sample.width), 1)
        different = np.abs(V[first] - V[second]).max(axis=(-2, -1)) > EQUAL_STARTS * np.abs(V).max()
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
    correlation = if_significant(total[first] / largest[first], 2 * p[first], SHARED_LEVEL)
    advice = (
        "networks share weights, as prompts of one network do, and are counted as independent ones: give the prompts a "
        "dimension of their own, shape (networks, layers, prompts, tokens, width)"
    )
    return Check((at_most("calibrated", "correlation between networks", correlation, SHARED_CORRELATION, advice),))


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
