"""The law of a parameter's entries: mean, σ with its error, normal, uniform, truncated or orthogonal; and copies.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import stats

from sdeinfer.auditing._record import Parameter

SHARED = 4096
"""First entries of each tensor that are compared with those of others."""

FAR = 12.0
"""Robust standard deviations beyond which an entry is an outlier: of 10⁹ normal ones the largest has 6.1."""


@dataclasses.dataclass(frozen=True)
class Law:
    """Entries of a tensor: their number, those seen outside rows of zeros, moments, and the law that they follow.

    Outliers are left out of the moments; `outlier` is how far the farthest is, in robust standard deviations.
    """

    size: int
    seen: int
    mean: float
    sd: float
    kurtosis: float
    largest: float  # |entry − mean| over σ
    name: str
    edge: float = math.inf  # where a truncated law ends, over the σ before truncation
    outlier: float = 0.0

    @property
    def error(self) -> float:
        """Standard deviation of log σ̂: √((2 + κ₄)/(4N)) (`theory.md` §18)."""
        kurtosis = max(self.kurtosis, -1.2 if self.seen >= 256 else 0.0)  # that of few entries is not known
        return math.sqrt(max(2 + kurtosis, 0.05) / (4 * max(self.seen, 1)))


def law_of(parameter: Parameter) -> Law:
    """The law of a tensor."""
    x = parameter.entries()
    size = parameter.size
    if not size:
        return Law(0, 0, 0.0, 0.0, 0.0, 0.0, "zeros")
    if not parameter.finite or not np.isfinite(x).all():
        return Law(size, len(x), math.nan, math.nan, math.nan, math.nan, "not finite")
    if (x != 0).mean() < 0.999 and x.any():
        x = x[x != 0]  # a row of zeros, as of a padding token, is no part of the law
    x, outlier = _without_outliers(x, parameter)
    mean, sd = float(x.mean()), float(x.std())
    if sd <= 1e-6 * abs(mean) or sd == 0:
        return Law(size, len(x), mean, 0.0, -2.0, 0.0, "constant" if mean else "zeros")
    z = (x - mean) / sd
    kurtosis, largest = float((z**4).mean() - 3), float(np.abs(z).max())
    name, edge = _name(z, kurtosis, largest)
    if name == "normal" and _orthogonal(parameter):
        name = "orthogonal"
    return Law(size, len(x), mean, sd, kurtosis, largest, name, edge, outlier)


def _without_outliers(x: np.ndarray, parameter: Parameter) -> tuple[np.ndarray, float]:
    """The entries that are near the others, and how far the farthest entry of all is."""
    middle = np.median(x)
    spread = float(np.median(np.abs(x - middle))) / stats.norm.ppf(0.75)
    if len(x) < 64 or not spread:
        return x, 0.0
    near = np.abs(x - middle) < FAR * spread
    farthest = max(abs(parameter.least - middle), abs(parameter.largest - middle)) / spread
    return (x[near], farthest) if farthest > FAR and near.mean() > 0.99 else (x, 0.0)


def _name(z: np.ndarray, kurtosis: float, largest: float) -> tuple[str, float]:
    """The nearest of the laws in use, by kurtosis and the largest entry."""
    n = len(z)
    error = math.sqrt(24 / n)
    if n < 32:
        return "other", math.inf
    if abs(kurtosis + 1.2) < max(6 * error * 0.4, 0.02) and largest < math.sqrt(3) * 1.05:
        return "uniform", math.inf
    # A normal law has entries beyond the largest one with this probability.
    short = n * math.log1p(-2 * stats.norm.sf(largest)) if largest < 8 else 0.0
    if short < math.log(1e-7) and -1.15 < kurtosis < 0:
        return "truncated", float(np.interp(largest, *_edges()))
    if abs(kurtosis) > 8 * error + 0.02:
        return "other", math.inf
    return "normal", math.inf


@functools.cache
def _edges() -> tuple[np.ndarray, np.ndarray]:
    """The largest entry of truncated normals over their σ, and where these are cut."""
    edges = np.linspace(0.2, 5.0, 49)
    return edges / stats.truncnorm.std(-edges, edges), edges


def _orthogonal(parameter: Parameter) -> bool:
    """Whether a few rows, or columns, are orthogonal: their cosines are far below 1/√n."""
    if len(parameter.shape) < 2:
        return False
    rows, columns = parameter.shape[0], parameter.size // parameter.shape[0]
    few = min(rows, columns, 16)
    if few < 4 or max(rows, columns) > 1 << 14:
        return False
    for by_rows in {rows <= columns, False} if rows != columns else {True, False}:
        index = (
            np.arange(few)[:, None] * columns + np.arange(columns)
            if by_rows
            else np.arange(rows) * columns + np.arange(few)[:, None]
        )
        W = parameter.read(index.ravel()).reshape(index.shape)
        norms = np.linalg.norm(W, axis=1)
        if (norms == 0).any():
            continue
        cosines = (W @ W.T / norms / norms[:, None])[np.triu_indices(few, 1)]
        if np.sqrt((cosines**2).mean()) * math.sqrt(W.size / few) < 0.1:
            return True
    return False


def copies(parameters: Mapping[str, Parameter], laws: Mapping[str, Law]) -> list[tuple[str, str, float]]:
    """Pairs of tensors whose entries are equal or correlated beyond chance (10⁻⁶ for all), with the first of each."""
    names = [
        name
        for name, law in laws.items()
        if law.seen >= 64 and law.name not in ("constant", "zeros", "not finite") and math.isfinite(law.kurtosis)
    ]
    if len(names) < 2:
        return []
    Z = np.zeros((len(names), SHARED), np.float32)
    counts = np.zeros(len(names))
    for place, name in enumerate(names):
        x = parameters[name].read(slice(0, SHARED))
        z = np.clip((x - laws[name].mean) / (laws[name].sd or 1.0), -4, 4)  # one entry is not a correlation
        Z[place, : len(x)] = (z - z.mean()) / (z.std() or 1.0)
        counts[place] = len(x)
    shared = np.minimum(counts[:, None], counts)
    correlations = (Z @ Z.T) / shared
    beyond = stats.norm.isf(1e-6 / len(names) ** 2)
    first, second = np.nonzero(np.triu(np.abs(correlations) * np.sqrt(shared) > beyond, 1))
    found: dict[str, tuple[str, str, float]] = {}
    for i, j in zip(first.tolist(), second.tolist(), strict=True):
        if abs(correlations[i, j]) > 0.05 or shared[i, j] > 2048:
            found.setdefault(names[j], (names[i], names[j], float(correlations[i, j])))
    return list(found.values())


def repeated_blocks(parameter: Parameter, counts: Sequence[int] = (2, 4, 8)) -> int:
    """Number of equal blocks that a matrix consists of, as of shards that share a seed; 1 if there are none."""
    if len(parameter.shape) != 2:
        return 1
    rows, columns = parameter.shape
    if min(rows, columns) < 16:
        return 1
    for count in reversed(counts):
        by_rows = np.arange(count)[:, None] * (rows // count) * columns + np.arange(min(columns, 256))
        by_columns = np.arange(count)[:, None] * (columns // count) + np.arange(min(columns // count, 64))
        for index, divides in ((by_rows, rows % count == 0), (by_columns, columns % count == 0)):
            if not divides or index.shape[1] < 8:
                continue
            blocks = parameter.read(index.ravel()).reshape(index.shape)
            if blocks.std() and np.allclose(blocks, blocks[0], rtol=1e-6, atol=0.0):
                return count
    return 1
