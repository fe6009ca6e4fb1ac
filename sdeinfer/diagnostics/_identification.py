"""What the data say of each parameter, next to what its prior says."""

import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats.psense import psense

from sdeinfer.diagnostics._innovations import laws_of
from sdeinfer.diagnostics._summary import IDENTIFIED
from sdeinfer.infer import innovations

PRECISION = 0.1
"""The relative standard deviation to which a parameter should be known, for the number of networks that it takes."""

SLOPES_KNOWN = 0.5
"""What the prior knows of (c₊ + c₋)/2, the last coordinate: networks of one width know one number of the two slopes."""


def identification(post: xr.DataTree, data: xr.Dataset) -> pd.DataFrame:
    """Compare what the data say of the identified parameters with what their priors say.

    All in the coordinates logit γ, log τ0 and log(c₊ − c₋), in which priors and posteriors are near to normal.

    Arguments:
        post: the result of `fit`.
        data: the data that were fitted.

    Returns:
        One row a parameter, with columns `prior` and `posterior`, their standard deviations; `contraction`, one less
        the ratio of their squares: 0 where the data say nothing, 1 where the prior does. Where every layer was observed
        also `information`, the standard deviation that the data alone allow by the Fisher information of the
        closed-form likelihood at the posterior's mean; `expected`, the contraction that it and the priors allow, below
        the one seen where the data only exclude a part of the prior; `networks`, how many times as many networks would
        make that standard deviation 0.1; and by power-scaling (ArviZ) how far the posterior moves with the prior,
        `to_prior`, and with the likelihood, `to_likelihood`.
    """
    names = [name for name in IDENTIFIED if name in post["posterior"].data_vars]
    groups = {group: post[group].to_dataset() for group in ("prior", "posterior")}
    sd = {group: [_coordinate(name, draws).std() for name in names] for group, draws in groups.items()}
    table = pd.DataFrame(sd, index=pd.Index(names, name="parameter"))
    table["contraction"] = 1 - (table["posterior"] / table["prior"]) ** 2
    if post.attrs.get("model") != "full_path":
        return table
    ((path, law),) = laws_of(post, data)
    information = np.sum([here.information for here in innovations(path, law)], axis=0)
    known = np.full(len(information), 1e-9)
    known[len(names) :] = SLOPES_KNOWN
    alone = np.sqrt(np.diag(np.linalg.inv(information + np.diag(known))))
    table["information"] = alone[: len(names)]
    priors = [*table["prior"] ** -2, *(SLOPES_KNOWN for _ in information[len(names) :])]
    together = np.diag(np.linalg.inv(information + np.diag(priors)))
    table["expected"] = 1 - together[: len(names)] / table["prior"] ** 2
    table["networks"] = (table["information"] / PRECISION) ** 2
    for scaled in ("prior", "likelihood"):
        moved = psense(post, var_names=names, group=scaled)
        table[f"to_{scaled}"] = [float(moved[name]) for name in names]
    return table


def _coordinate(name: str, draws: xr.Dataset) -> np.ndarray:
    x = draws[name].values
    return np.log(x / (1 - x)) if name == "gamma" else np.log(x)
