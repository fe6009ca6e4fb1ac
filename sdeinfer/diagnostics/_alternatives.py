"""Other architectures and sizes, fitted to the transitions of a fit.

The number of heads, an output projection, the expansion and the architecture itself change the law by factors that the
parameters can absorb: the fit is good, and the parameters are wrong. Each alternative is therefore fitted to the same
sufficient statistics, and compared with the fitted architecture by Laplace's approximation of its evidence.

The laws are normal ones, and wrong by O(1/n) in each transition: over many narrow layers that may favour another
architecture. What exact layers of the fitted one, from the same starts, would give is therefore subtracted, as in Cox's
test of separate families: their mean log ratio and three of its standard deviations, where that is positive.
"""

import dataclasses
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

import jax
import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import Float

from sdeinfer.covariance._pattern import EVERY_TOKEN, Pattern
from sdeinfer.diagnostics import _thresholds as bounds
from sdeinfer.diagnostics._identification import contractions_of
from sdeinfer.diagnostics._residuals import Residuals
from sdeinfer.diagnostics._summary import identified_of, with_chains
from sdeinfer.diagnostics._verdict import Check, at_most
from sdeinfer.infer._expansion import minimum
from sdeinfer.infer._mode import LARGEST_COORDINATE, LAST_STEP
from sdeinfer.infer._networks import SAMPLED_TRANSITIONS
from sdeinfer.layers import AbstractLayer, Limit, kind_in_words, template
from sdeinfer.layers._templates import ARCHITECTURES, call_of, is_named, masked_as, sizes_in_words
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
    residuals = Residuals(with_chains(post), data, kind)
    transitions, kinds = any_transitions(data).thinned(SAMPLED_TRANSITIONS), [kind, *neighbours(kind, data)]
    # Another mask than the fitted one is fitted to fewer transitions, by the number m³(m + 1)/2 of entries of the forms
    # W_q of each.
    sample = transitions.thinned(
        max(1, bounds.COMPARED_FORMS // (transitions.tokens**3 * (transitions.tokens + 1) // 2))
    )
    cheap = [other for other in kinds if sample is transitions or other.pattern in (kind.pattern, EVERY_TOKEN)]
    dear = [other for other in kinds if other not in cheap]
    fits = _fitted(transitions, cheap, residuals, dispersion=dispersion)
    fits += _fitted(sample, [kind, *dear], residuals, dispersion=dispersion)[1:] if dear else []
    return sorted(fits, key=lambda fit: -fit.evidence)


def _fitted(
    path: Path, kinds: Sequence[AbstractLayer], residuals: Residuals, *, dispersion: float
) -> list[Alternative]:
    """Architectures fitted to some transitions, with their evidence against the first one."""
    statistics = _statistics(path, kinds)
    modes = [_mode(kind, statistics, residuals, dispersion=dispersion) for kind in kinds]
    evidence = np.array([value for _, value in modes]) - modes[0][1]
    if (better := evidence > bounds.EVIDENCE).any():
        mean, sd = log_ratios(path, kinds, residuals.law, [u for u, _ in modes])
        evidence[better] -= np.maximum(mean + 3 * sd, 0.0)[better] / dispersion
    fits = []
    for kind, (u, _), excess in zip(kinds, modes, evidence, strict=True):
        coordinates = zip(kind.coordinates.sampled.items(), u, strict=True)
        values = {name: float(parameter.from_real(x)) for (name, parameter), x in coordinates if parameter.identified}
        fits.append(Alternative(kind, float(excess), values))
    return fits


def _statistics(path: Path, kinds: Sequence[AbstractLayer]) -> dict[Pattern, PathStatistics]:
    """Sufficient statistics of transitions, as NumPy arrays, in the coordinates of each pattern."""
    return {
        pattern: jax.tree.map(np.asarray, path_statistics(dataclasses.replace(path, pattern=pattern), pooled=True))
        for pattern in {kind.pattern for kind in kinds}
    }


def log_ratios(
    path: Path, kinds: Sequence[AbstractLayer], law: str, modes: list[np.ndarray]
) -> tuple[Float[np.ndarray, " kinds"], Float[np.ndarray, " kinds"]]:
    """Mean and standard deviation of the log ratio of each density to the first, for exact layers of the first.

    The layers start where the transitions do; both are 0 if they cannot be drawn.
    """
    starts, width = path.starts(slice(None)), path.width[path.network]
    ratios = np.zeros((bounds.SIMULATED_SETS, len(kinds)))
    for replicate, key in enumerate(jr.split(jr.key(0), bounds.SIMULATED_SETS)):
        ends = sample_layer(kinds[0].with_coordinates(modes[0]), starts, width=width, key=key)
        if ends is None:
            return ratios[0], ratios[0]
        statistics = _statistics(path.between(starts, ends, width), kinds)
        densities = [_densities(kind, u[None], law, statistics)[0] for kind, u in zip(kinds, modes, strict=True)]
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
    kind: AbstractLayer, statistics: Mapping[Pattern, PathStatistics], residuals: Residuals, *, dispersion: float
) -> tuple[np.ndarray, float]:
    """The mode from the fitted values of the common coordinates, and the evidence there."""
    names = kind.coordinates.sampled
    mean, sd = np.array([residuals.priors[name] for name in names]).T
    start = dict(zip(residuals.coordinates, residuals.at_mean[0], strict=True))
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
        return (x**2).sum(axis=1) / 2 - _densities(kind, whole(x), residuals.law, statistics) / dispersion

    with np.errstate(over="ignore"):  # of a trial far away, which is not taken
        x, (value, _, curvature) = minimum(potentials, (first[free] - mean[free]) / sd[free], close=LAST_STEP)
    # The curvature of the priors alone is 1.
    curvature = np.maximum(np.linalg.eigvalsh(curvature), 1.0)
    return whole(x), float(-value - np.log(curvature).sum() / 2)


