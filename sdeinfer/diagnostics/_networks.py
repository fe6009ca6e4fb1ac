"""Whether networks share weights: the correlation of their innovations.

A matrix W of iid normal entries maps tokens x and y to features with the covariance x·y/n. Prompts of one network that
are taken for networks therefore have increments with correlations of about (x·y)²/(‖x‖² ‖y‖²); those of independent
networks have none. Networks that deviate from a wrong law in the same way look correlated as well. Differences of the
innovations of successive layers are therefore compared, in which slow changes cancel, and only of networks that start
from different covariances: those that start from the same tokens and share weights are equal.
"""

import numpy as np
from jaxtyping import Float
from scipy import stats

from sdeinfer.covariance._matrix import pairs, unvech
from sdeinfer.diagnostics._innovations import clipped, laws_of
from sdeinfer.diagnostics._posterior import FittedPosterior
from sdeinfer.diagnostics._thresholds import SHARED, SHARED_LEVEL
from sdeinfer.diagnostics._verdict import Verdict, at_most
from sdeinfer.infer import innovations
from sdeinfer.infer._innovations import LawAt
from sdeinfer.likelihood._transitions import Path


def of_shared_noise(posterior: FittedPosterior) -> list[Verdict]:
    """The verdict on the independence of networks, if some start from different covariances.

    The correlation is the mean over pairs of networks and layers, by the more significant of two statistics: all
    entries of an increment of V, and its trace.
    """
    sums = np.zeros((2, 3))
    for path, law in laws_of(posterior):
        count = len(path.width)
        sample = path.of_networks(np.unique(np.linspace(0, count - 1, min(count, 64)).astype(int)))
        pairs_of_networks = _different(sample.covariance[:, 0])
        if len(pairs_of_networks[0]):
            noise = _noise(sample, law)
            traces = np.trace(noise, axis1=-2, axis2=-1)[..., None]
            sums += [_products(values, *pairs_of_networks) for values in (noise.reshape(*noise.shape[:2], -1), traces)]
    if not (sums[:, 2] > 0).all():
        return []
    total, variance, largest = sums.T
    p = stats.norm.sf(total / np.sqrt(variance))
    first = int(np.argmin(p))
    correlation = total[first] / largest[first] if 2 * p[first] < SHARED_LEVEL else 0.0
    advice = (
        "networks share weights, as prompts of one network do, and are counted as independent ones: give the prompts a "
        "dimension of their own, shape (networks, layers, prompts, tokens, width)"
    )
    return [at_most("calibrated", "correlation between networks", correlation, SHARED, advice)]


def _noise(path: Path, law: LawAt) -> Float[np.ndarray, "networks layers m m"]:
    """Innovations of V relative to the norms of the tokens; NaN where no transition was used."""
    noise = np.full((len(path.width), len(path.gap), path.tokens, path.tokens), np.nan)
    rows, columns = pairs(path.tokens)
    for batch in innovations(path, law):
        y = clipped(batch.y) * np.where(rows == columns, np.sqrt(2.0), 1.0)
        changes = path.coordinates(batch.transitions).colour(unvech(y))
        norms = np.sqrt(np.diagonal(path.starts(batch.transitions), axis1=-2, axis2=-1))
        relative = changes / (norms[:, :, None] * norms[:, None, :])
        noise[path.network[batch.transitions], path.layer[batch.transitions]] = relative
    return noise


def _different(V: Float[np.ndarray, "networks m m"]) -> tuple[np.ndarray, np.ndarray]:
    """The pairs of networks that start from different covariances."""
    first, second = np.triu_indices(len(V), 1)
    different = np.abs(V[first] - V[second]).max(axis=(-2, -1)) > 1e-4 * np.abs(V).max()
    return first[different], second[different]


def _products(
    noise: Float[np.ndarray, "networks layers entries"], first: np.ndarray, second: np.ndarray
) -> Float[np.ndarray, "3"]:
    """Sums over pairs of networks, of products of their differences: total, its variance, and products of norms.

    The products of different pairs, and of layers that are not neighbours, are uncorrelated for independent networks.
    """
    changes = np.nan_to_num(np.diff(noise, axis=1)).swapaxes(0, 1)
    products = (changes @ changes.swapaxes(1, 2))[:, first, second]
    norms = np.linalg.norm(changes, axis=-1)
    errors = products - products.mean()
    squares, neighbours = np.sum(errors**2), 2 * np.sum(errors[1:] * errors[:-1])
    return np.array([products.sum(), max(squares, squares + neighbours), np.sum(norms[:, first] * norms[:, second])])
