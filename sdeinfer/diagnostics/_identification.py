"""Information in the data on each parameter, compared with its prior."""

import contextlib
from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats.psense import psense

from sdeinfer.diagnostics._residuals import Residuals
from sdeinfer.diagnostics._summary import draws_of, has_prior, identified_of
from sdeinfer.diagnostics._thresholds import CONTRACTION, FLAT_PRECISION, LARGEST_REMEDY, TARGET_SD
from sdeinfer.diagnostics._verdict import Verdict, at_least
from sdeinfer.infer._settings import ADJUSTED_LIKELIHOOD
from sdeinfer.layers import AbstractLayer


def identification(
    post: xr.DataTree, data: xr.Dataset | None = None, architecture: AbstractLayer | None = None
) -> pd.DataFrame:
    """Compare the information in the data on the identified parameters with that in their priors.

    Standard deviations are in the coordinates logit γ, log τ0 and log(c₊ − c₋), in which priors and posteriors are
    nearly normal.

    Arguments:
        post: the result of `fit`.
        data: the data that were fitted, to be compared with those in the posterior, as in `check`.
        architecture: the kind of layer, where the posterior's attributes do not name one that is known.

    Returns:
        One row per parameter, with columns `prior` and `posterior`, the standard deviations; and `contraction`, one
        minus the ratio of the variances: 0 for uninformative data, 1 for a negligible prior. If every layer was
        observed, also `information`, the standard deviation from the data alone, by the Fisher information of the
        closed-form likelihood at the posterior mean; `expected`, the contraction by this information and the priors,
        which is smaller than `contraction` if the data only exclude a part of the prior; `networks`, the factor in the
        number of networks that reduces the standard deviation to 0.1; and, by power-scaling (ArviZ), the sensitivity of
        the posterior to the prior, `to_prior`, and to the likelihood, `to_likelihood`; the latter only if the posterior
        holds the likelihoods of all networks, not of some as of data in chunks.
    """
    residuals = Residuals.of(post, data, architecture)
    table = identification_of(residuals)
    return table.assign(**_sensitivities(residuals)) if "networks" in table else table


def identification_of(residuals: Residuals) -> pd.DataFrame:
    """The table of `identification`."""
    names, coordinates = identified_of(residuals.tree), {} if residuals.kind is None else residuals.coordinates
    # A site of a custom program has no other coordinate.
    real = {name: coordinates[name].to_real if name in coordinates else np.asarray for name in names}
    draws = {group: draws_of(residuals.tree, group) for group in ("prior", "posterior")}
    sd = {group: [real[name](dataset[name].values).std() for name in names] for group, dataset in draws.items()}
    table = pd.DataFrame(sd, index=pd.Index(names, name="parameter"))
    table["contraction"] = 1 - (table["posterior"] / table["prior"]) ** 2
    if residuals.kind is None or not residuals.one_layer or not names:
        return table
    information, places = residuals.sums.information, [list(coordinates).index(name) for name in names]
    # The identified coordinates have a flat prior for `information`, all others and those of `expected` their own.
    flat = residuals.precision.copy()
    flat[places] = FLAT_PRECISION
    table["information"] = np.sqrt(np.diag(residuals.covariance(information, flat)))[places]
    with_priors = np.diag(residuals.covariance(information, residuals.precision))[places]
    table["expected"] = 1 - with_priors / table["prior"] ** 2
    table["networks"] = (table["information"] / TARGET_SD) ** 2
    return table


def contractions_of(residuals: Residuals) -> dict[str, Verdict]:
    """Whether the data identify each parameter; not known without draws of the prior."""
    if not has_prior(residuals.tree):
        return {}
    table, verdicts = identification_of(residuals), {}
    for name in table.index:
        remedy = ""
        if "networks" in table:
            times = float(table.loc[name, "networks"])
            two_digits = f"{float(f'{times:.2g}'):,g}"  # without an exponent
            remedy = (
                f"10 % precision takes about {two_digits} times as many" if times < LARGEST_REMEDY else "nor would more"
            )
            remedy = f"; {remedy} networks like these, or other tokens"
        contraction = table.loc[name, ["contraction", "expected"] if "expected" in table else ["contraction"]].min()
        verdicts[name] = _verdict(name, contraction, remedy)
    return verdicts


def contractions_by_draws(post: xr.DataTree, names: Sequence[str]) -> dict[str, Verdict]:
    """Whether the posteriors of parameters are narrower than their priors, by draws of both.

    The contraction is one minus the ratio of the posterior's variance to the prior's, of positive parameters in
    logarithms.
    """
    verdicts = {}
    for name in names:
        draws = [draws_of(post, group)[name].values for group in ("posterior", "prior")]
        posterior, prior = map(np.log, draws) if all((x > 0).all() for x in draws) else draws
        verdicts[name] = _verdict(name, 1 - posterior.var() / prior.var())
    return verdicts


def _verdict(name: str, contraction: float, remedy: str = "") -> Verdict:
    advice = f"the data hardly identify {name}{remedy}"
    return at_least("identified", f"{name} contraction", contraction, CONTRACTION, advice)


def _sensitivities(residuals: Residuals) -> dict[str, float | list[float]]:
    """Sensitivity of the posterior to the prior and to the likelihood by power-scaling, NaN where it has none."""
    tree, names, sensitivities = residuals.tree, identified_of(residuals.tree), {}
    if ADJUSTED_LIKELIHOOD in tree.children:
        # The sensitivity is that of the posterior, whose likelihood is the adjusted one.
        tree = tree.assign({"log_likelihood": tree[ADJUSTED_LIKELIHOOD]})
    networks = residuals.data.sizes["network"]
    whole = int(tree.attrs.get("networks", networks)) == networks
    for scaled in ("prior", "likelihood") if whole else ("prior",):
        if f"log_{scaled}" not in tree.children:
            continue
        sensitivities[f"to_{scaled}"] = 0.0  # power-scaling a flat prior has no effect
        densities = tree[f"log_{scaled}"].to_dataset().data_vars.values()
        if any(float(np.ptp(density.values)) > 0 for density in densities):
            sensitivities[f"to_{scaled}"] = np.nan
            with contextlib.suppress(ValueError):  # weights with a constant tail have no Pareto k
                moved = psense(tree, var_names=names, group=scaled)
                sensitivities[f"to_{scaled}"] = [float(moved[name]) for name in names]
    return sensitivities
