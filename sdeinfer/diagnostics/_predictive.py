"""Comparison of networks with their predictions: leave-one-out, and all together."""

import contextlib
import math
import warnings
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats.base.array import array_stats
from jaxtyping import Float
from scipy.stats import kstest, ttest_ind, wasserstein_distance

from sdeinfer.diagnostics._residuals import Residuals
from sdeinfer.diagnostics._summary import require_groups
from sdeinfer.diagnostics._thresholds import FEWEST_NETWORKS, FEWEST_SMOOTHED, FLOORS, LEVEL, NO_DRAW_LEVEL
from sdeinfer.diagnostics._verdict import Check, at_least, at_most
from sdeinfer.infer._predictive import last_layer, law_of_predictions
from sdeinfer.infer._settings import ADJUSTED_LIKELIHOOD

DISTANCE = "distance from predictions, floors"


def check_last_layer(residuals: Residuals) -> Check:
    """Whether networks agree with predictions; where every layer was observed, notes if they do not."""
    post, reason = residuals.tree, _why_unpredicted(residuals.tree)
    if reason:
        return Check(skipped=(f"networks left out and distance from predictions: {reason}",))
    predicted = of_predictions(post)
    if not residuals.every_layer:
        return predicted
    failed = [verdict for verdict in predicted.verdicts if not verdict.passed]
    notes = tuple(f"{verdict.name} {verdict.value:.2g}: {verdict.advice}" for verdict in failed)
    return Check(of_draws(post).verdicts, notes=notes)


def of_predictions(post: xr.DataTree) -> Check:
    """Verdicts on networks after the last layer."""
    _, predicted = _compared(post)
    if not np.isfinite(predicted["largest log-eigenvalue"]).any():
        advice = "every prediction explodes before the last layer, as no network does: see the priors, and the range"
        return Check((at_most("agrees with the theory", DISTANCE, np.inf, FLOORS, advice),))
    replicates = "paths of the SDE" if law_of_predictions(post) == "limit" else "networks of the fit"
    verdicts = []
    if post["observed_data"].sizes["network"] >= FEWEST_NETWORKS:
        transforms = left_out_transforms(post).items()
        p_values = pd.Series({column: float(kstest(u, "uniform").pvalue) for column, u in transforms}).dropna()
        if len(p_values):  # none is known where no draw has finite predictions for every network
            name, p = p_values.idxmin(), min(1.0, p_values.min() * len(p_values))
            advice = f"{name} after the last layer varies between networks otherwise than {replicates} predict"
            verdicts.append(at_least("calibrated", "networks left out, p", p, LEVEL, advice))
    distances = distance_from_theory(post)
    ratio = (distances["wasserstein"] / distances["floor"]).fillna(0.0)  # 0/0 where all are equal
    far = distances.loc[ratio.idxmax()]
    advice = (
        f"{ratio.idxmax()} after the last layer is {far['wasserstein']:.2g} sds from {replicates}, where samples of "
        f"one law would be {far['floor']:.2g}: another architecture, or networks too narrow for the limit"
    )
    return Check((*verdicts, at_most("agrees with the theory", DISTANCE, ratio.max(), FLOORS, advice)))


def of_draws(post: xr.DataTree) -> Check:
    """A failed verdict if no draw of the posterior predicts the networks; none if one does.

    Networks of the fitted law at one draw have exactly the law of the observed ones if that draw is the truth, in and
    out of the range of the likelihood. The best of all draws counts: a wide posterior is no reason to fail.
    """
    if law_of_predictions(post) == "limit":
        return Check()
    observed, replicated = _compared(post)
    p_values = {}
    for name, values in observed.items():
        if len(values) >= FEWEST_NETWORKS and np.isfinite(values).all():
            draws = np.where(np.isfinite(replicated[name]), replicated[name], np.nan)
            welch: Any = ttest_ind(values[None], draws, axis=1, equal_var=False)
            # Nothing is known of draws with replicates that explode.
            p_values[name] = np.nan_to_num(welch.pvalue, nan=1.0)
    p = float(len(p_values) * np.min([*p_values.values()], axis=0).max()) if p_values else 1.0
    if p >= NO_DRAW_LEVEL:
        return Check()
    name = min(p_values, key=lambda name: p_values[name].max())
    advice = (
        f"no draw of the posterior predicts the mean of the {name} after the last layer, of networks that start as "
        "these do: they are not these layers, perhaps where the law is out of range and they were left out"
    )
    return Check((at_least("agrees with the theory", "networks predicted by a draw, p", p, NO_DRAW_LEVEL, advice),))


