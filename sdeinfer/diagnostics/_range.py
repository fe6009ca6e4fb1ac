"""The range of the law: how far the softmax is from its expansion, and layers outside the range against exact ones.

The law of a layer is a series that does not hold there, but exact layers of width n can be drawn from any start, by the
covariance chain. This tells data that left the range from data of another architecture.
Tests: `tests/diagnostics/test_check.py`.
"""

import jax.random as jr
import numpy as np

from sdeinfer.diagnostics import _thresholds as bounds
from sdeinfer.diagnostics._residuals import Residuals
from sdeinfer.diagnostics._verdict import IN_RANGE, Check, Verdict, at_least, at_most
from sdeinfer.infer._measures import logit_scale, mean_spread
from sdeinfer.infer._settings import LARGEST_LOGIT
from sdeinfer.likelihood import any_transitions
from sdeinfer.likelihood._transitions import used_of, with_used
from sdeinfer.networks import sample_layer


def check_range(residuals: Residuals) -> Check:
    """Verdicts on the range of the law at the posterior mean; none without attention."""
    attrs, used = residuals.tree.attrs, used_of(residuals.data)
    if not residuals.temperatures:
        return Check()
    layers = residuals.tree["layers"].to_dataset()
    coldest = np.min([layers[name].values for name in residuals.temperatures], axis=0)
    spread = logit_scale(residuals.data) / coldest[:, None]
    # All networks of data in chunks count, of which the data are some.
    share = 1 - float(attrs["left_out"]) if "used_transitions" in attrs else float(used.mean())
    outside = (
        "nearly all transitions start outside the range of the law: tokens are too large for τ0, networks too narrow, "
        "or the temperature is not τ0 √(n n_k)"
    )
    exact = None
    if "out_of_range" in attrs:
        of_share = at_least("agrees with the theory", IN_RANGE, 0.0, bounds.LEAST_USED, str(attrs["out_of_range"]))
    else:
        exact = excluded_layers(residuals, spread) if share < bounds.LEAST_USED and residuals.one_layer else None
        fewest = bounds.FEWEST_USED if exact is None else 0.0  # else the others are tested themselves
        of_share = at_least("agrees with the theory", IN_RANGE, share, fewest, outside)
    largest = bounds.SPREAD[residuals.law]
    smaller = "the law expands the softmax: lower largest_logit, use smaller tokens or wider networks"
    verdicts = [
        of_share,
        at_most("agrees with the theory", "logit spread, mean", mean_spread(spread[used]), largest, smaller),
    ]
    if exact is not None:
        advice = f"{outside}, and they are not those of a shaped {residuals.known_kind.name} with these parameters"
        z = float(np.abs([*exact.values()]).max())
        verdicts.append(at_most("calibrated", "layers out of range, sds", z, bounds.EXACT_DISTANCE, advice))
    return Check(tuple(verdicts))


def cold_draws(residuals: Residuals) -> dict[str, Verdict]:
    """A verdict for each τ0 on the draws in which the mean spread of the logits leaves the range of the law.

    These are the draws whose smallest τ0 is below a bound. Where the softmax chooses one token, the noise of attention
    is up to 2 − 1/m times that of the law: γ absorbs it.
    """
    if not residuals.temperatures:
        return {}
    draws = residuals.draws
    temperatures = [draws[name].values for name in residuals.temperatures if name in draws and draws[name].ndim == 2]
    bound = mean_spread(logit_scale(residuals.data)[used_of(residuals.data)]) / LARGEST_LOGIT
    probability = float(np.mean(np.min(temperatures, axis=0) < bound)) if temperatures else 0.0
    verdicts = {}
    for name in residuals.temperatures:
        advice = (
            f"the data do not exclude {name} below {bound:.2g}, where the softmax leaves the law's range and "
            f"gamma is smaller: give {name} a narrower prior, or take smaller tokens or wider networks"
        )
        row = f"{name} out of range, probability"
        verdicts[name] = at_most("identified", row, probability, bounds.COLD_PROBABILITY, advice)
    return verdicts


def excluded_layers(residuals: Residuals, spread: np.ndarray) -> dict[str, float] | None:
    """Layers outside the range of the law against exact ones from the same starts: z of the growth of V."""
    data, kind = residuals.data, residuals.known_kind
    values = data["covariance"].transpose("network", "layer", "token_a", "token_b").values
    with np.errstate(invalid="ignore"):
        small = np.abs(values).max(axis=(-2, -1)) < bounds.LARGEST_ENTRY
    outside = ~used_of(data) & small[:, :-1] & small[:, 1:]
    if not outside.any():
        return None
    path = any_transitions(with_used(data, outside))
    path = path.take(np.argsort(spread[path.network, path.layer], kind="stable")[: bounds.NEAREST_LAYERS])
    starts, ends, widths = path.starts(slice(None)), path.ends(slice(None)), path.width[path.network]
    draws = {name: residuals.draws[name].values.reshape(-1) for name in kind.declared()}
    chosen = np.linspace(0, len(next(iter(draws.values()))) - 1, bounds.EXACT_DRAWS).round().astype(int)
    growths = []
    for number, draw in enumerate(chosen):
        layer = kind.with_parameters({name: x[draw] for name, x in draws.items()})
        drawn = sample_layer(layer, starts, width=widths, key=jr.fold_in(jr.key(0), number))
        if drawn is None:
            return None
        growths.append(_growth(starts, drawn))
    predicted = np.array(growths)
    z = (_growth(starts, ends) - predicted.mean(axis=0)) / predicted.std(axis=0, ddof=1)
    return {"log trace": float(z[0]), "log volume": float(z[1])}


def _growth(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    trace = [np.log(np.trace(V, axis1=-2, axis2=-1)) for V in (starts, ends)]
    volume = [np.linalg.slogdet(V)[1] for V in (starts, ends)]
    return np.array([np.mean(after - before) for before, after in (trace, volume)])
