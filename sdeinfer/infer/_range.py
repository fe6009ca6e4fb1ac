"""Which transitions start inside the range in which the law of a layer with attention holds.

The law is a series in the spread of the logits in a row of the softmax. Their standard deviation about the row's mean,

    s² = max_α V_αα (tr V − 1ᵀV1/m)/((m − 1) n τ0²)

for the widest row, is what its terms go with: what the law of finite width leaves out moves τ0 by up to a relative s⁴,
5 % at s = 0.5, and what exploding networks do beyond 1 makes a fit absurd. A transition may be left out by a rule on
the covariance from which it starts without biasing the others. The rule: of the transitions with the smallest spreads,
as many as make τ0's error smallest, that of the series and that of few data together; but none above a bound. Where
layers are latent they have to stay in the range as well: a spread counts as what it may grow to until the next
observation. The rule still looks at the start alone.

The rule needs τ0. It is estimated from the transitions with the smallest spreads, four times as many each time, for as
long as the rule allows more by the estimate.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import ArrayLike, Float

from sdeinfer._files import InputError
from sdeinfer.infer._coordinates import LayerAt, layer_at
from sdeinfer.infer._mode import Mode, latent_mode, posterior_mode
from sdeinfer.infer._reduce import kind_of_program, reduced
from sdeinfer.infer._settings import LARGEST_LOGIT
from sdeinfer.layers import AbstractArchitecture, limit_on_host
from sdeinfer.likelihood import (
    AbstractModel,
    Assumptions,
    Groups,
    LatentLayers,
    Path,
    outputs_transitions,
    require_densities,
    transitions,
    used_of,
    with_used,
)
from sdeinfer.observation import groups_of, outputs_of

FIRST, NEARLY_EQUAL, MORE = 512, 1.25, 4
"""The first estimate of τ0 is from so many terms, of which a transition has m(m + 1)/2, and from all transitions with
spreads up to so many times the smallest. The next is from so many times as many."""

NODES = 64
"""Nodes for the estimates: the fewest of a fit, and always the same, so that one program serves both."""


class OutOfRange(InputError):
    """Data of which no transition starts inside the range of the law."""


def range_to_fit(
    model: AbstractModel, data: xr.Dataset, assumptions: Assumptions, largest_logit: float
) -> tuple[xr.Dataset, dict[str, Any]]:
    """`in_range`; but where nothing is left, the half of the transitions with the smallest spreads.

    Layers that are not shaped, or tokens that are too large, are to be judged by `check`, which needs a fit. The
    posterior is told by `out_of_range`, which says why.
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
    """Mark the transitions that start inside the range of the law: of networks in groups, by each group's own τ0.

    Arguments:
        model: the model to be fitted.
        data: the observed networks.
        assumptions: of the fit.
        largest_logit: how large the spread s of the logits may be.

    Returns:
        The data with the variable `used` over network and layer, and what a posterior should say of it: `pilot_tau0`,
        the τ0 by which the range was found, where there is one: one a group, where there are groups, and the smallest
        of the networks, where each has its own.

    Raises:
        OutOfRange: where nothing is left.
        InputError: for a bound that is not positive.
    """
    if not largest_logit > 0:
        raise InputError(f"largest_logit: must be positive, got {largest_logit:g}")
    if isinstance(model, Groups):
        return _in_range_of_groups(model.ungrouped, data, assumptions, largest_logit)
    used = used_of(data)
    tau0 = math.nan
    if math.isfinite(largest_logit) and _temperatures(model, data, assumptions):
        used, tau0 = _used(model, data, assumptions, used, largest_logit)
    return with_used(data, used), {} if math.isnan(tau0) else {"pilot_tau0": tau0}


def _temperatures(model: AbstractModel, data: xr.Dataset, assumptions: Assumptions) -> tuple[str, ...]:
    kind = assumptions.architecture or kind_of_program(model, data, assumptions)
    return kind.coordinates.temperatures


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


def logit_scale(data: xr.Dataset) -> Float[np.ndarray, "networks transitions"]:
    """The spread s of the logits where each transition starts, times τ0."""
    starts = data["covariance"].transpose("network", "layer", "token_a", "token_b").values[:, :-1]
    return logit_spread(starts, data["width"].values[:, None])


