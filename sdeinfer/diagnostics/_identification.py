"""Information in the data on each parameter, compared with its prior."""

import contextlib

import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats.psense import psense

from sdeinfer.diagnostics._fitted import fitted_data
from sdeinfer.diagnostics._innovations import inverse_of, laws_of, repetitions
from sdeinfer.diagnostics._summary import draws_of, fixed_of, identified_of, priors_of
from sdeinfer.infer import ADJUSTED_LIKELIHOOD, innovations
from sdeinfer.layers import ARCHITECTURES, Architecture, architecture_in
from sdeinfer.parameters import Parameter

PRECISION = 0.1
"""Target standard deviation (of logit γ, log τ0 or log gap) for the column `networks` of `identification`."""


def identification(
    post: xr.DataTree, data: xr.Dataset | None = None, architecture: Architecture | None = None
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
    data, names = fitted_data(post, data), identified_of(post)
    groups = {group: draws_of(post, group) for group in ("prior", "posterior")}
    kind = architecture or _named(post)
    known = {} if kind is None else kind.coordinates.sampled
    sd = {
        group: [_real(draws[name].values, known.get(name)).std() for name in names] for group, draws in groups.items()
    }
    table = pd.DataFrame(sd, index=pd.Index(names, name="parameter"))
    table["contraction"] = 1 - (table["posterior"] / table["prior"]) ** 2
    if post.attrs.get("model") != "full_path" or kind is None or not names:
        return table
    ((path, law),) = laws_of(post, data, kind)
    information = np.sum([here.information for here in innovations(path, law)], axis=0)
    information = repetitions(post, len(path)) * information
    free = [name for name in known if name not in fixed_of(post)]
    taken, places = [list(known).index(name) for name in free], [free.index(name) for name in names]
    information = information[np.ix_(taken, taken)]
    # The identified coordinates have a flat prior for `information`, all others and those of `expected` their own.
    prior = np.array([priors_of(post, known)[name][1] for name in free]) ** -2
    flat = prior.copy()
    flat[places] = 1e-9
    table["information"] = np.sqrt(np.diag(inverse_of(information + np.diag(flat))))[places]
    together = np.diag(inverse_of(information + np.diag(prior)))[places]
    table["expected"] = 1 - together / table["prior"] ** 2
    table["networks"] = (table["information"] / PRECISION) ** 2
    if ADJUSTED_LIKELIHOOD in post.children:
        # The sensitivity is that of the posterior, whose likelihood is the adjusted one.
        post = post.assign({"log_likelihood": post[ADJUSTED_LIKELIHOOD]})
    whole = post["observed_data"].sizes["network"] == post.attrs.get("networks", post["observed_data"].sizes["network"])
    for scaled in ("prior", "likelihood") if whole else ("prior",):
        table[f"to_{scaled}"] = 0.0  # power-scaling a flat prior has no effect
        if _varies(post, scaled):
            table[f"to_{scaled}"] = np.nan
            with contextlib.suppress(ValueError):  # weights with a constant tail have no Pareto k
                moved = psense(post, var_names=names, group=scaled)
                table[f"to_{scaled}"] = [float(moved[name]) for name in names]
    return table


def has_prior(post: xr.DataTree) -> bool:
    """Whether a posterior has draws of its prior; a selection of chains may leave none."""
    return "prior" in post.children and bool(post["prior"].sizes["chain"] * post["prior"].sizes["draw"])


def _varies(post: xr.DataTree, scaled: str) -> bool:
    """Whether the log density of the priors, or of the data, differs between draws."""
    densities = post[f"log_{scaled}"].to_dataset()
    return any(float(np.ptp(density.values)) > 0 for density in densities.data_vars.values())


def _named(post: xr.DataTree) -> Architecture | None:
    return architecture_in(post.attrs) if post.attrs.get("architecture") in ARCHITECTURES else None


def _real(values: np.ndarray, parameter: Parameter | None) -> np.ndarray:
    """Draws in the coordinate on the real line; unchanged for a site of a custom program."""
    return values if parameter is None else parameter.to_real(values)
