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
"""

import math
from collections.abc import Callable
from typing import Any

import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.infer._coordinates import LayerAt, layer_at
from sdeinfer.infer._measures import logit_scale, measure, measured, names_of
from sdeinfer.infer._mode import Mode, latent_mode, posterior_mode
from sdeinfer.infer._reduce import kind_of_program, reduced
from sdeinfer.infer._settings import LARGEST_LOGIT
from sdeinfer.layers import Architecture, limit_on_host
from sdeinfer.likelihood import (
    ATTENTION_GROWTH,
    GROWTH,
    SPREAD,
    AbstractModel,
    Assumptions,
    ChunkedPath,
    EveryLayer,
    Groups,
    LatentLayers,
    Path,
    any_transitions,
    chunked_path,
    evenly_by,
    outputs_transitions,
    used_of,
    with_used,
)
from sdeinfer.observation import groups_of, in_chunks, outputs_of

FIRST_TERMS, NEARLY_EQUAL, FACTOR = 512, 1.25, 4
"""The first estimate of τ0 uses `FIRST_TERMS` terms (a transition has m(m + 1)/2), and all transitions whose spread is
at most `NEARLY_EQUAL` times the smallest; each further estimate uses up to `FACTOR` times as many transitions."""

PRECISE = 0.01
"""Of data in chunks, the estimate of τ0 uses no more transitions than are in memory at a time, once the standard
deviation of log τ0 is below this."""

ATTENTION_GROWTH_AS_SPREAD, WITH_SPREAD = 1.9, 2.26
"""A growth g of V by the attention of one layer counts as a spread of 1.9 √g, or of 2.26 (g s²)^¼ if that is less. With
six tokens, five of them near copies, the score of log τ0 is biased by 0.02 of its information for g < 0.1, by 0.13 for
0.1 to 0.3."""

LARGEST_GROWTH = 1.0
"""Largest relative change of V by the ReLU of one layer, at which a transition may start."""

FOR_GROWTH = 16_384
"""Largest number of transitions from which θ₂ is estimated to tell the range of the ReLU, which is not sharp."""

LARGEST_RELU_DRIFT = 36.0
"""θ₂ = γ²(c₊ − c₋)² up to which no estimate is needed to tell that all transitions are in this range."""

NODES = 64
"""Number of nodes for the estimates: the smallest number of a fit, so that they share its compiled programs."""


class OutOfRange(InputError):
    """No transition of the data starts inside the range of the law."""


def range_to_fit(
    model: AbstractModel, data: xr.Dataset, assumptions: Assumptions, largest_logit: float
) -> tuple[xr.Dataset, dict[str, Any]]:
    """As `in_range`, but if no transition is left, use the half of the transitions with the smallest spreads.

    This allows a fit, and a verdict by `check`, for layers that are not shaped or tokens that are too large. The
    attribute `out_of_range` of the posterior gives the reason.
    """
    try:
        return in_range(model, data, assumptions, largest_logit)
    except OutOfRange as error:
        used, spread = used_of(data), logit_scale(data)
        used &= spread <= np.median(spread[used])
        return with_used(data, used), {"out_of_range": str(error)}


def in_range(
    model: AbstractModel, data: xr.Dataset, assumptions: Assumptions, largest_logit: float = LARGEST_LOGIT
) -> tuple[xr.Dataset, dict[str, Any]]:
    """Mark the transitions that start inside the range of the law; for groups, by each group's τ0.

    Arguments:
        model: the model to be fitted.
        data: the observed networks.
        assumptions: assumptions of the fit.
        largest_logit: largest spread s of the logits.

    Returns:
        The data with the variable `used` over network and layer, and attributes for the posterior: `pilot_tau0`, the τ0
        that determined the range, if there is one. It has one value per group; if each network has its own τ0, it is
        the smallest. For a program without a single layer all transitions are marked.

    Raises:
        OutOfRange: if no transition is left.
        InputError: for a bound that is not positive.
    """
    if not largest_logit > 0:
        raise InputError(f"largest_logit: must be positive, got {largest_logit:g}")
    if isinstance(model, Groups):
        return _in_range_of_groups(model.ungrouped, data, assumptions, largest_logit)
    used = used_of(data)
    tau0 = math.nan
    kind = assumptions.architecture or kind_of_program(model, data, assumptions)
    names = names_of(kind)
    if not math.isfinite(largest_logit):
        names -= {SPREAD, ATTENTION_GROWTH}
    if not isinstance(model, EveryLayer):
        names -= {GROWTH}
    data = measured(data, names)
    if kind is not None and SPREAD in names:
        used, tau0 = _used(model, data, assumptions, kind, used, largest_logit)
    if kind is not None and GROWTH in names:
        used = _of_small_growth(model, data, assumptions, kind, used)
    return with_used(data, used), {} if math.isnan(tau0) else {"pilot_tau0": tau0}


def _in_range_of_groups(
    ungrouped: AbstractModel, data: xr.Dataset, assumptions: Assumptions, largest_logit: float
) -> tuple[xr.Dataset, dict[str, list[float]]]:
    groups, used, pilots = groups_of(data), used_of(data), []
    for number, label in enumerate(groups.labels):
        members = groups.members(number)
        try:
            own, pilot = in_range(ungrouped, data.isel(network=members), assumptions, largest_logit)
        except InputError as error:
            raise type(error)(f"group {label}: {error}") from error
        used[members] = used_of(own)
        pilots.append(pilot)
    return with_used(data, used), {name: [pilot[name] for pilot in pilots] for name in pilots[0]}


def _with_growth(spread: np.ndarray, growth: np.ndarray) -> np.ndarray:
    """The spreads that count, from the spreads and the growths of V by attention, both for τ0 = 1."""
    of_growth = ATTENTION_GROWTH_AS_SPREAD * np.sqrt(growth)
    return np.maximum(spread, np.minimum(of_growth, WITH_SPREAD * np.sqrt(spread * np.sqrt(growth))))


def _estimator(
    model: AbstractModel, data: xr.Dataset, assumptions: Assumptions, path: Path | ChunkedPath
) -> Callable[[np.ndarray, Mode | None], tuple[Mode, LayerAt]]:
    """Return a function from indices of transitions, and a mode to start from or None, to the estimate."""
    if isinstance(model, LatentLayers):
        prepared = model.reduce(data, assumptions)

        def of_bridges(chosen: np.ndarray, start: Mode | None) -> tuple[Mode, LayerAt]:
            seen = np.isin(np.arange(len(path)), chosen)
            mode = latent_mode(model, prepared, seen, start=start, key=jr.key(0))
            return mode, layer_at(model, prepared, mode)

        return of_bridges

    def of_full_path(chosen: np.ndarray, start: Mode | None) -> tuple[Mode, LayerAt]:
        path.require_densities(chosen)
        statistics = reduced(model, path.take(chosen), assumptions, nodes=NODES)
        mode = posterior_mode(model, statistics, start=start)
        return mode, layer_at(model, statistics, mode)

    return of_full_path


def _used(
    model: AbstractModel,
    data: xr.Dataset,
    assumptions: Assumptions,
    kind: Architecture,
    used: np.ndarray,
    largest_logit: float,
) -> tuple[np.ndarray, float]:
    path = _all_transitions(data)
    coordinates = kind.coordinates
    places = [list(coordinates.sampled).index(name) for name in coordinates.temperatures]
    scale, growth = measure(data, SPREAD)[used], measure(data, ATTENTION_GROWTH)[used]

    def ordered(noise: ArrayLike, relative_tau0: ArrayLike, drift: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """Indices of the transitions in ascending order of the spread to which each may grow; and these spreads."""
        grown = _with_growth(scale, _of_each(drift, used) * growth)
        grown = grown / _of_each(relative_tau0, used) * _latent_growth(data, used, noise)
        order = np.argsort(grown)
        return order, grown[order]

    order, sorted_scale = ordered(1.0, 1.0, 1.0)
    path = path.with_nearby(order[: path.at_once])
    estimate = _estimator(model, data, assumptions, path)
    terms = path.tokens * (path.tokens + 1) // 2
    equal = int(np.searchsorted(sorted_scale, NEARLY_EQUAL * sorted_scale[0], side="right"))
    allowed, mode = min(len(order), max(1, FIRST_TERMS // terms, equal)), None
    count, more, tau0 = 0, allowed, math.nan
    while max(allowed, more) > count:
        count = min(max(allowed, more), FACTOR * count) if count else allowed
        mode, layer = estimate(order[:count], mode)
        # The smallest of the layer's temperatures determines the spread, separately for each network's layer.
        coldest = np.argmin(layer.u[..., places], axis=-1, keepdims=True)
        log_tau0 = np.take_along_axis(layer.u[..., places], coldest, axis=-1)[..., 0]
        sd = float(np.max(np.take_along_axis(layer.sd[..., places], coldest, axis=-1)))
        tau0 = float(np.exp(log_tau0.min()))
        noise = _coefficient(kind, layer.u, "linear_noise") if path.gap.max() > 1 else 0.0
        drift = np.exp(2 * log_tau0) * _coefficient(kind, layer.u, "attention_drift")
        order, sorted_scale = ordered(noise, np.exp(log_tau0 - log_tau0.min()), drift)
        allowed = transitions_allowed(sorted_scale / tau0, largest_logit, seen=count, sd=sd)
        # If τ0 is hardly identified, it may be larger, and more transitions in range.
        more = transitions_allowed(sorted_scale / (tau0 * math.exp(sd)), largest_logit, seen=count, sd=sd)
        if count >= path.at_once and allowed > 0 and sd < PRECISE:
            break
        if allowed == 0:
            # Few transitions determine τ0 poorly: raise an error only if the rule fails at larger τ0 too.
            tau0 *= math.exp(2 * sd)
            allowed = transitions_allowed(sorted_scale / tau0, largest_logit, seen=count, sd=sd)
        if allowed == 0:
            raise OutOfRange(
                f"covariance: no transition starts inside the range of the law: the softmax's logits have a spread of "
                f"at least {sorted_scale[0] / tau0:.2g}, for tau0 up to {tau0:.2g}; {largest_logit:g} is allowed. Use "
                "smaller tokens or wider networks"
            )
    kept = np.zeros(used.size, bool)
    kept[np.flatnonzero(used)[order[:allowed]]] = True
    return kept.reshape(used.shape), tau0


def _of_small_growth(
    model: AbstractModel, data: xr.Dataset, assumptions: Assumptions, kind: Architecture, used: np.ndarray
) -> np.ndarray:
    """The used transitions that start where the ReLU changes V little; all of them if none does."""
    growth = measure(data, GROWTH)[used]
    if growth.max() * LARGEST_RELU_DRIFT <= LARGEST_GROWTH:
        return used
    path = _all_transitions(with_used(data, used))
    estimate, mode = _estimator(model, data, assumptions, path), None
    kept = growth <= max(LARGEST_GROWTH / LARGEST_RELU_DRIFT, np.median(growth))
    for _ in range(2):
        mode, layer = estimate(_some(np.flatnonzero(kept), growth), mode)
        small = growth * _of_each(_coefficient(kind, layer.u, "relu_drift"), used) <= LARGEST_GROWTH
        kept = small if small.any() else kept
    found = np.zeros(used.size, bool)
    found[np.flatnonzero(used)[kept]] = True
    return found.reshape(used.shape)


def _some(indices: np.ndarray, growth: np.ndarray) -> np.ndarray:
    """At most `FOR_GROWTH` transitions, evenly spaced in the order of their growths."""
    return indices[evenly_by(growth[indices], FOR_GROWTH)]


def _all_transitions(data: xr.Dataset) -> Path | ChunkedPath:
    if in_chunks(data):
        return chunked_path(data)
    return outputs_transitions(data) if outputs_of(data) else any_transitions(data)


def _of_each(values: ArrayLike, used: np.ndarray) -> np.ndarray:
    """A value of each used transition, from one for all networks or one for each."""
    values = np.asarray(values)
    return values[np.nonzero(used)[0]] if values.ndim else values


def _latent_growth(data: xr.Dataset, used: np.ndarray, noise: ArrayLike) -> np.ndarray | float:
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
