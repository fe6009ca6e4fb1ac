"""What the whole suite may spend on false failures, and statistical assertions that take their thresholds from it.

A correct library fails this suite with probability at most `SUITE` over the choice of all seeds. Every comparison, that
is every call of an assertion below, gets an equal share; a comparison of several numbers divides its share among them
(Bonferroni). Nothing is tuned: a threshold follows from the share, and the error bars from the samples.

The share is `SUITE / COMPARISONS` in every process. A process that makes more comparisons than were declared fails at
once. Of several, each reports to pytest what it has spent, and the run fails where the sum is larger (`conftest`).
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

SUITE = 1e-3
"""Probability that any test of a correct library fails, slow tests included."""

COMPARISONS = 907
"""How many statistical comparisons the suite may make; the next one is an error, not a bigger budget."""

_spent = 0


def spend(comparisons: int) -> None:
    """Count comparisons that are made, here or in another process."""
    global _spent
    _spent += comparisons


def spent() -> int:
    """How many comparisons were made."""
    return _spent


def share() -> float:
    """Take one comparison's share of the budget."""
    spend(1)
    if spent() > COMPARISONS:
        raise RuntimeError(f"budget: {COMPARISONS} statistical comparisons were declared, and all of them are made")
    return SUITE / COMPARISONS


def assert_within(z: ArrayLike, what: str = "standardised differences") -> None:
    """Numbers that should be standard normal, in any dependence, are not too large."""
    z = np.atleast_1d(np.asarray(z, np.float64))
    limit = stats.norm.isf(share() / (2 * z.size))
    worst = np.unravel_index(np.argmax(np.where(np.isfinite(z), np.abs(z), np.inf)), z.shape)
    assert np.abs(z[worst]) <= limit, f"{what}: z = {z[worst]:.2f} at {_at(worst)}, the budget allows {limit:.2f}"


def assert_estimate(estimate: ArrayLike, expected: ArrayLike, standard_error: ArrayLike) -> None:
    """Asymptotically normal estimates agree with what is expected; rounding counts as an error bar of its own."""
    estimate, expected, error = np.broadcast_arrays(*np.atleast_1d(estimate, expected, standard_error))
    rounding = 4 * np.finfo(np.float64).eps * (np.abs(estimate) + np.abs(expected))
    z = (estimate - expected) / np.maximum(np.hypot(error, rounding), np.finfo(np.float64).tiny)
    worst = np.unravel_index(np.argmax(np.abs(z)), z.shape)
    assert_within(z, f"{estimate[worst]:.6g} ± {error[worst]:.2g} (Monte Carlo) for {expected[worst]:.6g}")


def assert_mean(samples: ArrayLike, expected: ArrayLike) -> None:
    """The mean of independent samples, along the first axis, agrees with what is expected."""
    mean, error = mean_and_error(samples)
    assert_estimate(mean, expected, error)


def assert_variance(samples: ArrayLike, expected: ArrayLike) -> None:
    """The variance of independent samples, along the first axis, agrees with what is expected."""
    samples = np.asarray(samples, np.float64)
    count = len(samples)
    assert_mean((samples - samples.mean(axis=0)) ** 2 * count / (count - 1), expected)


def assert_distribution(samples: ArrayLike, cdf) -> None:
    """Independent samples have a continuous distribution function (Kolmogorov–Smirnov)."""
    samples = np.ravel(np.asarray(samples, np.float64))
    test, allowed = stats.kstest(samples, cdf), share()
    assert test.pvalue >= allowed, _ks(test, len(samples), allowed)


def assert_same_distribution(x: ArrayLike, y: ArrayLike) -> None:
    """Two sets of independent samples have one distribution (two-sample Kolmogorov–Smirnov)."""
    x, y = np.ravel(np.asarray(x, np.float64)), np.ravel(np.asarray(y, np.float64))
    test: Any = stats.ks_2samp(x, y, method="asymp")
    allowed = share()
    assert test.pvalue >= allowed, _ks(test, len(x) * len(y) / (len(x) + len(y)), allowed)


def mean_and_error(samples: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Mean of independent samples along the first axis, and its Monte Carlo error."""
    samples = np.asarray(samples, np.float64)
    return samples.mean(axis=0), samples.std(axis=0, ddof=1) / np.sqrt(len(samples))


def _at(index: tuple) -> str:
    return "[" + ", ".join(str(int(i)) for i in index) + "]"


def _ks(test, size: float, allowed: float) -> str:
    return (
        f"largest difference of distribution functions {test.statistic:.3g}, Monte Carlo error about {size**-0.5:.2g}: "
        f"p = {test.pvalue:.2g}, the budget allows {allowed:.2g}"
    )
