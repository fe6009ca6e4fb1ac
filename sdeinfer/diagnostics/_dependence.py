"""Tests of normal increments: independence of two groups of rows by Wilks's Λ, and fourth moments.

Tests: `tests/models/test_branches.py`.
"""

import functools
from typing import NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from scipy import stats

from sdeinfer.diagnostics._thresholds import NORMAL_BLOCKS, NORMALS_OF_A_BLOCK


class Dependence(NamedTuple):
    """The most significant test of some branches, or pairs of them: the mean squared canonical correlation beyond m/n.

    Of tests without a p above 0 it is that of the largest share; p counts all tests by Bonferroni's bound.
    """

    where: tuple[int, ...]
    share: float
    p: float


def dependence_on_input(data: xr.Dataset) -> Dependence:
    """Whether the increments of a branch depend linearly on what it reads.

    Given what is read, and the hidden features, the columns of Δ are independent normals, so that −log Λ is that of
    normal rows whatever U.
    """
    V, C, D = (data[name].values for name in ("input", "cross", "increment"))
    return _dependence([(branch,) for branch in range(V.shape[1])], V, C, D, data["width"].values)


def dependence_of_pairs(data: xr.Dataset) -> Dependence:
    """Whether the increments of two branches depend linearly on each other: all pairs."""
    D, between = data["increment"].values, data["between"].values
    first, second = np.triu_indices(D.shape[1], 1)
    pairs = list(zip(first.tolist(), second.tolist(), strict=True))
    return _dependence(pairs, D[:, first], between[:, first, second], D[:, second], data["width"].values)


@functools.lru_cache(maxsize=64)
def kurtosis_of_normals(tokens: int, width: int) -> tuple[float, float, float]:
    """Mean, standard deviation and skewness of `kurtosis` of normal increments, by 4,000 draws."""
    rng, moments = np.random.default_rng([tokens, width]), []
    for _ in range(NORMAL_BLOCKS):
        D = rng.standard_normal((NORMALS_OF_A_BLOCK, tokens, width))
        squares = (D * np.linalg.solve(D @ np.swapaxes(D, 1, 2) / width, D)).sum(1)
        moments.append(np.square(squares).mean(-1) / (tokens * (tokens + 2)))
    draws = np.concatenate(moments)
    return float(draws.mean()), float(draws.std()), float(stats.skew(draws))


def _dependence(
    where: list[tuple[int, ...]],
    A: Float[np.ndarray, "networks tests m m"],
    C: Float[np.ndarray, "networks tests m m"],
    B: Float[np.ndarray, "networks tests m m"],
    width: Int[np.ndarray, " networks"],
) -> Dependence:
    """The test by −(n − m − ½) log det(I − A⁻¹ C B⁻¹ Cᵀ), χ² with m² degrees of freedom (Bartlett)."""
    m = A.shape[-1]
    R = np.linalg.solve(A, C) @ np.linalg.solve(B, np.swapaxes(C, -1, -2))
    _, log_det = np.linalg.slogdet(np.eye(m) - R)
    statistic = -((width - m - 0.5)[:, None] * log_det).sum(0)
    shares = np.trace(R, axis1=-2, axis2=-1).mean(0) / m - np.mean(m / width)
    p = stats.chi2.sf(statistic, len(width) * m**2)
    worst = int(np.lexsort((-shares, p))[0])
    return Dependence(where[worst], float(shares[worst]), min(1.0, float(p[worst]) * len(where)))
