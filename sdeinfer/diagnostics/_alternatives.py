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
from scipy.optimize import minimize

from sdeinfer.covariance import Pattern
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.diagnostics._posterior import Posterior, with_chains
from sdeinfer.diagnostics._thresholds import EVIDENCE
from sdeinfer.infer._mode import LARGEST_COORDINATE
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
    return alternatives_of(Posterior(with_chains(post), data, kind), dispersion)


def alternatives_of(posterior: Posterior, dispersion: float) -> list[Alternative]:
    """The result of `alternatives`."""
    data, kind, law = posterior.data, posterior.known_kind, posterior.law
    layers = posterior.tree["layers"].to_dataset()
    u = kind.coordinates.unconstrained({name: float(layers[name].values[0]) for name in kind.coordinates.declared})
    start = dict(zip(kind.coordinates.sampled, np.asarray(u), strict=True))
    patterns = {each: each.pattern for each in (kind, *neighbours(kind, data))}
    every = any_transitions(data).thinned(16_384)
    # Another mask than the fitted one is fitted to fewer transitions, by the number m³(m + 1)/2 of entries of the forms
    # W_q of each: 1,638 of 4 tokens, 113 of 8, in 0.3 and 2 s the first time; 1,024 of 8 tokens would take 11 s.
    few = every.thinned(max(1, 2**18 // (every.tokens**3 * (every.tokens + 1) // 2)))
    cheap = kind.pattern, EVERY_TOKEN
    dear = [each for each, pattern in patterns.items() if few is not every and pattern not in cheap]
    compared = partial(_compared, law=law, start=start, priors=posterior.priors, dispersion=dispersion)
    found = compared(every, tuple(each for each in patterns if each not in dear))
    found += compared(few, (kind, *dear))[1:] if dear else []
    return sorted(found, key=lambda each: -each.evidence)


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
    modes = [_mode(each, law, statistics[each], start, priors, dispersion) for each in kinds]
    evidence = np.array([each for _, each in modes]) - modes[0][1]
    if (better := evidence > EVIDENCE).any():
        mean, sd = log_ratios(path, kinds, law, [u for u, _ in modes])
        evidence[better] -= np.maximum(mean + 3 * sd, 0.0)[better] / dispersion
    return [
        Alternative(each, float(more), _values(each, u))
        for each, (u, _), more in zip(kinds, modes, evidence, strict=True)
    ]


def _statistics(path: Path, kinds: tuple[AbstractLayer, ...]) -> dict[AbstractLayer, PathStatistics]:
    """Sufficient statistics of transitions, as NumPy arrays, in the coordinates of each architecture's pattern."""

    @cache
    def of_pattern(pattern: Pattern) -> PathStatistics:
        return jax.tree.map(np.asarray, path_statistics(dataclasses.replace(path, pattern=pattern), pooled=True))

    return {each: of_pattern(each.pattern) for each in kinds}


def log_ratios(
    path: Path, kinds: tuple[AbstractLayer, ...], law: str, modes: list[np.ndarray], replicates: int = 16
) -> tuple[Float[np.ndarray, " kinds"], Float[np.ndarray, " kinds"]]:
    """Mean and standard deviation of the log ratio of each density to the first, for exact layers of the first.

    The layers start where the transitions do; both are 0 if they cannot be drawn.
    """
    every = slice(None)
    starts, width = path.starts(every), path.width[path.network]
    number, first = np.arange(len(path)), np.zeros(len(path), int)
    ratios = np.zeros((replicates, len(kinds)))
    for replicate, key in enumerate(jr.split(jr.key(0), replicates)):
        ends = sample_layer(kinds[0].with_coordinates(modes[0]), starts, width=width, key=key)
        if ends is None:
            return ratios[0], ratios[0]
        drawn = Path(np.stack([starts, ends], axis=1), width, number, first, gap=np.ones(1, int), pattern=path.pattern)
        statistics = _statistics(drawn, kinds)
        densities = [_densities(kind, u[None], law, statistics[kind])[0] for kind, u in zip(kinds, modes, strict=True)]
        ratios[replicate] = np.array(densities) - densities[0]
    return ratios.mean(axis=0), ratios.std(axis=0, ddof=1)


def neighbours(kind: AbstractLayer, data: xr.Dataset) -> list[AbstractLayer]:
    """The other architectures with the default sizes, and the same architecture with one other size."""
    tokens, widths = data.sizes["token_a"], data["width"].values
    found = [masked_as(template(name), kind.pattern) for name in ARCHITECTURES if name != kind.name]
    values = {"heads": (1, 2, 4, 8), "output_projection": (False, True), "expansion": (1, 4)}
    for size in kind.sizes:
        others = (template(kind, **{size: value}) for value in values.get(size, ()))
        found.extend(other for other in others if other != kind)
    pattern = kind.pattern
    if "pattern" in kind.sizes and not pattern.rows and tokens > 1:
        found.append(template(kind, pattern=dataclasses.replace(pattern, causal=not pattern.causal)))
    return [
        each
        for each in found
        if (tokens > 1 or not each.coordinates.temperatures) and not (widths % each.sizes.get("heads", 1)).any()
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
    single, names = statistics.nodes.dtype == np.float32, kind.coordinates.sampled
    step = 1e-2 if single else 1e-4  # of differences in the coordinates
    mean, sd = np.array([priors[name] for name in names]).T
    first = np.clip([start.get(name, 0.0) for name in names], -LARGEST_COORDINATE, LARGEST_COORDINATE)
    free = np.flatnonzero(sd > 0)
    first = np.where(sd > 0, first, mean)
    count, sd = len(free), sd[free]
    steps = step * np.eye(count)

    def whole(each: np.ndarray) -> np.ndarray:
        """Free coordinates with the fixed ones."""
        every = np.tile(first, (*each.shape[:-1], 1))
        every[..., free] = each
        return every

    def potentials(each: np.ndarray) -> np.ndarray:
        """−log density at some points."""
        found = -_densities(kind, whole(each), law, statistics) / dispersion
        return found + (((each - mean[free]) / sd) ** 2).sum(axis=1) / 2

    def objective(u: np.ndarray) -> tuple[float, np.ndarray]:
        here, *around = potentials(np.concatenate([u[None], u + steps, u - steps]))
        return here, (np.array(around[:count]) - np.array(around[count:])) / (2 * step)

    if not count:
        return first, -float(potentials(first[None, free])[0])
    bounds = [(-LARGEST_COORDINATE, LARGEST_COORDINATE)] * count
    found = minimize(objective, first[free], jac=True, method="L-BFGS-B", bounds=bounds)
    along = np.concatenate([steps, -steps])
    around = potentials((found.x + along[:, None] + along).reshape(-1, count)).reshape(2, count, 2, count)
    change = (around[0, :, 0] - around[0, :, 1] - around[1, :, 0] + around[1, :, 1]) / (4 * step**2)
    # In units of the priors the curvature is at least 1.
    curvature = np.maximum(np.linalg.eigvalsh(np.outer(sd, sd) * change), 1.0)
    return whole(found.x), float(-found.fun - np.log(curvature).sum() / 2)


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
    dtype = statistics.nodes.dtype
    laws = laws_on_host(kind, u.astype(dtype), statistics.widths, law)
    limit = laws.limit
    own = limit.attention_drift, limit.relu_drift, limit.linear_noise, limit.attention_noise
    laws = dataclasses.replace(laws, limit=Limit(*own, pattern=statistics.pattern))
    return np.asarray(statistics.log_density(laws, statistics.value), np.float64).sum(axis=-1)
