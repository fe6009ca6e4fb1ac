"""Selection of the transitions that start inside the range of validity of the law of a layer.

For attention the law is a series in the spread s of the softmax's logits in a row, see `docs/theory/likelihood.md`. The
rule keeps the transitions with the smallest spreads: the number that minimises the sum of the squared series error and
the squared sampling error of log τ0, and none above a bound. Selecting them by their starting covariance does not bias
the likelihood. Latent layers have to stay in the range too: the spread is that to which the start may grow before the
next observation. τ0 is estimated from the transitions with the smallest spreads; their number grows by a factor of four
as long as the rule, at the current estimate, allows more.

Nearly singular V are left out where one layer changes them by much: near copies of a token beside others for attention,
tokens that are not near copies for a ReLU. So are V that are singular up to their rounding.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import xarray as xr
from jaxtyping import ArrayLike, Bool, Float, Int

from sdeinfer._files import InputError
from sdeinfer.infer._measures import (
    Measure,
    Measures,
    attention_bend,
    attention_growth,
    logit_spread,
    measures_of,
    relu_growth,
    rounding,
)
from sdeinfer.infer._mode import LayerAt, Pilot
from sdeinfer.infer._settings import LARGEST_LOGIT
from sdeinfer.layers import AbstractLayer
from sdeinfer.layers._base import limits_on_host
from sdeinfer.likelihood._transitions import Path, evenly_by, require_some
from sdeinfer.observation._doubts import require_changing_norms

FIRST_TERMS, NEARLY_EQUAL, ESTIMATE_GROWTH = 512, 1.25, 4
"""The first estimate of τ0 uses `FIRST_TERMS` terms (a transition has m(m + 1)/2), and all transitions whose spread is
at most `NEARLY_EQUAL` times the smallest; each further one uses up to `ESTIMATE_GROWTH` times as many transitions."""

ATTENTION_GROWTH_AS_SPREAD, WITH_SPREAD = 1.9, 2.26
"""A growth g of V by the attention of one layer counts as a spread of 1.9 √g, or of 2.26 (g s²)^¼ if that is less. With
six tokens, five of them near copies, the score of log τ0 is biased by 0.02 of its information for g < 0.1, by 0.13 for
0.1 to 0.3."""


LARGEST_ROUNDING = 0.05
"""Largest relative rounding of V, times √n. A layer's noise is √2 γ/√n: the rounding is a tenth of that at γ = 0.35.
In float64 and n = 64 the condition number is then at most 6·10⁸, in float32 5·10⁴."""


@runtime_checkable
class Ranged(Protocol):
    """A problem whose law holds in a range, see `AbstractCovariances`."""

    @property
    def kind(self) -> AbstractLayer | None: ...

    @property
    def measures(self) -> set[Measure]: ...

    def parts(self, data: xr.Dataset) -> "Iterator[tuple[str | None, Int[np.ndarray, ' members'], Ranged]]": ...

    def pilot(self, path: Path) -> Pilot: ...


class OutOfRange(InputError):
    """No transition of the data starts inside the range of the law."""


class ColdestLayer(NamedTuple):
    """The smallest temperature of a layer, or of each network's, its largest sd, the noise a, τ0² θ₁ and τ0² κ²."""

    log_tau0: np.ndarray = np.zeros(())
    sd: float = math.inf
    noise: ArrayLike = 1.0
    drift: ArrayLike = 1.0
    mixing: ArrayLike = 1.0

    @classmethod
    def of(cls, kind: AbstractLayer, layer: LayerAt) -> "ColdestLayer":
        coordinates = kind.coordinates
        places = [list(coordinates.sampled).index(name) for name in coordinates.temperatures]
        coldest = np.argmin(layer.u[..., places], axis=-1, keepdims=True)
        log_tau0, sd = (np.take_along_axis(x[..., places], coldest, axis=-1)[..., 0] for x in (layer.u, layer.sd))
        limit, square = limits_on_host(kind, layer.u), np.exp(2 * log_tau0)
        drift, mixing = square * limit.attention_drift, square * limit.attention_noise
        return cls(log_tau0, float(np.max(sd)), limit.linear_noise, drift, mixing)

    def grown(self, path: Path, measures: Measures) -> Float[np.ndarray, " transitions"]:
        """The spread to which each transition may grow, for τ0 = 1 or relative to the smallest, in its latent time."""
        tau0, noise, drift, mixing = (
            _of_network(values, path) for values in (np.exp(self.log_tau0), self.noise, self.drift, self.mixing)
        )
        spread, growth = measures[logit_spread], np.sqrt(drift * measures[attention_growth])
        of_growth = np.minimum(ATTENTION_GROWTH_AS_SPREAD * growth, WITH_SPREAD * np.sqrt(spread * growth))
        # n var S_ii = (32/3) n D²/H of g⁴, relative to 2a: the fourth power of a spread.
        share = mixing / np.maximum(noise, np.finfo(np.float64).tiny)
        of_bend = (16 / 3 * share) ** 0.25 * measures[attention_bend] / tau0
        grown = np.maximum(np.maximum(spread, of_growth), of_bend)
        return grown / (tau0 / np.exp(self.log_tau0).min()) * spread_growth(latent_time(path), noise)


