"""Consequences of misfits: how far each moves the parameters.

If the innovations' means are shifted by ε a and their relative variances by ε c, the score is shifted by ε A, with A =
Σ (a μ′/σ + c (log σ²)′/2), and the posterior's mode by ε G⁻¹ A, with the curvature G of the log posterior. The size ε
of a misfit in a direction of `innovation_tests` is estimated by one step of the score, together with the parameters.
The sizes of what a law omits are known: the next order of the softmax up to a factor of about 1, and the finite width.
"""

import numpy as np
import pandas as pd
import xarray as xr

from sdeinfer.diagnostics._innovations import OMISSIONS, Sums, inverse_of, sums_of
from sdeinfer.diagnostics._posterior import Posterior
from sdeinfer.layers import AbstractLayer
from sdeinfer.likelihood._program import PATH

SCATTER = "scatter of networks"
"""Name of the row of ratios of standard deviations."""


def consequences(
    post: xr.DataTree, data: xr.Dataset | None = None, architecture: AbstractLayer | None = None
) -> pd.DataFrame:
    """Moves of the parameters by each way in which the layers may leave the law, in posterior standard deviations.

    The moves are in the coordinates on the real line, such as logit γ and log τ0, at the posterior mean. If networks
    have different layers, a move is that of all of them together.

    Arguments:
        post: the result of `fit` to networks observed at every layer.
        data: the data that were fitted, to be compared with those in the posterior, as in `check`.
        architecture: the kind of layer, where the posterior's attributes do not name one that is known.

    Returns:
        One row per direction of `innovation_tests`, with its columns `effect`, `z` and `p`, and the move of each
        identified parameter in a column of its name. Then a row for each part that the law omits, without `z` and `p`;
        and the row "scatter of networks", whose columns are the ratios of the standard deviations by the scatter of
        the networks' scores to those of the posterior: above 1 where layers of a network are not independent.
    """
    posterior = Posterior.of(post, data, architecture)
    return consequences_of(sums_of(posterior), posterior)


def consequences_of(sums: Sums, posterior: Posterior) -> pd.DataFrame:
    """The table of `consequences`."""
    table, fixed = sums.tests, posterior.fixed
    known = posterior.known_kind.coordinates.sampled
    names = [name for name, parameter in known.items() if parameter.identified and name not in fixed]
    if not names:
        return table
    free = np.array([name not in fixed for name in known])
    prior = np.diag(_precision_besides(sums.information, posterior))
    block = np.ix_(free, free)

    def covariance(information: np.ndarray) -> np.ndarray:
        """The inverse of the curvature of the log posterior, among the free parameters."""
        inverse = np.zeros_like(information)
        inverse[block] = inverse_of((information + prior)[block])
        return inverse

    inverse = covariance(sums.information)
    by_scores, by_networks = (
        np.sqrt(np.maximum(np.diagonal(inverse @ scatter @ inverse), 0.0))
        for scatter in (sums.scatter, sums.of_networks)
    )
    sd = np.array([posterior.sds[name] for name in known])
    sd = np.where(np.isnan(sd), by_scores, sd)
    sd = np.where(free & (sd > 0), sd, np.inf)
    kept = (sums.squares > 0) & (sums.sizes > 0)
    size = sums.corrected[kept] / sums.sizes[kept]
    # The mode of a law with the omitted part lies where that law's curvature says: its parameters correlate otherwise.
    omitted = [by @ covariance(information) for by, information in zip(sums.omitted, sums.completed, strict=True)]
    moves = [*(size[:, None] * (sums.along[kept] @ inverse)), *omitted, by_networks]
    rows = pd.DataFrame(np.array(moves) / sd, index=[*table.index, *OMISSIONS, SCATTER], columns=list(known))
    present = [*table.index, *(name for name, by in zip(OMISSIONS, sums.omitted, strict=True) if by.any()), SCATTER]
    return table.reindex(present).join(rows.loc[present, names]).rename_axis("direction")


def _precision_besides(information: np.ndarray, posterior: Posterior) -> np.ndarray:
    """Precision of each coordinate without the networks: that of the prior, or more if a program observes more."""
    known = posterior.known_kind.coordinates.sampled
    spread = np.array([posterior.priors[name][1] for name in known])
    prior = np.where(spread > 0, spread, 1.0) ** -2  # that of a fixed coordinate is not used
    groups = posterior.tree.children
    if not {*(groups["log_likelihood"].data_vars if "log_likelihood" in groups else ())} - {PATH}:
        return prior
    alone = 1 / np.maximum(np.diagonal(inverse_of(information + np.diag(prior))), np.finfo(float).tiny)
    sd = np.array([posterior.sds[name] for name in known])
    return prior + np.maximum(np.nan_to_num(1 / np.where(sd > 0, sd, np.inf) ** 2 - alone), 0.0)
