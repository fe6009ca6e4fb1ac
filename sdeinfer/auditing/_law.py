"""The law of a parameter's entries: mean, σ with its error, normal, uniform, truncated or orthogonal; and copies.

Tests: `tests/auditing/test_audit.py`.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping

import numpy as np
from scipy import stats

from sdeinfer.passes._record import SAMPLED_ENTRIES, StoredTensor

COMPARED_ENTRIES = 4096
"""Entries at each end of a tensor that are compared with those of others."""

OUTLIER_SDS = 12.0
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
    edge: float = math.inf  # the end of a truncated law, over the σ before truncation
    outlier: float = 0.0

    @property
    def error(self) -> float:
        """Standard deviation of log σ̂: √((2 + κ₄)/(4N)) (`theory.md` §18)."""
        kurtosis = max(self.kurtosis, -1.2 if self.seen >= 256 else 0.0)  # that of few entries is not known
        return math.sqrt(max(2 + kurtosis, 0.05) / (4 * max(self.seen, 1)))


def law_of(parameter: StoredTensor) -> Law:
    """The law of a tensor."""
    x, size = parameter.entries(), parameter.size
    if not size:
        return Law(0, 0, 0.0, 0.0, 0.0, 0.0, "zeros")
    if not parameter.finite or not np.isfinite(x).all():
        return Law(size, len(x), math.nan, math.nan, math.nan, math.nan, "not finite")
    x = _without_padding(parameter, x)
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


def _without_padding(parameter: StoredTensor, x: np.ndarray) -> np.ndarray:
    """Entries outside of a few rows of zeros, as of padding tokens, and of the zeros of an identity."""
    if len(parameter.shape) < 2 or x.all() or not x.any():
        return x
    if np.ptp(x[x != 0]) == 0:  # an identity
        return x[x != 0]
    step = -(-parameter.size // len(x))
    row = np.arange(0, parameter.size, step | 1 if step > 1 else 1)[: len(x)] // parameter.shape[-1]
    drawn = np.zeros(row[-1] + 1, bool)
    drawn[row[x != 0]] = True
    empty = ~drawn[row]
    return x[~empty] if len(np.unique(row[empty])) <= max(2, 0.01 * len(drawn)) else x


def _without_outliers(x: np.ndarray, parameter: StoredTensor) -> tuple[np.ndarray, float]:
    """The entries that are near the others, and how far the farthest entry of all is."""
    middle = np.median(x)
    spread = float(np.median(np.abs(x - middle))) / stats.norm.ppf(0.75)
    if len(x) < 64 or not spread:
        return x, 0.0
    near = np.abs(x - middle) < OUTLIER_SDS * spread
    farthest = max(abs(parameter.least - middle), abs(parameter.largest - middle)) / spread
    return (x[near], farthest) if farthest > OUTLIER_SDS and near.mean() > 0.99 else (x, 0.0)


def _name(z: np.ndarray, kurtosis: float, largest: float) -> tuple[str, float]:
    """The nearest of the laws in use, by kurtosis and the largest entry."""
    n = len(z)
    error = math.sqrt(24 / n)
    if n < 32:
        return "other", math.inf
    # Largest entries of uniform laws are √3 up to the errors of the mean and of σ.
    if abs(kurtosis + 1.2) < max(6 * error * 0.4, 0.02) and largest < math.sqrt(3) + max(10.7 / math.sqrt(n), 0.08):
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


def _orthogonal(parameter: StoredTensor) -> bool:
    """Whether a few rows, or columns, are orthogonal: their cosines are far below 1/√n."""
    if len(parameter.shape) < 2:
        return False
    rows, columns = parameter.shape[0], parameter.size // parameter.shape[0]
    few = min(rows, columns, 16)
    if few < 4 or max(rows, columns) > 1 << 14:
        return False
    first_rows = np.arange(few)[:, None] * columns + np.arange(columns)
    first_columns = np.arange(few)[:, None] + np.arange(rows) * columns
    for index in (first_rows, first_columns):
        W = parameter.read(index.ravel()).reshape(index.shape)
        norms = np.linalg.norm(W, axis=1)
        if (norms == 0).any():
            continue
        cosines = (W @ W.T / norms / norms[:, None])[np.triu_indices(few, 1)]
        if np.sqrt((cosines**2).mean()) * math.sqrt(W.size / few) < 0.1:
            return True
    return False


def copies(parameters: Mapping[str, StoredTensor], laws: Mapping[str, Law]) -> list[tuple[str, str, float]]:
    """Pairs of tensors whose first or last entries are equal or correlated beyond chance (10⁻⁶ for all).

    Returns:
        Each with the first of its pair and the correlation; ∞ for the same entries in another order.
    """
    names = [
        name
        for name, law in laws.items()
        if law.seen >= 64 and law.name not in ("constant", "zeros", "not finite") and math.isfinite(law.kurtosis)
    ]
    pairs: dict[str, tuple[str, str, float]] = {}
    for part in (slice(0, COMPARED_ENTRIES), slice(-COMPARED_ENTRIES, None)) if len(names) > 1 else ():
        Z, counts = _standardised({name: parameters[name].read(part) for name in names}, laws)
        shared = np.minimum(counts[:, None], counts)
        correlations = (Z @ Z.T) / shared
        beyond = stats.norm.isf(1e-6 / len(names) ** 2)
        first, second = np.nonzero(np.triu(np.abs(correlations) * np.sqrt(shared) > beyond, 1))
        for i, j in zip(first.tolist(), second.tolist(), strict=True):
            if abs(correlations[i, j]) > 0.05 or shared[i, j] > 2048:
                pairs.setdefault(names[j], (names[i], names[j], float(np.clip(correlations[i, j], -1, 1))))
    # Moments do not know the order of entries.
    moments = sorted(
        (laws[n].seen, laws[n].kurtosis, laws[n].largest, n) for n in names if 256 <= laws[n].seen < SAMPLED_ENTRIES
    )
    for earlier, later in itertools.pairwise(moments):
        if earlier[0] == later[0] and np.allclose(earlier[1:3], later[1:3], rtol=2e-6, atol=0.0):
            first, second = sorted((earlier[3], later[3]), key=names.index)
            pairs.setdefault(second, (first, second, math.inf))
    return list(pairs.values())


def _standardised(entries: Mapping[str, np.ndarray], laws: Mapping[str, Law]) -> tuple[np.ndarray, np.ndarray]:
    Z, counts = np.zeros((len(entries), COMPARED_ENTRIES), np.float32), np.zeros(len(entries))
    for place, (name, x) in enumerate(entries.items()):
        z = np.clip((x - laws[name].mean) / (laws[name].sd or 1.0), -4, 4)  # one entry is not a correlation
        Z[place, : len(x)] = (z - z.mean()) / (z.std() or 1.0)
        counts[place] = len(x)
    return Z, counts


def repeated_slices(parameter: StoredTensor) -> int:
    """The largest number of equal slices along an axis, as of ranks or heads that share a seed; 1 if all differ."""
    shape, most, rng = parameter.shape, 1, np.random.default_rng(0)
    for axis, count in enumerate(shape):
        if count < 2 or parameter.size // count < 16:
            continue
        index = [rng.integers(n, size=(1, 64)) for n in shape]
        index[axis] = np.arange(count)[:, None]
        entries = parameter.read(np.ravel_multi_index(np.broadcast_arrays(*index), shape).ravel()).reshape(count, 64)
        distinct = (np.diff(np.sort(entries), axis=1) != 0).sum(1)
        entries = entries[distinct > 8]  # zeros, signs and ones are alike by chance
        most = max(most, int(np.unique(entries, axis=0, return_counts=True)[1].max(initial=1)))
    return most
