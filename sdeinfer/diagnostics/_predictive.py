"""Comparison of networks with predictions of the SDE: leave-one-out, and all together."""

import contextlib
import math
import warnings
from typing import NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats.base.array import array_stats
from jaxtyping import Float
from scipy.stats import kstest, wasserstein_distance

from sdeinfer.diagnostics._fitted import require_groups
from sdeinfer.diagnostics._thresholds import FEWEST_NETWORKS
from sdeinfer.infer._settings import ADJUSTED_LIKELIHOOD

SMOOTHED = 50
"""Smallest number of draws for Pareto smoothing of the weights."""


class Predictions(NamedTuple):
    """Networks after the last layer against predictions of them.

    Attributes:
        p_values: Kolmogorov–Smirnov p-value of the LOO-PIT of each quantity; None for fewer than `FEWEST_NETWORKS`
            networks, and if every prediction explodes.
        distances: the table of `distance_from_theory`.
        exploded: whether every prediction explodes before the last layer.
    """

    p_values: pd.Series | None
    distances: pd.DataFrame
    exploded: bool


def predictions_of(post: xr.DataTree) -> Predictions | None:
    """Compare networks with predictions in all ways; None without predictions at the draws that are left."""
    if not {"posterior_predictive", "log_likelihood"} <= post.children.keys():
        return None
    if not all(map(len, _common_draws(post).values())):
        return None
    observed, predicted = _compared(post)
    exploded = not np.isfinite(predicted["largest log-eigenvalue"]).any()
    enough = post["observed_data"].sizes["network"] >= FEWEST_NETWORKS and not exploded
    p_values = _uniform(_transforms(post, observed, predicted)) if enough else None
    return Predictions(p_values, _distances(observed, predicted), exploded)


def last_layer(covariance: xr.DataArray) -> dict[str, np.ndarray]:
    """Mean correlation, smallest and largest log-eigenvalue of V after the last layer; +∞ if exploded.

    The smallest log-eigenvalue of a singular V, such as the sample covariance of fewer outputs than tokens, is −∞.
    """
    V = covariance.isel(layer=-1).transpose(..., "token_a", "token_b").values
    exploded = ~np.isfinite(V).all(axis=(-2, -1))
    V = np.where(exploded[..., None, None], np.eye(V.shape[-1]), V)
    values = np.linalg.eigvalsh(V)
    rounding = np.finfo(V.dtype).eps * V.shape[-1] * values[..., -1]
    values[..., 0] = np.where(values[..., 0] > rounding, values[..., 0], 0.0)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = {"largest log-eigenvalue": np.log(values[..., -1])}
        if V.shape[-1] > 1:
            norm = np.sqrt(np.diagonal(V, axis1=-2, axis2=-1))
            rows, columns = np.triu_indices(V.shape[-1], k=1)
            rho = V[..., rows, columns] / (norm[..., rows] * norm[..., columns])
            found |= {"smallest log-eigenvalue": np.log(values[..., 0]), "mean correlation": rho.mean(axis=-1)}
    return {name: np.where(exploded, np.inf, x) for name, x in found.items()}


def at_last_layer(post: xr.DataTree) -> xr.DataTree:
    """Replace the covariances of a posterior by the scalar quantities of `last_layer`, for ArviZ.

    `plot_ppc_pit`, `plot_loo_pit`, `loo_pit` and `loo_expectations` compare one number per network with its
    predictions, at the same draws in all groups.

    Arguments:
        post: the result of `fit`.

    Returns:
        The tree at the draws that have predictions. The groups observed_data, prior_predictive, posterior_predictive
        and log_likelihood have the variables `largest_log_eigenvalue`, `smallest_log_eigenvalue` and
        `mean_correlation`; in log_likelihood each is the log likelihood of the network.
    """
    require_groups(post, "observed_data", "prior_predictive", "posterior_predictive", "log_likelihood")
    thinned = post.sel(draw=post["posterior_predictive"]["draw"].values)
    groups: dict[str, xr.Dataset] = {name: group.to_dataset() for name, group in thinned.children.items()}
    for name in ("observed_data", "prior_predictive", "posterior_predictive"):
        covariance = groups[name]["covariance"]
        dims = [dim for dim in covariance.dims if dim not in ("layer", "token_a", "token_b")]
        coords = {dim: covariance.coords[dim] for dim in dims}
        found = {_identifier(label): (dims, values) for label, values in last_layer(covariance).items()}
        groups[name] = xr.Dataset(found, coords=coords)
    of_network = groups["log_likelihood"]["covariance"]
    groups["log_likelihood"] = xr.Dataset(dict.fromkeys(groups["observed_data"].data_vars, of_network))
    tree = xr.DataTree.from_dict(groups)
    tree.attrs = dict(post.attrs)
    return tree


def _identifier(label: str) -> str:
    return label.replace(" ", "_").replace("-", "_")


def left_out_transforms(post: xr.DataTree) -> pd.DataFrame:
    """LOO-PIT: the predictive probability, given all other networks, of a value below the observed one.

    The predictions of each network are weighted by Pareto-smoothed inverse likelihoods.

    Returns:
        One row per network, one column per quantity of `last_layer` that is finite in every network; uniform if the
        model holds.
    """
    return _transforms(post, *_compared(post))


