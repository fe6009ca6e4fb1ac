"""What the data say of each parameter, next to what its prior says."""

import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats.psense import psense

from sdeinfer.diagnostics._innovations import laws_of
from sdeinfer.diagnostics._summary import fixed_of, identified_of
from sdeinfer.infer import innovations
from sdeinfer.layers import ARCHITECTURES, AbstractArchitecture, architecture_in
from sdeinfer.parameters import Parameter

PRECISION = 0.1
"""The relative standard deviation to which a parameter should be known, for the number of networks that it takes."""

SLOPES_KNOWN = 0.5
"""What the prior knows of (c₊ + c₋)/2, the last coordinate: networks of one width know one number of the two slopes."""


def identification(
    post: xr.DataTree, data: xr.Dataset, architecture: AbstractArchitecture | None = None
) -> pd.DataFrame:
    """Compare what the data say of the identified parameters with what their priors say.

    All in the coordinates logit γ, log τ0 and log(c₊ − c₋), in which priors and posteriors are near to normal.

    Arguments:
        post: the result of `fit`.
        data: the data that were fitted.
        architecture: the kind of layer, where the posterior's attributes do not name one that is known.

    Returns:
        One row a parameter, with columns `prior` and `posterior`, their standard deviations; `contraction`, one less
        the ratio of their squares: 0 where the data say nothing, 1 where the prior does. Where every layer was observed
        also `information`, the standard deviation that the data alone allow by the Fisher information of the
        closed-form likelihood at the posterior's mean; `expected`, the contraction that it and the priors allow, below
        the one seen where the data only exclude a part of the prior; `networks`, how many times as many networks would
        make that standard deviation 0.1; and by power-scaling (ArviZ) how far the posterior moves with the prior,
        `to_prior`, and with the likelihood, `to_likelihood`.
    """
    names = identified_of(post)
    groups = {group: post[group].to_dataset() for group in ("prior", "posterior")}
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
    free = [name for name in known if name not in fixed_of(post)]
    taken, places = [list(known).index(name) for name in free], [free.index(name) for name in names]
    information = information[np.ix_(taken, taken)]
    # What stands for the prior of coordinates that are not judged, such as the mean of the slopes; of the others there
    # is none, or their own.
    flat, prior = np.full(len(free), SLOPES_KNOWN), np.full(len(free), SLOPES_KNOWN)
    flat[places], prior[places] = 1e-9, table["prior"] ** -2
    table["information"] = np.sqrt(np.diag(np.linalg.inv(information + np.diag(flat))))[places]
    together = np.diag(np.linalg.inv(information + np.diag(prior)))[places]
    table["expected"] = 1 - together / table["prior"] ** 2
    table["networks"] = (table["information"] / PRECISION) ** 2
    for scaled in ("prior", "likelihood"):
        if _varies(post, scaled):
            moved = psense(post, var_names=names, group=scaled)
            table[f"to_{scaled}"] = [float(moved[name]) for name in names]
        else:  # a flat prior does not move with its power
            table[f"to_{scaled}"] = 0.0
    return table


def _varies(post: xr.DataTree, scaled: str) -> bool:
    """Whether the log density of the priors, or of the data, differs between draws."""
    densities = post[f"log_{scaled}"].to_dataset()
    return any(float(np.ptp(density.values)) > 0 for density in densities.data_vars.values())


def _named(post: xr.DataTree) -> AbstractArchitecture | None:
    return architecture_in(post.attrs) if post.attrs.get("architecture") in ARCHITECTURES else None


def _real(values: np.ndarray, parameter: Parameter | None) -> np.ndarray:
    """Draws in the coordinate on the real line; of a site of a user's program, as they are."""
    return values if parameter is None else parameter.to_real(values)