def logit_spread(V: Float[np.ndarray, "... m m"], width: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """The spread s of the logits for τ0 = 1."""
    tokens, variances = V.shape[-1], np.diagonal(V, axis1=-2, axis2=-1)
    about_mean = (variances.sum(axis=-1) - V.sum(axis=(-2, -1)) / tokens) / max(tokens - 1, 1)
    return np.sqrt(variances.max(axis=-1)) * np.sqrt(np.maximum(about_mean, 0.0) / width)


class _Estimate(NamedTuple):
    """The mode of the posterior given some transitions, and the layer there; of one for each network, all axes."""

    mode: Mode
    layer: LayerAt


def _estimator(
    model: AbstractModel, data: xr.Dataset, assumptions: Assumptions, path: Path
) -> Callable[[np.ndarray, Mode | None], _Estimate]:
    """The estimate from some transitions of a path, by their indices; from a mode, if there is one."""
    if isinstance(model, LatentLayers):
        prepared = model.reduce(data, assumptions)

        def of_bridges(chosen: np.ndarray, start: Mode | None) -> _Estimate:
            seen = np.isin(np.arange(len(path)), chosen)
            mode = latent_mode(model, prepared, seen, start=start, key=jr.key(0))
            return _Estimate(mode, layer_at(model, prepared, mode))

        return of_bridges

    def of_full_path(chosen: np.ndarray, start: Mode | None) -> _Estimate:
        seen = path.take(chosen)
        require_densities(seen, data)
        statistics = reduced(model, seen, assumptions, nodes=NODES)
        mode = posterior_mode(model, statistics, start=start)
        return _Estimate(mode, layer_at(model, statistics, mode))

    return of_full_path


def _used(
    model: AbstractModel, data: xr.Dataset, assumptions: Assumptions, used: np.ndarray, largest_logit: float
) -> tuple[np.ndarray, float]:
    path = outputs_transitions(data) if outputs_of(data) else transitions(data)
    estimate = _estimator(model, data, assumptions, path)
    kind = assumptions.architecture or kind_of_program(model, data, assumptions)
    coordinates = kind.coordinates
    places = [list(coordinates.sampled).index(name) for name in coordinates.temperatures]
    scale = logit_scale(data)[path.network, path.layer]

    def ordered(noise: ArrayLike, relative_tau0: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """The transitions in ascending order of what their spreads may grow to, and these."""
        each = np.broadcast_to(relative_tau0, len(path.width))[path.network]
        grown = scale / each * _growth(path, noise)
        order = np.argsort(grown)
        return order, grown[order]

    order, sorted_scale = ordered(1.0, 1.0)
    terms = path.tokens * (path.tokens + 1) // 2
    equal = int(np.searchsorted(sorted_scale, NEARLY_EQUAL * sorted_scale[0], side="right"))
    allowed, mode = min(len(order), max(1, FIRST // terms, equal)), None
    count, tau0 = 0, math.nan
    while allowed > count:
        count = min(allowed, MORE * count) if count else allowed
        mode, layer = estimate(order[:count], mode)
        # Of several temperatures the smallest counts; of one for each network, that of the network.
        coldest = np.argmin(layer.u[..., places], axis=-1, keepdims=True)
        log_tau0 = np.take_along_axis(layer.u[..., places], coldest, axis=-1)[..., 0]
        sd = float(np.max(np.take_along_axis(layer.sd[..., places], coldest, axis=-1)))
        tau0 = float(np.exp(log_tau0.min()))
        noise = _noise_at(kind, layer.u) if path.gap.max() > 1 else 0.0
        order, sorted_scale = ordered(noise, np.exp(log_tau0 - log_tau0.min()))
        allowed = transitions_allowed(sorted_scale / tau0, largest_logit, seen=count, sd=sd)
        if allowed == 0:
            # Few transitions say little of τ0: nothing is left only if that holds for larger τ0 as well.
            tau0 *= math.exp(2 * sd)
            allowed = transitions_allowed(sorted_scale / tau0, largest_logit, seen=count, sd=sd)
        if allowed == 0:
            raise OutOfRange(
                f"covariance: no transition starts inside the range of the law: the softmax's logits have a spread of "
                f"at least {sorted_scale[0] / tau0:.2g}, for tau0 up to {tau0:.2g}; {largest_logit:g} is allowed. Use "
                "smaller tokens or wider networks"
            )
    kept = path.take(order[:allowed])
    used = np.zeros_like(used)
    used[kept.network, kept.layer] = True
    return used, tau0


def _growth(path: Path, noise: ArrayLike) -> np.ndarray:
    """By how much the spread may grow in the latent layers before the next observation: by two standard deviations."""
    latent = (path.gap[path.layer] - 1) / path.width[path.network]
    each = np.broadcast_to(noise, len(path.width))[path.network]
    return np.exp(2 * np.sqrt(2 * each * latent))


def _noise_at(kind: AbstractArchitecture, u: np.ndarray) -> np.ndarray:
    """The coefficient a of the noise."""
    each = [limit_on_host(kind.layer_at(here)).linear_noise for here in np.atleast_2d(u)]
    return np.asarray(each).reshape(u.shape[:-1])


def transitions_allowed(spread: np.ndarray, largest: float, *, seen: int, sd: float) -> int:
    """How many transitions, in ascending order of their spreads, make the error of log τ0 smallest.

    Arguments:
        spread: of the transitions.
        largest: bound on the spread.
        seen: how many were seen.
        sd: of log τ0 given those; 0 where τ0 is fixed, and all up to the bound are allowed.
    """
    if sd == 0:
        return int((spread <= largest).sum())
    bounded = np.minimum(spread, 1.0)
    information = np.cumsum(bounded**4)
    of_series = np.cumsum(bounded**8) / information
    of_data = sd * np.sqrt(information[seen - 1] / information)
    error = np.where(spread <= largest, of_series**2 + of_data**2, np.inf)
    return int(np.argmin(error)) + 1 if spread[0] <= largest else 0
