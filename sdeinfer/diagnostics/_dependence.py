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
    """Whether increments depend linearly on what their branch reads: the worst branch of `dependences_on_input`."""
    return _largest(*dependences_on_input(data), [(branch,) for branch in range(data["input"].shape[1])])


def dependences_on_input(data: xr.Dataset) -> tuple[Float[np.ndarray, " branches"], Float[np.ndarray, " branches"]]:
    """Whether the increments of each branch depend linearly on what it reads: shares and p-values.

    Given what is read, and the hidden features, the columns of Δ are independent normals, so that −log Λ is that of
    normal rows whatever U.
    """
    V, C, D = (data[name].values for name in ("input", "cross", "increment"))
    return _dependences(V, C, D, data["width"].values)


def dependence_of_pairs(data: xr.Dataset) -> Dependence:
    """Whether the increments of two branches depend on each other: the worst pair of `dependences_of_pairs`."""
    pairs, shares, p = dependences_of_pairs(data)
    return _largest(shares, p, pairs)


def dependences_of_pairs(
    data: xr.Dataset,
) -> tuple[list[tuple[int, ...]], Float[np.ndarray, " pairs"], Float[np.ndarray, " pairs"]]:
    """Whether the increments of two branches depend linearly on each other: all pairs, with shares and p-values."""
    D, between = data["increment"].values, data["between"].values
    first, second = np.triu_indices(D.shape[1], 1)
    pairs = list(zip(first.tolist(), second.tolist(), strict=True))
    return pairs, *_dependences(D[:, first], between[:, first, second], D[:, second], data["width"].values)


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


def _dependences(
    A: Float[np.ndarray, "networks tests m m"],
    C: Float[np.ndarray, "networks tests m m"],
    B: Float[np.ndarray, "networks tests m m"],
    width: Int[np.ndarray, " networks"],
) -> tuple[Float[np.ndarray, " tests"], Float[np.ndarray, " tests"]]:
    """Shares, and p-values of −(n − m − ½) log det(I − A⁻¹ C B⁻¹ Cᵀ), with χ² of m² degrees of freedom (Bartlett)."""
    m = A.shape[-1]
    R = np.linalg.solve(A, C) @ np.linalg.solve(B, np.swapaxes(C, -1, -2))
    _, log_det = np.linalg.slogdet(np.eye(m) - R)
    statistic = -((width - m - 0.5)[:, None] * log_det).sum(0)
    shares = np.trace(R, axis1=-2, axis2=-1).mean(0) / m - np.mean(m / width)
    return shares, stats.chi2.sf(statistic, len(width) * m**2)


def _largest(
    shares: Float[np.ndarray, " tests"], p: Float[np.ndarray, " tests"], where: list[tuple[int, ...]]
) -> Dependence:
    """The most significant of several tests; of those without a p above 0 the largest share."""
    worst = int(np.lexsort((-shares, p))[0])
    return Dependence(where[worst], float(shares[worst]), min(1.0, float(p[worst]) * len(where)))
