"""Other architectures and sizes, fitted to the transitions of a posterior.

The number of heads, an output projection, the expansion and the architecture itself change the law by factors that the
parameters can absorb: the fit is good, and the parameters are wrong. Each alternative is therefore fitted to the same
sufficient statistics, and compared with the fitted architecture by Laplace's approximation of its evidence.

The laws are normal ones, and wrong by O(1/n) in each transition: over many narrow layers that may favour another
architecture. What exact layers of the fitted one, from the same starts, would give is therefore subtracted, as in Cox's
test of separate families: their mean log ratio and three of its standard deviations, where that is positive.
"""

import dataclasses
from collections.abc import Mapping
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import Float

from sdeinfer.covariance import Pattern
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.diagnostics._posterior import FittedPosterior, with_chains
from sdeinfer.diagnostics._thresholds import EVIDENCE
from sdeinfer.infer._expansion import minimum
from sdeinfer.infer._mode import CLOSE, LARGEST_COORDINATE
from sdeinfer.layers import AbstractLayer, Limit, template
from sdeinfer.layers._templates import ARCHITECTURES, masked_as
from sdeinfer.likelihood import any_transitions
from sdeinfer.likelihood._reduction import path_statistics
from sdeinfer.likelihood._statistics import PathStatistics
from sdeinfer.likelihood._terms import laws_on_host
from sdeinfer.likelihood._transitions import Path
from sdeinfer.networks import sample_layer


class Alternative(NamedTuple):
    """An architecture at its mode.

    Attributes:
        architecture: the architecture.
        evidence: its log evidence less that of the fitted architecture, and less what the errors of the laws explain.
        values: the identified coordinates, such as γ, at the mode.
    """

    architecture: AbstractLayer
    evidence: float
    values: dict[str, float]


def alternatives(
    post: xr.DataTree, data: xr.Dataset, kind: AbstractLayer, *, dispersion: float = 1.0
) -> list[Alternative]:
    """Compare the fitted architecture with others, and with other sizes of its own.

    The coordinates have normal priors on the real line, with the moments of the draws of the fit's prior; those that
    only another architecture has have the default ones. What the fit fixed stays fixed.

    Arguments:
        post: the result of `fit` to networks observed at every layer, with one layer for all of them.
        data: the data that were fitted.
        kind: the fitted architecture.
        dispersion: φ ≥ 1 by which log likelihoods are divided, see `Adjustment`.

    Returns:
        The architectures, the best first, among them the fitted one with evidence 0.
    """
    return alternatives_of(FittedPosterior(with_chains(post), data, kind), dispersion)


