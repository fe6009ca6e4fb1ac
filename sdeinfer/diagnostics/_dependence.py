"""Tests of normal increments: independence of two groups of rows by Wilks's Λ, and fourth moments."""

import functools
from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from scipy import stats

DRAWS, BATCH = 4000, 100
"""Number of draws of the fourth moments of normals, and of those in memory at a time."""


class Dependence(NamedTuple):
    """The most significant of several tests.

    Attributes:
        where: the branch, or the two branches.
        share: mean squared canonical correlation beyond that of independent rows, m/n.
        p: probability of the largest statistic, times the number of tests.
    """

    where: tuple[int, ...]
    share: float
    p: float


def dependence_on_input(data: xr.Dataset) -> Dependence:
    """Whether increments depend linearly on what their branch reads, summed over networks.

    Given what is read, and the hidden features, the columns of Δ are independent normals, so that −log Λ is that of
    normal rows whatever U.
    """
    V, C, D = (data[name].values for name in ("input", "cross", "increment"))
    return _largest(V, C, D, data["width"].values, [(branch,) for branch in range(V.shape[1])])


def dependence_of_pairs(data: xr.Dataset) -> Dependence:
    """Whether the increments of two branches depend linearly on each other, for the worst pair."""
    D, between = data["increment"].values, data["between"].values
    first, second = np.triu_indices(D.shape[1], 1)
    pairs = list(zip(first.tolist(), second.tolist(), strict=True))
    return _largest(D[:, first], between[:, first, second], D[:, second], data["width"].values, pairs)


@functools.lru_cache(maxsize=64)
def kurtosis_of_normals(tokens: int, width: int) -> tuple[float, float, float]:
    """Mean, standard deviation and skewness of `kurtosis` of normal increments, by 4,000 draws."""
    rng, found = np.random.default_rng([tokens, width]), []
    for _ in range(DRAWS // BATCH):
        D = rng.standard_normal((BATCH, tokens, width))
        squares = (D * np.linalg.solve(D @ np.swapaxes(D, 1, 2) / width, D)).sum(1)
        found.append(np.square(squares).mean(-1) / (tokens * (tokens + 2)))
    draws = np.concatenate(found)
    return float(draws.mean()), float(draws.std()), float(stats.skew(draws))


def _largest(
    A: Float[np.ndarray, "networks tests m m"],
    C: Float[np.ndarray, "networks tests m m"],
    B: Float[np.ndarray, "networks tests m m"],
    width: Int[np.ndarray, " networks"],
    where: list[tuple[int, ...]],
) -> Dependence:
    """The largest statistic −(n − m − ½) log det(I − A⁻¹ C B⁻¹ Cᵀ), with χ² of m² degrees of freedom (Bartlett)."""
    m = A.shape[-1]
    R = np.linalg.solve(A, C) @ np.linalg.solve(B, np.swapaxes(C, -1, -2))
    _, log_det = np.linalg.slogdet(np.eye(m) - R)
    statistic = -((width - m - 0.5)[:, None] * log_det).sum(0)
    freedom = len(width) * m**2
    worst = int(statistic.argmax())
    share = np.trace(R[:, worst], axis1=-2, axis2=-1).mean() / m - np.mean(m / width)
    return Dependence(
        where[worst], float(share), min(1.0, float(stats.chi2.sf(statistic[worst], freedom)) * len(where))
    )
