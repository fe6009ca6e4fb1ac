"""Distance between posteriors."""

import math
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from arviz_stats.base.array import array_stats
from scipy.stats import wasserstein_distance

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer.diagnostics._predictive import floor_of
from sdeinfer.diagnostics._summary import draws_of, parameters_of


@checked
def distance(post: xr.DataTree, reference: xr.DataTree) -> pd.DataFrame:
    """Compare the marginals of a posterior with those of a reference.

    The floor is the Monte Carlo error of the Wasserstein distance: the mean distance between two samples of one law F
    with n and n' effective draws,

        √(1/n + 1/n') √(2/π) ∫ √(F (1 − F)) dx.

    Arguments:
        post: the posterior, as `approximate` or `fit` returns it.
        reference: the result of `fit`.

    Returns:
        One row per public parameter, with columns `mean`, the difference of the means in sds of the reference; `sd`,
        the ratio of the sds; `wasserstein`, the Wasserstein-1 distance in sds of the reference; and its `floor`.

    Raises:
        InputError: if the posteriors have different parameters.

    Source:
        The floor: del Barrio, Giné & Matrán (1999), "Central limit theorems for the Wasserstein distance between the
        empirical and the true distributions".
    """
    names = parameters_of(reference)
    if parameters_of(post) != names:
        raise InputError(f"post: has {', '.join(parameters_of(post))}; the reference has {', '.join(names)}")
    rows = {name: _of_marginals(*(_chains(tree, name) for tree in (post, reference))) for name in names}
    return pd.DataFrame.from_dict(rows, orient="index", columns=["mean", "sd", "wasserstein", "floor"])


def _chains(tree: xr.DataTree, name: str) -> np.ndarray:
    return draws_of(tree)[name].transpose("chain", "draw").values


def _effective(chains: np.ndarray) -> float:
    """Effective sample size."""
    draws: Any = array_stats.ess(chains)
    return float(draws)


def _of_marginals(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float, float]:
    error = math.sqrt(1 / _effective(x) + 1 / _effective(y))
    sd = y.std(ddof=1)
    u = np.sort(y, axis=None)
    return (
        float((x.mean() - y.mean()) / sd),
        float(x.std(ddof=1) / sd),
        float(wasserstein_distance(x.ravel(), y.ravel()) / sd),
        floor_of(u, error) / float(sd),
    )