def alternatives_of(posterior: FittedPosterior, dispersion: float) -> list[Alternative]:
    """The result of `alternatives`."""
    data, kind, law = posterior.data, posterior.known_kind, posterior.law
    layers = posterior.tree["layers"].to_dataset()
    u = kind.coordinates.unconstrained({name: float(layers[name].values[0]) for name in kind.coordinates.declared})
    start = dict(zip(kind.coordinates.sampled, np.asarray(u), strict=True))
    patterns = {candidate: candidate.pattern for candidate in (kind, *neighbours(kind, data))}
    transitions = any_transitions(data).thinned(16_384)
    # Another mask than the fitted one is fitted to fewer transitions, by the number m³(m + 1)/2 of entries of the forms
    # W_q of each: 1,638 of 4 tokens, 113 of 8, in 0.3 and 2 s the first time; 1,024 of 8 tokens would take 11 s.
    sample = transitions.thinned(max(1, 2**18 // (transitions.tokens**3 * (transitions.tokens + 1) // 2)))
    cheap = kind.pattern, EVERY_TOKEN
    dear = [candidate for candidate, pattern in patterns.items() if sample is not transitions and pattern not in cheap]
    compared = partial(_compared, law=law, start=start, priors=posterior.priors, dispersion=dispersion)
    fits = compared(transitions, tuple(candidate for candidate in patterns if candidate not in dear))
    fits += compared(sample, (kind, *dear))[1:] if dear else []
    return sorted(fits, key=lambda fit: -fit.evidence)


def _compared(
    path: Path,
    kinds: tuple[AbstractLayer, ...],
    *,
    law: str,
    start: Mapping[str, float],
    priors: Mapping[str, tuple[float, float]],
    dispersion: float,
) -> list[Alternative]:
    """Architectures fitted to some transitions, with their evidence against the first one."""
    statistics = _statistics(path, kinds)
    modes = [_mode(kind, law, statistics[kind], start, priors, dispersion) for kind in kinds]
    evidence = np.array([value for _, value in modes]) - modes[0][1]
    if (better := evidence > EVIDENCE).any():
        mean, sd = log_ratios(path, kinds, law, [u for u, _ in modes])
        evidence[better] -= np.maximum(mean + 3 * sd, 0.0)[better] / dispersion
    return [
        Alternative(kind, float(excess), _values(kind, u))
        for kind, (u, _), excess in zip(kinds, modes, evidence, strict=True)
    ]


def _statistics(path: Path, kinds: tuple[AbstractLayer, ...]) -> dict[AbstractLayer, PathStatistics]:
    """Sufficient statistics of transitions, as NumPy arrays, in the coordinates of each architecture's pattern."""

    @cache
    def of_pattern(pattern: Pattern) -> PathStatistics:
        return jax.tree.map(np.asarray, path_statistics(dataclasses.replace(path, pattern=pattern), pooled=True))

    return {kind: of_pattern(kind.pattern) for kind in kinds}


def log_ratios(
    path: Path, kinds: tuple[AbstractLayer, ...], law: str, modes: list[np.ndarray], replicates: int = 16
) -> tuple[Float[np.ndarray, " kinds"], Float[np.ndarray, " kinds"]]:
    """Mean and standard deviation of the log ratio of each density to the first, for exact layers of the first.

    The layers start where the transitions do; both are 0 if they cannot be drawn.
    """
    every = slice(None)
    starts, width = path.starts(every), path.width[path.network]
    ratios = np.zeros((replicates, len(kinds)))
    for replicate, key in enumerate(jr.split(jr.key(0), replicates)):
        ends = sample_layer(kinds[0].with_coordinates(modes[0]), starts, width=width, key=key)
        if ends is None:
            return ratios[0], ratios[0]
        statistics = _statistics(path.between(starts, ends, width), kinds)
        densities = [_densities(kind, u[None], law, statistics[kind])[0] for kind, u in zip(kinds, modes, strict=True)]
        ratios[replicate] = np.array(densities) - densities[0]
    return ratios.mean(axis=0), ratios.std(axis=0, ddof=1)


def neighbours(kind: AbstractLayer, data: xr.Dataset) -> list[AbstractLayer]:
    """The other architectures with the default sizes, and the same architecture with one other size."""
    tokens, widths = data.sizes["token_a"], data["width"].values
    candidates = [masked_as(template(name), kind.pattern) for name in ARCHITECTURES if name != kind.name]
    values = {"heads": (1, 2, 4, 8), "output_projection": (False, True), "expansion": (1, 4)}
    for size in kind.sizes:
        variants = (template(kind, **{size: value}) for value in values.get(size, ()))
        candidates.extend(variant for variant in variants if variant != kind)
    pattern = kind.pattern
    if "pattern" in kind.sizes and not pattern.rows and tokens > 1:
        candidates.append(template(kind, pattern=dataclasses.replace(pattern, causal=not pattern.causal)))
    return [
        candidate
        for candidate in candidates
        if (tokens > 1 or not candidate.coordinates.temperatures)
        and not (widths % candidate.sizes.get("heads", 1)).any()
    ]


def _mode(
    kind: AbstractLayer,
    law: str,
    statistics: PathStatistics,
    start: Mapping[str, float],
    priors: Mapping[str, tuple[float, float]],
    dispersion: float,
) -> tuple[np.ndarray, float]:
    """The mode from the fitted values of the common coordinates, and the evidence there."""
    names = kind.coordinates.sampled
    mean, sd = np.array([priors[name] for name in names]).T
    first = np.clip([start.get(name, 0.0) for name in names], -LARGEST_COORDINATE, LARGEST_COORDINATE)
    free = np.flatnonzero(sd > 0)
    first = np.where(sd > 0, first, mean)

    def whole(x: np.ndarray) -> np.ndarray:
        """The coordinates at free ones in units of the priors."""
        u = np.tile(first, (*x.shape[:-1], 1))
        u[..., free] = mean[free] + sd[free] * x
        return u

    def potentials(x: np.ndarray) -> np.ndarray:
        """−log density at some points."""
        return (x**2).sum(axis=1) / 2 - _densities(kind, whole(x), law, statistics) / dispersion

    begin = ((first - mean) / np.where(sd > 0, sd, 1.0))[free]
    x, (value, _, curvature) = minimum(potentials, begin, close=CLOSE)
    # The curvature of the priors alone is 1.
    curvature = np.maximum(np.linalg.eigvalsh(curvature), 1.0)
    return whole(x), float(-value - np.log(curvature).sum() / 2)


def _values(kind: AbstractLayer, u: np.ndarray) -> dict[str, float]:
    """Values of the identified coordinates in their own units."""
    sampled = kind.coordinates.sampled
    return {
        name: float(parameter.from_real(x))
        for (name, parameter), x in zip(sampled.items(), u, strict=True)
        if parameter.identified
    }


def _densities(
    kind: AbstractLayer, u: Float[np.ndarray, "points coordinates"], law: str, statistics: PathStatistics
) -> Float[np.ndarray, " points"]:
    """Log density of the data by an architecture at some points, without terms that are not the package's."""
    laws = laws_on_host(kind, u, statistics.widths, law)
    limit = laws.limit
    terms = limit.attention_drift, limit.relu_drift, limit.linear_noise, limit.attention_noise
    laws = dataclasses.replace(laws, limit=Limit(*terms, pattern=statistics.pattern))
    return np.asarray(statistics.log_density(laws, statistics.value), np.float64).sum(axis=-1)