class Range(NamedTuple):
    """Bounds on the starts of transitions.

    Attributes:
        coldest: the layer whose softmax has the smallest temperature.
        spread: bound on the spreads by `coldest.grown`, times the smallest τ0.
        growth: bound on the growth by a ReLU with θ₂ = 1, of all networks or of each.
        rounding: bound on the relative rounding of V.
    """

    coldest: ColdestLayer = ColdestLayer()
    spread: float = math.inf
    growth: ArrayLike = math.inf
    rounding: float = LARGEST_ROUNDING

    def contains(self, path: Path, measures: Measures) -> Bool[np.ndarray, " transitions"]:
        """Whether each transition starts inside.

        Starts at layer 0 pass the test of rounding also where V is singular: `require_densities` later raises the error
        that names the network.
        """
        inside = (measures[rounding] <= self.rounding) | (path.layer == 0)
        if math.isfinite(self.spread):
            inside &= self.coldest.grown(path, measures) <= self.spread
        if relu_growth in measures:
            inside &= measures[relu_growth] <= _of_network(self.growth, path)
        return inside


class Selection(NamedTuple):
    """The transitions that start inside of the range of the law, what a posterior says of it, and the last range."""

    path: Path
    attributes: dict[str, Any]
    bounds: Range


def range_to_fit(
    problem: Ranged, data: xr.Dataset, path: Path, largest_logit: float, data_per_sample: float = 1.0
) -> Selection:
    """As `in_range`; if no transition is left, the half with the smallest spreads, and the reason as `out_of_range`."""
    require_changing_norms(data)
    try:
        return in_range(problem, data, path, largest_logit, data_per_sample)
    except OutOfRange as error:
        spread = measures_of(path, [logit_spread])[logit_spread]
        half = Range(ColdestLayer(noise=0.0, drift=0.0, mixing=0.0), float(np.median(spread)), rounding=math.inf)
        return Selection(path.take(np.flatnonzero(spread <= half.spread)), {"out_of_range": str(error)}, half)


def in_range(
    problem: Ranged, data: xr.Dataset, path: Path, largest_logit: float = LARGEST_LOGIT, data_per_sample: float = 1.0
) -> Selection:
    """Select the transitions that start inside the range of the law; each group has the range of its own τ0.

    `data` may be a sample: there are `data_per_sample` times as many networks in all. The attribute `pilot_tau0` has
    the τ0 of the range, or of each group's; the range of the selection is that of the last group.
    """
    if not largest_logit > 0:
        raise InputError(f"largest_logit: must be positive, got {largest_logit:g}")
    inside, pilots, in_groups, bounds = np.zeros(len(path), bool), [], False, Range()
    for label, members, part in problem.parts(data):
        in_groups = label is not None
        try:
            members_path = path.of_networks(members) if in_groups else path
            chosen, bounds, tau0 = _range_of_part(part, members_path, largest_logit, data_per_sample)
        except InputError as error:
            raise type(error)(f"group {label}: {error}" if in_groups else str(error)) from error
        inside[np.isin(path.network, members)] = chosen
        pilots.append(tau0)
    attributes = {} if math.isnan(pilots[0]) else {"pilot_tau0": pilots if in_groups else pilots[0]}
    return Selection(path.take(np.flatnonzero(inside)), attributes, bounds)


def _range_of_part(
    problem: Ranged, path: Path, largest_logit: float, data_per_sample: float
) -> tuple[Bool[np.ndarray, " transitions"], Range, float]:
    """Whether each transition is inside, the range, and the τ0 that determined it; NaN without one."""
    require_some(len(path))
    kinds = problem.measures
    if not math.isfinite(largest_logit):
        kinds = kinds - {logit_spread, attention_growth, attention_bend}
    measures, bounds, tau0 = measures_of(path, kinds), Range(), math.nan
    if logit_spread in kinds:
        some, values = _inside(path, measures, bounds)
        coldest, spread, tau0 = _largest_spread(problem, some, values, largest_logit, data_per_sample)
        bounds = bounds._replace(coldest=coldest, spread=spread)
    if relu_growth in kinds:
        some, values = _inside(path, measures, bounds)
        bounds = bounds._replace(growth=_largest_growth(problem, some, values[relu_growth]))
    inside = bounds.contains(path, measures)
    require_some(int(inside.sum()))
    return inside, bounds, tau0


def _inside(path: Path, measures: Measures, bounds: Range) -> tuple[Path, Measures]:
    """The transitions inside of a range, with their measures."""
    indices = np.flatnonzero(bounds.contains(path, measures))
    require_some(len(indices))
    return path.take(indices), {measure: values[indices] for measure, values in measures.items()}


