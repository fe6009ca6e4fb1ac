"""Statistical assertions, which take their thresholds from what the suite may spend on false failures."""

from typing import Any

import numpy as np
from arviz_stats.base import array_stats
from helpers.spending import share
from numpy.typing import ArrayLike
from scipy import stats


def assert_within(z: ArrayLike, what: str = "standardised differences") -> None:
    """Numbers that should be standard normal, in any dependence, are not too large."""
    z = np.atleast_1d(np.asarray(z, np.float64))
    limit = stats.norm.isf(share() / (2 * z.size))
    worst = tuple(map(int, np.unravel_index(np.argmax(np.where(np.isfinite(z), np.abs(z), np.inf)), z.shape)))
    assert np.abs(z[worst]) <= limit, f"{what}: z = {z[worst]:.2f} at {worst}, the budget allows {limit:.2f}"


def assert_estimate(estimate: ArrayLike, expected: ArrayLike, standard_error: ArrayLike) -> None:
    """Asymptotically normal estimates agree with what is expected; rounding counts as an error bar of its own."""
    estimate, expected, error = np.broadcast_arrays(*np.atleast_1d(estimate, expected, standard_error))
    rounding = 4 * np.finfo(np.float64).eps * (np.abs(estimate) + np.abs(expected))
    z = (estimate - expected) / np.maximum(np.hypot(error, rounding), np.finfo(np.float64).tiny)
    worst = np.unravel_index(np.argmax(np.abs(z)), z.shape)
    assert_within(z, f"{estimate[worst]:.6g} ± {error[worst]:.2g} (Monte Carlo) for {expected[worst]:.6g}")


def assert_visible(difference: ArrayLike, standard_error: ArrayLike) -> None:
    """Asymptotically normal differences are above 0 by more than chance makes them: the power of what is compared."""
    z = np.atleast_1d(np.asarray(difference, np.float64) / np.asarray(standard_error, np.float64))
    limit = stats.norm.isf(share())
    assert z.min() >= limit, f"z = {z.min():.2f} above 0, and {limit:.2f} is needed"


def assert_holds(draws: ArrayLike, truth: ArrayLike) -> None:
    """A posterior, from draws of any shape, is within as many standard deviations of the truth as the budget allows."""
    draws = np.asarray(draws, np.float64)
    mean, sd = draws.mean(), draws.std()
    assert_within((np.asarray(truth) - mean) / sd, f"{mean:.4g} ± {sd:.2g} for {truth}")


def assert_same_posterior(x: ArrayLike, y: ArrayLike) -> None:
    """Two sets of chains, of shape (chains, draws), have one mean and one standard deviation, up to their errors."""
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    for method, estimates in (("mean", (x.mean(), y.mean())), ("sd", (x.std(ddof=1), y.std(ddof=1)))):
        errors = [array_stats.mcse(z, chain_axis=0, draw_axis=1, method=method) for z in (x, y)]
        assert_estimate(*estimates, np.hypot(*errors))


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


def _ks(test, size: float, allowed: float) -> str:
    return (
        f"largest difference of distribution functions {test.statistic:.3g}, Monte Carlo error about {size**-0.5:.2g}: "
        f"p = {test.pvalue:.2g}, the budget allows {allowed:.2g}"
    )
