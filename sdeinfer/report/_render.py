"""Figures of a report, as files and inlined in its page, which therefore needs no network access.

Tests: `tests/report/test_fit.py`.
"""

import base64
import importlib.metadata
import io
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sdeinfer._files import staged_file


def figure_of(drawn: Axes | Sequence[Axes]) -> Figure:
    """The figure of a plot, which pyplot keeps open no longer."""
    axes = drawn if isinstance(drawn, Axes) else drawn[0]
    figure = cast(Figure, axes.get_figure(root=True))
    pyplot.close(figure)
    return figure


def write_figures(drawn: Mapping[str, Figure], folder: str | Path) -> None:
    """Write each figure to `folder/<name>.png`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        with staged_file(folder / f"{name}.png") as temporary:
            figure.savefig(temporary, dpi=200)


def inline(figure: Figure) -> str:
    """The figure as a data URL."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


def moment(time: datetime) -> str:
    """Date and time in words."""
    return f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def versions(*packages: str) -> str:
    """The installed versions of packages."""
    return ", ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
