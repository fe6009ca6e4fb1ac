"""What a result says of its data and of how it was made, whichever way it was."""

import datetime
import importlib.metadata
from typing import Any

import xarray as xr

from sdeinfer.likelihood import USED, Program, used_of


def groups_of_data(data: xr.Dataset) -> dict[str, xr.Dataset]:
    """The groups observed_data and constant_data.

    Arguments:
        data: the observed networks, with the transitions that were used.
    """
    return {
        "observed_data": data[["covariance"]].drop_vars("width"),
        "constant_data": data[[USED]].drop_vars("width").assign(width=data["width"].drop_vars("width")),
    }


def attributes_of(program: Program, data: xr.Dataset, *, largest_logit: float) -> dict[str, Any]:
    """What the data say of themselves, the architecture, the model, its law and range, and the version.

    Arguments:
        program: the model, with its options given.
        data: the observed networks, with the transitions that were used.
        largest_logit: bound on the spread of the logits, see `in_range`.
    """
    options = dict(program.options)
    return {
        **data.attrs,
        **options["architecture"].attributes(),
        "model": program.name,
        "law": options["law"],
        "largest_logit": largest_logit,
        "left_out": float(1 - used_of(data).mean()),
        "sdeinfer_version": importlib.metadata.version("sdeinfer"),
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