def at_last_layer(post: xr.DataTree) -> xr.DataTree:
    """A posterior without covariances, at the draws that have predictions, for `plot_loo_pit` and the like.

    `plot_loo_pit`, `loo_pit` and `loo_expectations` need the predictions and the log likelihood of each number of a
    network at the same draws. `plot_ppc_pit`, `plot_ppc_dist` and `plot_ppc_tstat` take the posterior as it is.

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
        groups[name] = groups[name].drop_vars("covariance").drop_dims(["layer", "token_a", "token_b"], errors="ignore")
    of_network = groups["log_likelihood"]["covariance"]
    groups["log_likelihood"] = xr.Dataset(dict.fromkeys(groups["observed_data"].data_vars, of_network))
    tree = xr.DataTree.from_dict(groups)
    tree.attrs = dict(post.attrs)
    return tree


def left_out_transforms(post: xr.DataTree) -> pd.DataFrame:
    """LOO-PIT: the predictive probability, given all other networks, of a value below the observed one.

    The predictions of each network are weighted by Pareto-smoothed inverse likelihoods.

    Returns:
        One row per network, one column per quantity of `last_layer` that is finite in every network; uniform if the
        model holds.
    """
    weights, (observed, predicted) = _left_out_weights(post), _compared(post)
    # The observed network is ranked as one further draw among its predictions.
    count = weights.shape[0]
    transforms = {
        name: ((predicted[name] < x) * weights).sum(axis=0) * count / (count + 1) + 0.5 / (count + 1)
        for name, x in observed.items()
    }
    return pd.DataFrame(transforms, index=_covariance(post, "observed_data")["network"].values)


def distance_from_theory(post: xr.DataTree) -> pd.DataFrame:
    """Wasserstein distances of networks from predictions at posterior draws, in the predictions' standard deviations.

    Returns:
        One row per quantity of `last_layer` that is finite in every network, with columns `wasserstein`, +∞ if every
        prediction explodes, or all are equal and the networks are not; and `floor`, the mean distance between samples
        of one law.
    """
    rows, (observed, predicted) = {}, _compared(post)
    for name, x in observed.items():
        y = predicted[name][np.isfinite(predicted[name])]
        sd = float(y.std()) if y.size else 0.0
        if sd > 0:
            # The mean distance of samples of one law is √(1/n + 1/n′) √(2/π) ∫ √(F (1 − F)) dx.
            F = np.arange(1, y.size) / y.size
            integral = np.sum(np.diff(np.sort(y)) * np.sqrt(F * (1 - F)))
            floor = np.sqrt(1 / x.size + 1 / y.size) * math.sqrt(2 / math.pi) * float(integral)
            rows[name] = wasserstein_distance(x, y) / sd, floor / sd
        else:
            rows[name] = 0.0 if y.size and np.ptp([*x, y[0]]) == 0 else np.inf, 0.0
    return pd.DataFrame.from_dict(rows, orient="index", columns=["wasserstein", "floor"])


def _why_unpredicted(post: xr.DataTree) -> str:
    """Why there are no predictions at draws that have a likelihood; empty if there are."""
    if "posterior_predictive" not in post.children:
        return "there are no predictions"
    if "log_likelihood" not in post.children:
        return "there are no log likelihoods"
    common = all(map(len, _common_draws(post).values()))
    return "" if common else "no draw that is left has predictions; select by sel"


def _common_draws(post: xr.DataTree) -> dict[str, np.ndarray]:
    """Labels of the draws with both predictions and a likelihood."""
    predicted, likelihood = (post[group].to_dataset() for group in ("posterior_predictive", "log_likelihood"))
    return {dim: np.intersect1d(predicted[dim], likelihood[dim]) for dim in ("chain", "draw")}


def _compared(post: xr.DataTree) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The quantities of the last layer, of observed networks and of predictions."""
    observed, predicted = (last_layer(_covariance(post, group)) for group in ("observed_data", "posterior_predictive"))
    quantities = {name: x for name, x in observed.items() if not (np.isnan(x) | np.isneginf(x)).any()}
    return quantities, predicted


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
    if len(weights) >= FEWEST_SMOOTHED and varies.any():
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Estimated shape parameter of Pareto", UserWarning)
            # The likelihood is constant below `Adjustment.least_tau0`; weights with a constant tail are not smoothed.
            with contextlib.suppress(ValueError):
                smoothed, _ = array_stats.psislw(-weights.values[:, varies].T)
                weights.values[:, varies] = smoothed.T
    selection = weights.unstack("sample").sel(_common_draws(post))
    taken = selection.stack(sample=("chain", "draw")).transpose("sample", "network").values
    normal = np.exp(taken - taken.max(axis=0))
    return normal / normal.sum(axis=0)


def _covariance(post: xr.DataTree, group: str) -> xr.DataArray:
    covariance = post[group].to_dataset()["covariance"]
    if "chain" in covariance.dims:
        covariance = covariance.sel(_common_draws(post)) if group == "posterior_predictive" else covariance
        covariance = covariance.stack(sample=("chain", "draw")).transpose("sample", "network", ...)
    return covariance