def _largest_spread(
    problem: Ranged, path: Path, measures: Measures, largest_logit: float, data_per_sample: float
) -> tuple[ColdestLayer, float, float]:
    """The coldest layer, the largest spread to which a transition may grow, and τ0."""
    assert problem.kind is not None

    def ascending(coldest: ColdestLayer) -> tuple[np.ndarray, np.ndarray]:
        grown = coldest.grown(path, measures)
        order = np.argsort(grown)
        return order, grown[order]

    coldest = ColdestLayer()
    order, spread = ascending(coldest)
    estimate = problem.pilot(path)
    terms = path.tokens * (path.tokens + 1) // 2
    equal = int(np.searchsorted(spread, NEARLY_EQUAL * spread[0], side="right"))
    allowed, mode = min(len(order), max(1, FIRST_TERMS // terms, equal)), None
    count, allowed_if_warmer, tau0 = 0, allowed, math.nan
    while max(allowed, allowed_if_warmer) > count:
        count = min(max(allowed, allowed_if_warmer), ESTIMATE_GROWTH * count) if count else allowed
        mode, layer = estimate(order[:count], mode)
        coldest = ColdestLayer.of(problem.kind, layer)
        tau0, sd = float(np.exp(coldest.log_tau0.min())), coldest.sd
        order, spread = ascending(coldest)
        rule = partial(transitions_allowed, largest=largest_logit, seen=count, sd=sd, data_per_sample=data_per_sample)
        allowed = rule(spread / tau0)
        # If τ0 is hardly identified, it may be larger, and more transitions in range.
        allowed_if_warmer = rule(spread / (tau0 * math.exp(sd)))
        if allowed == 0:
            # Few transitions determine τ0 poorly: raise an error only if the rule fails at larger τ0 too.
            tau0 *= math.exp(2 * sd)
            allowed = rule(spread / tau0)
        if allowed == 0:
            raise OutOfRange(
                f"covariance: no transition starts inside the range of the law: the softmax's logits have a spread of "
                f"at least {spread[0] / tau0:.2g}, for tau0 up to {tau0:.2g}; {largest_logit:g} is allowed. Use "
                "smaller tokens or wider networks"
            )
    return coldest, float(spread[allowed - 1]), tau0


def _largest_growth(problem: Ranged, path: Path, growth: Float[np.ndarray, " transitions"]) -> ArrayLike:
    """The growth by the ReLU with θ₂ = 1 at which that of the layer is 1, where it may start; all may if none may."""
    largest_drift = 36.0  # θ₂ = γ²(c₊ − c₋)² up to which no estimate is needed
    if growth.max() * largest_drift <= 1.0:
        return math.inf
    assert problem.kind is not None
    estimate, mode = problem.pilot(path), None
    bound: ArrayLike = max(1.0 / largest_drift, float(np.median(growth)))
    for _ in range(2):
        indices = np.flatnonzero(growth <= _of_network(bound, path))
        some = evenly_by(growth[indices], 16_384)  # this range is not sharp
        mode, layer = estimate(indices[some], mode)
        drift = limits_on_host(problem.kind, layer.u).relu_drift
        candidate = 1.0 / np.maximum(drift, np.finfo(np.float64).tiny)
        if (growth <= _of_network(candidate, path)).any():
            bound = candidate
    return bound


def _of_network(values: ArrayLike, path: Path) -> np.ndarray:
    """A number of all networks, or that of each transition's network."""
    values = np.asarray(values)
    return values[path.network] if values.ndim else values


def latent_time(path: Path) -> Float[np.ndarray, " transitions"]:
    """The depth-time of the latent layers of each transition."""
    return (path.gap[path.layer] - 1) / path.width[path.network]


def spread_growth(latent: ArrayLike, noise: ArrayLike) -> np.ndarray:
    """Factor by which the spread may grow (two standard deviations) in latent layers before the next observation."""
    return np.exp(2 * np.sqrt(2 * np.asarray(noise) * latent))


def transitions_allowed(
    spread: np.ndarray, largest: float, *, seen: int, sd: float, data_per_sample: float = 1.0
) -> int:
    """Number of transitions with the smallest spreads, that minimises the error of log τ0 of `data_per_sample` as many.

    `sd` is that of log τ0 given the first `seen`, 0 for a fixed τ0, which allows all up to the bound.
    """
    if sd == 0:
        return int((spread <= largest).sum())
    bounded = np.minimum(spread, 1.0)
    information = np.cumsum(bounded**4)
    of_series = np.cumsum(bounded**8) / information
    of_data = sd * np.sqrt(information[seen - 1] / information / data_per_sample)
    error = np.where(spread <= largest, of_series**2 + of_data**2, np.inf)
    return int(np.argmin(error)) + 1 if spread[0] <= largest else 0
