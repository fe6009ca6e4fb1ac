"""Posteriors of the parameters of blocks over their declared values, without a sampler.

The log density of increments is a polynomial of degree 2 in log g² at every gain or temperature, so that strengths are
log-normal under a flat prior in log g, and a gain or temperature needs sums over a grid.
"""

import dataclasses
import functools
import math

import numpy as np
from jaxtyping import Float
from scipy import stats
from scipy.interpolate import BarycentricInterpolator

from sdeinfer.blocks._coefficients import LOG_FACTORS
from sdeinfer.blocks._information import scale_free

IDENTIFIED = 0.35
"""Largest standard deviation of the log of a gain or temperature that is reported; the interval is a factor of 4."""

PROBABILITY = 0.95
"""Probability of intervals."""


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A parameter over its declared value, of a log-normal posterior.

    Attributes:
        name: the parameter's name, as "attention.strength".
        declared: its declared value.
        log_ratio: posterior mean of the log of the parameter over its declared value.
        sd: posterior standard deviation of that log.
    """

    name: str
    declared: float
    log_ratio: float
    sd: float

    @property
    def ratio(self) -> float:
        """The parameter over its declared value."""
        return math.exp(self.log_ratio)

    @property
    def interval(self) -> tuple[float, float]:
        """The central interval of the ratio, of probability `PROBABILITY`."""
        low, high = (math.exp(x) for x in stats.norm.interval(PROBABILITY, self.log_ratio, self.sd))
        return low, high

    @property
    def value(self) -> float:
        """The parameter itself."""
        return self.ratio * self.declared

    @property
    def p(self) -> float:
        """Two-sided p-value of the declared value."""
        return float(2 * stats.norm.sf(abs(self.log_ratio) / self.sd))

    @property
    def row(self) -> dict[str, float]:
        """The parameter, its ratio to the declared value with the interval, and the standard deviation of the log."""
        low, high = self.interval
        return {"strength": self.value, "ratio": self.ratio, "low": low, "high": high, "sd": self.sd}

    def __str__(self) -> str:
        """The ratio with the digits that its standard deviation leaves, as 4.88 ± 0.03."""
        sd = self.ratio * self.sd
        digits = max(0, -math.floor(math.log10(sd)) if sd > 0 else 3)
        return f"{self.ratio:.{digits}f} ± {sd:.{digits}f}"


@dataclasses.dataclass(frozen=True, eq=False)
class Likelihood:
    """The log likelihood of a block's strength and shape: coefficients in log g² at each of `LOG_FACTORS`."""

    declared: float
    coefficients: Float[np.ndarray, "grid 4"]

    def inside(self, log_shape: float) -> float:
        """The nearest log factor of a gain or temperature that the grid has."""
        return min(max(log_shape, float(LOG_FACTORS[0])), float(LOG_FACTORS[-1]))

    def at(self, log_shape: float) -> tuple[float, float, float]:
        """At a shape: the likeliest log strength, its standard deviation, and how far below the largest this is."""
        c = self._interpolator([log_shape])
        log_strength = float(-c[0, 1] / c[0, 2] / 4) - math.log(self.declared)
        return log_strength, math.sqrt(-1 / (8 * c[0, 2])), self._largest - float(_profile(c)[0])

    @functools.cached_property
    def _largest(self) -> float:
        return float(_profile(self._interpolator(_fine_grid())).max())

    @functools.cached_property
    def _interpolator(self) -> BarycentricInterpolator:
        return BarycentricInterpolator(LOG_FACTORS, self.coefficients)


def _fine_grid() -> Float[np.ndarray, " points"]:
    return np.linspace(LOG_FACTORS[0], LOG_FACTORS[-1], 1001)


def _profile(c: Float[np.ndarray, "points 4"]) -> Float[np.ndarray, " points"]:
    """The log likelihood at the likeliest strength."""
    return c[:, 0] - c[:, 1] ** 2 / (4 * c[:, 2]) + c[:, 3]


def strength_estimate(name: str, declared: float, coefficients: Float[np.ndarray, "*terms 4"]) -> Estimate:
    """The strength that increments have in common, by coefficients of `blocks.LogMatrixNormal.in_factor`."""
    _, linear, quadratic, _ = coefficients.reshape(-1, 4).sum(0)
    return Estimate(name, declared, -linear / quadratic / 4 - math.log(declared), math.sqrt(-1 / (8 * quadratic)))


def shape_estimate(name: str, declared: float, coefficients: Float[np.ndarray, "networks branches grid 4"]) -> Estimate:
    """The gain or temperature that branches have in common; the strength of each branch is integrated out."""
    table = scale_free(coefficients.sum(0)).sum(0)
    fine = _fine_grid()
    log_weight = BarycentricInterpolator(LOG_FACTORS, table)(fine)
    weight = np.exp(log_weight - log_weight.max())
    weight /= weight.sum()
    mean = float(weight @ fine)
    return Estimate(name, declared, mean, math.sqrt(max(float(weight @ (fine - mean) ** 2), 0.0)))
