"""Tables of layers in notebooks."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from sdeinfer._html import render
from sdeinfer.covariance import is_concrete
from sdeinfer.parameters import BIJECTIONS, Parameter


def parameter_cell(title: str, layer: Any, parameters: Mapping[str, Parameter], values: Mapping[str, str]) -> str:
    """A table in HTML with a row for each parameter, and with those settings of the layer that are not None."""
    rows = [
        {
            **{"symbol": parameter.symbol, "name": name, "value": values[name]},
            **{"range": BIJECTIONS[parameter.bijection].range, "meaning": parameter.meaning},
        }
        for name, parameter in parameters.items()
    ]
    fields = (field.name for field in dataclasses.fields(layer) if field.metadata.get("static"))
    settings = {name.replace("_", " "): getattr(layer, name) for name in fields if getattr(layer, name) is not None}
    return render("layer_cell.html.jinja", title=title, settings=settings, rows=rows)


def value_text(value: Any) -> str:
    """A parameter's value, or the range of the values of several networks."""
    if not is_concrete(value):
        return "traced"
    values = np.asarray(value, float)
    if values.ndim == 0:
        return f"{values:.4g}"
    return f"{values.min():.4g} … {values.max():.4g}, {values.size} values"
