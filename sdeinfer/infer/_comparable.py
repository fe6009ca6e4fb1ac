"""Leave-one-network-out densities of fits that may be compared. Tests: `tests/infer/test_comparable.py`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer.likelihood._program import PATH
from sdeinfer.likelihood._transitions import used_of


@checked
def comparable(posteriors: Mapping[str, xr.DataTree]) -> dict[str, Any]:
    """Log densities of networks that are left out of each fit (PSIS-LOO), for `az.compare`.

    A fit selects the transitions in the range of its law. The densities of two fits are of the same data only if both
    used the same transitions of the same networks. Draws are weighed by the likelihood that was sampled, and densities
    of the data are averaged.

    Arguments:
        posteriors: results of `fit` by name.

    Returns:
        By the same names the result of `az.loo(…, pointwise=True)`.

    Raises:
        InputError: for fits of other networks or transitions, and for those without log likelihoods.
    """
    from arviz_stats import loo  # pyright: ignore[reportPrivateImportUsage]

    results, first, fitted = {}, "", None
    for name, post in posteriors.items():
        for group in ("log_likelihood", "observed_data", "constant_data"):
            if group not in post.children:
                raise InputError(f"posteriors: {name} has no group {group}")
        data = xr.merge([post[group].to_dataset() for group in ("observed_data", "constant_data")])
        if fitted is None:
            first, fitted = name, data
        _require_same(fitted, data, first, name)
        weights = {}
        if "adjusted_log_likelihood" in post.children:
            sampled = post["adjusted_log_likelihood"][PATH]
            weights = dict(zip(("log_weights", "pareto_k"), sampled.azstats.psislw(dim=["chain", "draw"]), strict=True))
        results[name] = loo(post, pointwise=True, var_name=PATH, **weights)
    return results


def _require_same(reference: xr.Dataset, candidate: xr.Dataset, first: str, name: str) -> None:
    """Raise an InputError where two fits are not of the same transitions of the same networks."""
    V, W = (data["covariance"].values for data in (reference, candidate))
    if V.shape != W.shape or not np.array_equal(V, W):
        raise InputError(f"posteriors: {name} is a fit of other networks than {first}")
    used, theirs = used_of(reference), used_of(candidate)
    if (unlike := np.count_nonzero(used != theirs)) > 0:
        raise InputError(
            f"posteriors: {name} used {np.count_nonzero(theirs)} transitions and {first} {np.count_nonzero(used)}, "
            f"{unlike} of them in one fit alone: fit data.assign(used={first}['constant_data']['used']) with "
            "largest_logit=np.inf"
        )
