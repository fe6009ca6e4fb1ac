"""Selection of the transitions that start inside the range of validity of the law of a layer.

For attention the law is a series in the spread s of the logits in a row of the softmax: their standard deviation about
the row mean,

    s² = max_α V_αα tr(H_α V)/((m_α − 1) n τ0²)

in the widest row; row α attends to m_α tokens, and H_α centres them. The omitted terms of the law of finite width
change τ0 by up to a relative s⁴, 5 % at s = 0.5; for s > 1, as in exploding networks, fits are meaningless. Selecting
transitions by their starting covariance does not bias the likelihood. The rule keeps the transitions with the smallest
spreads: the number that minimises the sum of the squared series error and the squared sampling error of log τ0, and
none above a bound. Latent layers have to stay in the range too, so the rule uses the spread to which the start may grow
before the next observation.

The rule needs τ0. It is estimated from the transitions with the smallest spreads; their number grows by a factor of
four as long as the rule, at the current estimate, allows more.

The law is one of small relative changes of V in one layer: by attention of size (θ₁/n) ‖L⁻¹ B₁ L⁻ᵀ‖ with V = LLᵀ, by a
shaped ReLU of size (θ₂/n) ‖L⁻¹ B₂ L⁻ᵀ‖. They are small except where V is nearly singular: one layer may then add many
times V, and a drift of many standard deviations, in the directions in which V is small. For attention these are near
copies of a token beside others. A growth g of 0.1 counts as a spread of 0.6, except where the series converges so well
that it does not matter, g s² < 0.005. For a ReLU they are tokens that are not near copies, such as two opposite ones.

After many layers V may be singular up to its rounding, which then looks like noise of the layers. Such transitions are
left out, whatever the layer.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import xarray as xr
from jaxtyping import ArrayLike, Int

from sdeinfer._files import InputError
from sdeinfer.infer._measures import logit_scale, measure, measured
from sdeinfer.infer._mode import LayerAt, Pilot
from sdeinfer.infer._settings import LARGEST_LOGIT
from sdeinfer.layers import Architecture, limit_on_host
from sdeinfer.likelihood import (
    ATTENTION_GROWTH,
    GROWTH,
    ROUNDING,
    SPREAD,
    Assumptions,
    ChunkedPath,
    Path,
    any_transitions,
    chunked_path,
    evenly_by,
    outputs_transitions,
    used_of,
    used_only,
    with_used,
)
from sdeinfer.observation import in_chunks, outputs_of

FIRST_TERMS, NEARLY_EQUAL, FACTOR = 512, 1.25, 4
"""The first estimate of τ0 uses `FIRST_TERMS` terms (a transition has m(m + 1)/2), and all transitions whose spread is
at most `NEARLY_EQUAL` times the smallest; each further estimate uses up to `FACTOR` times as many transitions."""

PRECISE = 0.01
"""The standard deviation of log τ0 below which an estimate from data in chunks takes no more transitions than are in
memory at a time."""

LARGEST_GROWTH = 1.0
"""Largest relative change of V by the ReLU of one layer, at which a transition may start."""

FOR_GROWTH = 16_384
"""Largest number of transitions, evenly spaced in the order of their growths, from which θ₂ is estimated to tell the
range of the ReLU, which is not sharp."""

LARGEST_RELU_DRIFT = 36.0
"""θ₂ = γ²(c₊ − c₋)² up to which no estimate is needed to tell that all transitions are in this range."""

ATTENTION_GROWTH_AS_SPREAD, WITH_SPREAD = 1.9, 2.26
"""A growth g of V by the attention of one layer counts as a spread of 1.9 √g, or of 2.26 (g s²)^¼ if that is less. With
six tokens, five of them near copies, the score of log τ0 is biased by 0.02 of its information for g < 0.1, by 0.13 for
0.1 to 0.3."""


LARGEST_ROUNDING = 0.05
"""Largest relative rounding of V, times √n. A layer's noise is √2 γ/√n: the rounding is a tenth of that at γ = 0.35.
In float64 and n = 64 the condition number is then at most 6·10⁸, in float32 5·10⁴."""


@runtime_checkable
class Ranged(Protocol):
    """What determines the range of a law, see `AbstractCovariances`."""

    @property
    def kind(self) -> Architecture | None: ...

    @property
    def assumptions(self) -> Assumptions: ...

    @property
    def measures(self) -> set[str]: ...

    def parts(self, data: xr.Dataset) -> "Iterator[tuple[str | None, Int[np.ndarray, ' members'], Ranged]]": ...

    def pilot(self, data: xr.Dataset, path: Path | ChunkedPath) -> Pilot: ...


class OutOfRange(InputError):
    """No transition of the data starts inside the range of the law."""


def range_to_fit(problem: Ranged, data: xr.Dataset, largest_logit: float) -> tuple[xr.Dataset, dict[str, Any]]:
    """As `in_range`, but if no transition is left, use the half of the transitions with the smallest spreads.

    This allows a fit, and a verdict by `check`, for layers that are not shaped or tokens that are too large. The
    attribute `out_of_range` of the posterior gives the reason.
    """
    try:
        return in_range(problem, data, largest_logit)
    except OutOfRange as error:
        used, spread = used_of(data), logit_scale(data)
        used &= spread <= np.median(spread[used])
        return with_used(data, used), {"out_of_range": str(error)}


def in_range(
    problem: Ranged, data: xr.Dataset, largest_logit: float = LARGEST_LOGIT
) -> tuple[xr.Dataset, dict[str, Any]]:
    """Mark the transitions that start inside the range of the law; for groups, by each group's τ0.

    Arguments:
        problem: the model to be fitted.
        data: the observed networks.
        largest_logit: largest spread s of the logits.

    Returns:
        The data with the variable `used` over network and layer, and attributes for the posterior: `pilot_tau0`, the τ0
        that determined the range, if there is one. It has one value per group; if each network has its own τ0, it is
        the smallest. For a program without a single layer all but nearly singular
        transitions are marked.

    Raises:
        OutOfRange: if no transition is left.
        InputError: for a bound that is not positive.
    """
    if not largest_logit > 0:
        raise InputError(f"largest_logit: must be positive, got {largest_logit:g}")
    used, pilots, in_groups = used_of(data), [], False
    for label, members, part in problem.parts(data):
        in_groups = label is not None
        try:
            own = data.isel(network=members) if in_groups else data
            used[members], tau0 = _used_of_part(part, own, largest_logit)
        except InputError as error:
            raise type(error)(f"group {label}: {error}" if in_groups else str(error)) from error
        pilots.append(tau0)
    found = {} if math.isnan(pilots[0]) else {"pilot_tau0": pilots if in_groups else pilots[0]}
    return with_used(data, used), found


def _used_of_part(problem: Ranged, data: xr.Dataset, largest_logit: float) -> tuple[np.ndarray, float]:
    """Whether each transition is in the range, and the τ0 that determined it; NaN without one."""
    names, used, tau0 = problem.measures, used_of(data), math.nan
    if not math.isfinite(largest_logit):
        names -= {SPREAD, ATTENTION_GROWTH}
    data = measured(data, names)
    used = _of_small_rounding(data, used)
    data = with_used(data, used)
    if SPREAD in names:
        used, tau0 = _of_small_spread(problem, data, used, largest_logit)
    if GROWTH in names:
        used = _of_small_growth(problem, data, used)
    return used, tau0


def _of_small_spread(
    problem: Ranged, data: xr.Dataset, used: np.ndarray, largest_logit: float
) -> tuple[np.ndarray, float]:
    """The used transitions of small spreads, and τ0."""
    assert problem.kind is not None
    order, sorted_scale = _by_spread(data, used, Coldest())
    path = _all_transitions(problem, data)
    path = path.with_nearby(order[: path.at_once])
    estimate = problem.pilot(data, path)
    terms = path.tokens * (path.tokens + 1) // 2
    equal = int(np.searchsorted(sorted_scale, NEARLY_EQUAL * sorted_scale[0], side="right"))
    allowed, mode = min(len(order), max(1, FIRST_TERMS // terms, equal)), None
    count, more, tau0 = 0, allowed, math.nan
    while max(allowed, more) > count:
        count = min(max(allowed, more), FACTOR * count) if count else allowed
        mode, layer = estimate(order[:count], mode)
        coldest = Coldest.of(problem.kind, layer)
        tau0, sd = float(np.exp(coldest.log_tau0.min())), coldest.sd
        order, sorted_scale = _by_spread(data, used, coldest)
        rule = partial(transitions_allowed, largest=largest_logit, seen=count, sd=sd)
        allowed = rule(sorted_scale / tau0)
        # If τ0 is hardly identified, it may be larger, and more transitions in range.
        more = rule(sorted_scale / (tau0 * math.exp(sd)))
        if count >= path.at_once and allowed > 0 and sd < PRECISE:
            break
        if allowed == 0:
            # Few transitions determine τ0 poorly: raise an error only if the rule fails at larger τ0 too.
            tau0 *= math.exp(2 * sd)
            allowed = rule(sorted_scale / tau0)
        if allowed == 0:
            raise OutOfRange(
                f"covariance: no transition starts inside the range of the law: the softmax's logits have a spread of "
                f"at least {sorted_scale[0] / tau0:.2g}, for tau0 up to {tau0:.2g}; {largest_logit:g} is allowed. Use "
                "smaller tokens or wider networks"
            )
    return used_only(used, order[:allowed]), tau0


def _of_small_rounding(data: xr.Dataset, used: np.ndarray) -> np.ndarray:
    """The used transitions that start where V is not singular up to rounding; singular initial tokens are an error."""
    small = measure(data, ROUNDING) <= LARGEST_ROUNDING
    small[:, 0] = True
    return used & small


def _of_small_growth(problem: Ranged, data: xr.Dataset, used: np.ndarray) -> np.ndarray:
    """The used transitions that start where the ReLU changes V little; all of them if none does."""
    growth = measure(data, GROWTH)[used]
    if growth.max() * LARGEST_RELU_DRIFT <= LARGEST_GROWTH:
        return used
    assert problem.kind is not None
    data = with_used(data, used)
    estimate, mode = problem.pilot(data, _all_transitions(problem, data)), None
    kept = growth <= max(LARGEST_GROWTH / LARGEST_RELU_DRIFT, np.median(growth))
    for _ in range(2):
        indices = np.flatnonzero(kept)
        mode, layer = estimate(indices[evenly_by(growth[indices], FOR_GROWTH)], mode)
        small = growth * _of_each(_coefficient(problem.kind, layer.u, "relu_drift"), used) <= LARGEST_GROWTH
        kept = small if small.any() else kept
    return used_only(used, kept)


def _all_transitions(problem: Ranged, data: xr.Dataset) -> Path | ChunkedPath:
    others = problem.assumptions.other_terms
    if in_chunks(data):
        return chunked_path(data, others)
    return outputs_transitions(data) if outputs_of(data) else any_transitions(data, others)


class Coldest(NamedTuple):
    """The smallest of a layer's temperatures, which determines the spread, or of each network's layer.

    With the largest standard deviation of log τ0, the noise of the layer, and its τ0² θ₁.
    """

    log_tau0: np.ndarray = np.zeros(())
    sd: float = math.inf
    noise: ArrayLike = 1.0
    drift: ArrayLike = 1.0

    @classmethod
    def of(cls, kind: Architecture, layer: LayerAt) -> "Coldest":
        coordinates = kind.coordinates
        places = [list(coordinates.sampled).index(name) for name in coordinates.temperatures]
        coldest = np.argmin(layer.u[..., places], axis=-1, keepdims=True)
        log_tau0, sd = (np.take_along_axis(x[..., places], coldest, axis=-1)[..., 0] for x in (layer.u, layer.sd))
        drift = np.exp(2 * log_tau0) * _coefficient(kind, layer.u, "attention_drift")
        return cls(log_tau0, float(np.max(sd)), _coefficient(kind, layer.u, "linear_noise"), drift)


def _by_spread(data: xr.Dataset, used: np.ndarray, coldest: Coldest) -> tuple[np.ndarray, np.ndarray]:
    """Indices of the used transitions in ascending order of the spread to which each may grow; and these spreads.

    The spreads are those for τ0 = 1 or, if each network's layer has a τ0, for these relative to the smallest.
    """
    spread, growth = (measure(data, name)[used] for name in (SPREAD, ATTENTION_GROWTH))
    growth = np.sqrt(_of_each(coldest.drift, used) * growth)
    spread = np.maximum(spread, np.minimum(ATTENTION_GROWTH_AS_SPREAD * growth, WITH_SPREAD * np.sqrt(spread * growth)))
    relative = np.exp(coldest.log_tau0 - coldest.log_tau0.min())
    grown = spread / _of_each(relative, used) * latent_growth(data, used, coldest.noise)
    order = np.argsort(grown)
    return order, grown[order]


def _of_each(values: ArrayLike, used: np.ndarray) -> np.ndarray:
    """A value of each used transition, from one for all networks or one for each."""
    values = np.asarray(values)
    return values[np.nonzero(used)[0]] if values.ndim else values


def latent_growth(data: xr.Dataset, used: np.ndarray, noise: ArrayLike) -> np.ndarray | float:
    """Factor by which the spread may grow (two standard deviations) in latent layers before the next observation."""
    latent = np.diff(data["layer"].values) - 1
    if not latent.any():
        return 1.0
    network, layer = np.nonzero(used)
    return np.exp(2 * np.sqrt(2 * _of_each(noise, used) * latent[layer] / data["width"].values[network]))


def _coefficient(kind: Architecture, u: np.ndarray, name: str) -> np.ndarray:
    """A coefficient of the limit at coordinates u."""
    each = [getattr(limit_on_host(kind.layer_at(here)), name) for here in np.atleast_2d(u)]
    return np.asarray(each).reshape(u.shape[:-1])


def transitions_allowed(spread: np.ndarray, largest: float, *, seen: int, sd: float) -> int:
    """Number of transitions with the smallest spreads that minimises the error of log τ0.

    Arguments:
        spread: spreads of the transitions, ascending.
        largest: bound on the spread.
        seen: number of transitions in the estimate of τ0.
        sd: standard deviation of log τ0 given these; 0 for a fixed τ0, which allows all transitions up to the bound.
    """
    if sd == 0:
        return int((spread <= largest).sum())
    bounded = np.minimum(spread, 1.0)
    information = np.cumsum(bounded**4)
    of_series = np.cumsum(bounded**8) / information
    of_data = sd * np.sqrt(information[seen - 1] / information)
    error = np.where(spread <= largest, of_series**2 + of_data**2, np.inf)
    return int(np.argmin(error)) + 1 if spread[0] <= largest else 0
