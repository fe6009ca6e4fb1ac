"""The transitions of a Dataset that are in the range of the law."""

import xarray as xr
from helpers.internals import LARGEST_LOGIT, Selection, in_range, with_used


def selected(problem, data: xr.Dataset, largest: float = LARGEST_LOGIT) -> Selection:
    """Those that a problem would fit."""
    return in_range(problem, data, problem.transitions(data), largest)


def marked(problem, data: xr.Dataset, largest: float = LARGEST_LOGIT) -> xr.Dataset:
    """The Dataset with `used`, as a fit stores it."""
    return with_used(data, selected(problem, data, largest).path.used)
