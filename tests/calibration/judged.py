"""A fit and its verdict, without the truth; and how far the truth is, which says whether the verdict is right.

A *miss* is a fit that is trusted although an identified parameter is more than `FAR` posterior sds from the truth. A
*false alarm* is one that is not trusted although all are within `NEAR`.
"""

import warnings
from typing import Any

import numpy as np
import xarray as xr
from scipy import stats

import sdeinfer as si
from sdeinfer.layers import AbstractLayer

FAR, NEAR = 4.0, 2.0


def fit_and_check(data: xr.Dataset, architecture: AbstractLayer, truth: dict[str, float], **options: Any) -> dict:
    """What `check` says of a fit by `full_path`; or why the data are refused, anything else than which is a defect.

    Arguments:
        data: networks, without their truth.
        architecture: what is fitted.
        truth: parameters by their names; those that are not the architecture's are ignored.
        options: of `fit`, the key among them.
    """
    try:
        post = si.fit(si.models.full_path, data, architecture=architecture, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ArviZ's, of diagnostics that few draws do not allow
            found = si.check(post)
    except si.InputError as error:
        return {"refused": str(error)}
    z = {}
    for name, parameter in architecture.coordinates.sampled.items():
        if name in truth and parameter.identified:  # on the line, where draws are near normal
            draws, true = (np.asarray(parameter.to_real(np.asarray(x))) for x in (post["posterior"][name], truth[name]))
            z[name] = distance(float(true), draws.ravel())
    return {
        "trusted": found.passed,
        "cause": "" if found.cause is None else found.cause.name,
        "failed": [each.name for each in found.verdicts if not each.passed and each.topic != "identified"],
        "conditional": found.conditional,
        "assumed": list(found.assumed),
        "unidentified": found.unidentified,
        "verdict": found.verdict,
        "z": z,
        "in_range": "out_of_range" not in post.attrs and post.attrs["left_out"] < 0.99,
    }


def furthest(found: dict) -> float:
    """The largest deviation of an identified parameter."""
    if found["conditional"]:
        return 0.0
    return max((abs(z) for name, z in found["z"].items() if name not in found["unidentified"]), default=0.0)


def distance(truth: float, draws: np.ndarray) -> float:
    """How far a truth is, in sds of a normal law: by its quantile among the draws where ten of them are beyond it.

    The posterior of a gap near 0 has a long tail on the line, of which sds say too much.
    """
    below = int((draws < truth).sum())
    if min(below, len(draws) - below) >= 10:
        return float(stats.norm.ppf(below / len(draws)))
    return float((truth - draws.mean()) / draws.std())


def is_miss(found: dict) -> bool:
    return found["trusted"] and furthest(found) > FAR


def is_false_alarm(found: dict) -> bool:
    return not found["trusted"] and all(abs(z) < NEAR for z in found["z"].values())