def _densities(
    kind: AbstractLayer,
    u: Float[np.ndarray, "points coordinates"],
    law: str,
    by_pattern: Mapping[Pattern, PathStatistics],
) -> Float[np.ndarray, " points"]:
    """Log density of the data by an architecture at some points, without terms that are not the package's."""
    statistics = by_pattern[kind.pattern]
    laws = laws_on_host(kind, u, statistics.widths, law)
    limit = laws.limit
    terms = limit.attention_drift, limit.relu_drift, limit.linear_noise, limit.attention_noise
    laws = dataclasses.replace(laws, limit=Limit(*terms, pattern=statistics.pattern))
    return np.asarray(statistics.log_density(laws, statistics.value), np.float64).sum(axis=-1)


def check_alternatives(residuals: Residuals) -> Check:
    """The verdict on other architectures, where they are tried."""
    kind = residuals.known_kind
    if not is_named(kind) or not residuals.one_layer:
        reason = "other architectures and sizes: only for si.models.full_path with a named architecture"
        return Check(skipped=(reason,))
    names, contractions = identified_of(residuals.tree), contractions_of(residuals)
    sd = {name: float(residuals.draws[name].values.std(ddof=1)) for name in names}
    known = {name for name in names if name not in contractions or contractions[name].passed}
    candidates = alternatives(residuals.tree, residuals.data, kind, dispersion=residuals.sums.dispersion)
    return check_candidates(candidates, kind, sd=sd, known=known)


def check_candidates(
    candidates: Sequence[Alternative], kind: AbstractLayer, *, sd: Mapping[str, float], known: Set[str]
) -> Check:
    """The verdict on architectures, the best first; notes; what the data do not confirm, with what another would give.

    `sd` has the posterior standard deviations of all parameters; the data identify those in `known`.
    """
    fitted = next(candidate for candidate in candidates if candidate.architecture == kind)
    best, advice, notes, assumed = 0.0, "", [], {}
    for candidate in candidates:
        change = _change(candidate, fitted, sd=sd, known=known)
        if candidate.evidence < -bounds.EVIDENCE or not change:
            continue
        description = f"{kind_in_words(candidate.architecture)} ({change})"
        if candidate.evidence <= bounds.EVIDENCE:
            notes.append(f"these data do not exclude {description}")
            other_sizes = ", ".join(different_sizes(candidate.architecture, kind))
            differences = dict.fromkeys(different_sizes(kind, candidate.architecture), f"{other_sizes}: {change}")
            assumed = differences | assumed  # of the best alternative
        elif candidate.evidence > best:
            best = candidate.evidence
            remedy = f"check the network's code, or fit by architecture={call_of(candidate.architecture)}"
            advice = f"{description} fits better, by a log evidence of {best:.2g}: {remedy}"
    verdict = at_most("architecture", "evidence for another architecture", best, bounds.EVIDENCE, advice)
    in_order = (kind_in_words(kind), *sizes_in_words(kind).values())
    assumed = {words: assumed[words] for words in in_order if words in assumed}
    return Check((verdict,), notes=tuple(notes), assumed=assumed)


def _change(candidate: Alternative, fitted: Alternative, *, sd: Mapping[str, float], known: Set[str]) -> str:
    """The move of a parameter by an architecture, or what it lacks, in words; empty if it does not matter.

    A move matters if the data identify the parameter; if the architecture fits better, that of any parameter matters.
    """
    lacks = [name for name in fitted.values if name in known and sd[name] > 0 and name not in candidate.values]
    if lacks:
        return f"without {lacks[0]}"
    kind, other, better = fitted.architecture, candidate.architecture, candidate.evidence > bounds.EVIDENCE
    shared = [name for name in candidate.values if name in fitted.values and sd.get(name, 0.0) > 0]
    moves = {name: abs(candidate.values[name] - fitted.values[name]) / sd[name] for name in shared}
    far = {name for name, move in moves.items() if move > bounds.LARGEST_MOVE and (name in known or better)}
    # Another mask changes what later tokens do, also where the parameters are the same.
    masked = better and other.name == kind.name and other.sizes.get("pattern") != kind.sizes.get("pattern")
    if not (far or masked):
        return ""
    name = max(far or shared, key=lambda name: moves[name])
    return f"{name} {candidate.values[name]:.3g} in place of {fitted.values[name]:.3g}"


def different_sizes(kind: AbstractLayer, other_kind: AbstractLayer) -> list[str]:
    """The sizes, or the kind, that an architecture has in place of another's, in words."""
    if kind.name != other_kind.name:
        return [kind_in_words(kind)]
    return [words for size, words in sizes_in_words(kind).items() if kind.sizes[size] != other_kind.sizes[size]]
