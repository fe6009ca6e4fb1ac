"""Which transitions start inside the range in which the law of a layer with attention holds.

The law expands the softmax in its logits, whose largest standard deviation at V is max V/(τ0 √n). At 0.75 the variance
of one step is 4 to 5 % off in the limit and 1 % at finite width; at 1.3 the latter is 10 % off, and what exploding
networks do beyond makes a fit absurd. A transition may be left out by a rule on the covariance from which it starts
without biasing the others. The rule needs τ0: it is estimated from the transitions with the smallest covariances,
twice as many each time, for as long as they are in range by the estimate.
"""

import math

import numpy as np
import xarray as xr
from jaxtyping import Float

from sdeinfer._files import InputError
from sdeinfer.infer._mode import Mode, posterior_mode
from sdeinfer.likelihood import USED, Program, observed_path, path_layout, path_statistics, used_of

LARGEST_LOGIT = 0.75
FIRST = 512
"""Terms, of which a transition has m(m + 1)/2, in the first estimate of τ0."""

NODES = 32
"""Nodes for the estimates: fewer than a fit's, and always the same, so that one function is compiled."""


def in_range(
    model: Program, data: xr.Dataset, largest_logit: float = LARGEST_LOGIT
) -> tuple[xr.Dataset, dict[str, float]]:
    """Mark the transitions that start inside the range of the law.

    Arguments:
        model: the program to be fitted, with its architecture and its law.
        data: the observed networks.
        largest_logit: how large max V/(τ0 √n) may be.

    Returns:
        The data with the variable `used` over network and layer, and what a posterior should say of it: `pilot_tau0`,
        the τ0 by which the range was found, where there is one.

    Raises:
        InputError: where nothing is left.
    """
    if not largest_logit > 0:
        raise InputError(f"largest_logit: must be positive, got {largest_logit:g}")
    used = used_of(data)
    tau0 = math.nan
    if "tau0" in dict(model.options)["architecture"].parameters and math.isfinite(largest_logit):
        used, tau0 = _used(model, data, used, largest_logit)
    marked = np.concatenate([used, np.zeros((len(used), 1), bool)], axis=1)
    return data.assign({USED: (("network", "layer"), marked)}), {} if math.isnan(tau0) else {"pilot_tau0": tau0}


def logit_scale(data: xr.Dataset) -> Float[np.ndarray, "networks transitions"]:
    """The largest V/√n where each transition starts; over τ0, the standard deviation of the softmax's logits."""
    starts = data["covariance"].transpose("network", "layer", "token_a", "token_b").values[:, :-1]
    return np.diagonal(starts, axis1=-2, axis2=-1).max(axis=-1) / np.sqrt(data["width"].values)[:, None]


def _used(model: Program, data: xr.Dataset, used: np.ndarray, largest_logit: float) -> tuple[np.ndarray, float]:
    scale = np.where(used, logit_scale(data), np.inf)
    order = np.argsort(scale, axis=None)[: used.sum()]
    sorted_scale = scale.reshape(-1)[order]
    p = data.sizes["token_a"] * (data.sizes["token_a"] + 1) // 2
    count = min(len(order), max(1, FIRST // p))
    tau0, mode, seen = math.nan, None, set()
    while count not in seen:
        seen.add(count)
        chosen = np.zeros(used.size, bool)
        chosen[order[:count]] = True
        mode = _mode(model, data, chosen.reshape(used.shape), mode)
        place = mode.sites.index("tau0")
        tau0, doubt = math.exp(mode.x[place]), math.exp(mode.sd[place])
        allowed = int(np.searchsorted(sorted_scale, largest_logit * tau0, side="right"))
        if allowed == 0:
            # Few transitions say little of τ0: nothing is left only if that holds for larger τ0 as well.
            tau0 *= doubt**2
            allowed = int(np.searchsorted(sorted_scale, largest_logit * tau0, side="right"))
        if allowed == 0:
            raise InputError(
                f"covariance: no transition starts inside the range of the law: the logits' sd max V/(tau0 √n) is at "
                f"least {sorted_scale[0] / tau0:.2g}, for tau0 up to {tau0:.2g}; {largest_logit:g} is allowed. Use "
                "smaller tokens or wider networks"
            )
        count = min(allowed, 2 * count)
    return scale <= largest_logit * tau0, tau0


def _mode(model: Program, data: xr.Dataset, used: np.ndarray, before: Mode | None) -> Mode:
    """Mode of the posterior given some transitions."""
    marked = np.concatenate([used, np.zeros((len(used), 1), bool)], axis=1)
    path = observed_path(data.assign({USED: (("network", "layer"), marked)}))
    statistics = path_statistics(path, path_layout(path, nodes=NODES), pooled=True)
    return posterior_mode(model, statistics, start=None if before is None else before.x)
