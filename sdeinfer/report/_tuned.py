"""A tuned layer as one HTML page. Tests: `tests/cli/test_studies.py`."""

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

from jaxtyping import PRNGKeyArray
from matplotlib.figure import Figure

from sdeinfer._files import write_text
from sdeinfer._html import render
from sdeinfer.plots import plot_tuned
from sdeinfer.report._render import figure_of, inline, moment, versions
from sdeinfer.tuning import Tuned

CAPTION = (
    "Statistics of the constraints over new networks, or paths of the SDE, at the tuned parameters. Dashed: the bound, "
    "or the value that a probability is about; red and hatched: networks that should be few."
)


def tuned_figures(tuned: Tuned, *, paths: int = 512, key: PRNGKeyArray) -> dict[str, Figure]:
    """Make the figure of a tuned layer, see `plot_tuned`; there is none without constraints."""
    return {"tuned": figure_of(plot_tuned(tuned, paths=paths, key=key))} if tuned.constraints else {}


def write_tuned(tuned: Tuned, drawn: Mapping[str, Figure], path: str | Path, *, command: str = "") -> None:
    """Write the page of a tuned layer.

    Arguments:
        tuned: the result of `tune`.
        drawn: figures by name, as of `tuned_figures`.
        path: the file to write.
        command: the command that reproduces it, if there is one.
    """
    search = tuned.found
    provenance = {
        "architecture": tuned.kind,
        "tokens": str(tuned.V0.shape[-1]) + (f", {len(tuned.V0)} prompts" if len(tuned.V0) > 1 else ""),
        "search": f"{search['paths']} paths, step {search['step']:g}, {search['evaluations']} evaluations, "
        f"{search['iterations']} iterations, {search['seconds']:.0f} s",
        "search ended": search["message"],
        "values": f"{search['paths']} new {tuned.samples}"
        + (f", step {search['step'] / 2:g}" if tuned.law == "limit" else ""),
        "start": ", ".join(f"{name} = {value:.4g}" for name, value in search["start"].items()),
        f"exploded {tuned.samples}": f"{search['exploded']:.2%}",
        "spread of logits": f"{search['logit_spread']:.2g}",
        "date": moment(datetime.now(UTC)),
        "page by": versions("sdeinfer", "jax", "diffrax", "scipy"),
    }
    figures = [(name, CAPTION, inline(figure)) for name, figure in drawn.items()]
    page = render("tuned.html.jinja", tuned=tuned, figures=figures, provenance=provenance, command=command)
    write_text(path, page)