def _transforms(post: xr.DataTree, observed: dict[str, np.ndarray], predicted: dict[str, np.ndarray]) -> pd.DataFrame:
    weights = _left_out_weights(post)
    # The observed network is ranked as one further draw among its predictions.
    count = weights.shape[0]
    transforms = {
        name: ((predicted[name] < x) * weights).sum(axis=0) * count / (count + 1) + 0.5 / (count + 1)
        for name, x in observed.items()
    }
    return pd.DataFrame(transforms, index=_covariance(post, "observed_data")["network"].values)


def _uniform(transforms: pd.DataFrame) -> pd.Series:
    """Kolmogorov–Smirnov p-value of each column."""
    return pd.Series({str(name): float(kstest(u, "uniform").pvalue) for name, u in transforms.items()})


def distance_from_theory(post: xr.DataTree) -> pd.DataFrame:
    """Wasserstein distances of networks from the SDE at posterior draws, in the SDE's standard deviations.

    Returns:
        One row per quantity of `last_layer` that is finite in every network, with columns `wasserstein`, +∞ if every
        prediction explodes, or all are equal and the networks are not; and `floor`, the mean distance between samples
        of one law.
    """
    return _distances(*_compared(post))


def _distances(observed: dict[str, np.ndarray], predicted: dict[str, np.ndarray]) -> pd.DataFrame:
    rows = {}
    for name, x in observed.items():
        y = predicted[name][np.isfinite(predicted[name])]
        sd = float(y.std()) if y.size else 0.0
        if sd > 0:
            floor = floor_of(np.sort(y), np.sqrt(1 / x.size + 1 / y.size))
            rows[name] = wasserstein_distance(x, y) / sd, floor / sd
        else:
            rows[name] = 0.0 if y.size and np.ptp([*x, y[0]]) == 0 else np.inf, 0.0
    return pd.DataFrame.from_dict(rows, orient="index", columns=["wasserstein", "floor"])


def floor_of(sorted_sample: np.ndarray, error: float) -> float:
    """Mean Wasserstein distance of two samples of one law, given by a large sample, with error = √(1/n + 1/n′)."""
    F = np.arange(1, sorted_sample.size) / sorted_sample.size
    return error * math.sqrt(2 / math.pi) * float(np.sum(np.diff(sorted_sample) * np.sqrt(F * (1 - F))))


def _common_draws(post: xr.DataTree) -> dict[str, np.ndarray]:
    """Labels of the draws with both predictions and a likelihood."""
    predicted, likelihood = (post[group].to_dataset() for group in ("posterior_predictive", "log_likelihood"))
    return {dim: np.intersect1d(predicted[dim], likelihood[dim]) for dim in ("chain", "draw")}


def _compared(post: xr.DataTree) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The quantities of the last layer, of observed networks and of predictions."""
    observed, predicted = (last_layer(_covariance(post, group)) for group in ("observed_data", "posterior_predictive"))
    kept = {name: x for name, x in observed.items() if not (np.isnan(x) | np.isneginf(x)).any()}
    return kept, predicted


def _left_out_weights(post: xr.DataTree) -> Float[np.ndarray, "draws networks"]:
    """Normalised leave-one-out weights at the draws that have predictions."""
    group = ADJUSTED_LIKELIHOOD if ADJUSTED_LIKELIHOOD in post.children else "log_likelihood"
    log_likelihood = post[group].to_dataset()["covariance"]
    weights = -log_likelihood.stack(sample=("chain", "draw")).transpose("sample", "network")
    # A likelihood of zero, such as the estimate by a bridge that explodes, has no inverse: it gets the least weight.
    finite = np.isfinite(weights.values)
    least = np.where(finite, weights.values, np.inf).min(axis=0)
    weights.values = np.where(finite, weights.values, np.where(np.isfinite(least), least, 0.0))
    # The log likelihood of networks without used transitions is constant; their weights are equal.
    varies = np.ptp(weights.values, axis=0) > 0
    if len(weights) >= SMOOTHED and varies.any():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Estimated shape parameter of Pareto", UserWarning)
            # The likelihood is constant below `Adjustment.least_tau0`; weights with a constant tail are not smoothed.
            with contextlib.suppress(ValueError):
                smoothed, _ = array_stats.psislw(-weights.values[:, varies].T)
                weights.values[:, varies] = smoothed.T
    at = weights.unstack("sample").sel(_common_draws(post))
    taken = at.stack(sample=("chain", "draw")).transpose("sample", "network").values
    normal = np.exp(taken - taken.max(axis=0))
    return normal / normal.sum(axis=0)


def _covariance(post: xr.DataTree, group: str) -> xr.DataArray:
    covariance = post[group].to_dataset()["covariance"]
    if "chain" in covariance.dims:
        covariance = covariance.sel(_common_draws(post)) if group == "posterior_predictive" else covariance
        covariance = covariance.stack(sample=("chain", "draw")).transpose("sample", "network", ...)
    return covariance
