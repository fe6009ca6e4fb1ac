"""An audit as one HTML page. Tests: `tests/cli/test_audit.py`."""

from datetime import UTC, datetime
from pathlib import Path

from sdeinfer._files import write_text
from sdeinfer._html import render
from sdeinfer.auditing import Audit
from sdeinfer.plots import plot_audit
from sdeinfer.report._render import figure_of, inline, moment, versions


def write_audit(audit: Audit, path: str | Path, *, command: str = "") -> None:
    """Write the page of an audit.

    Arguments:
        audit: the audit.
        path: the file to write.
        command: the command that reproduces it, if there is one.
    """
    provenance = {
        "recipe": "none" if audit.recipe is None else f"{audit.recipe.name}: {audit.recipe.source}",
        "width": str(audit.account.width),
        "layers": str(audit.layers),
        "tensors": str(len(audit.rows)),
        "date": moment(datetime.now(UTC)),
        "page by": versions("sdeinfer"),
    }
    figures = []
    if any(row.matrix.layer is not None and row.law.sd > 0 for row in audit.rows):
        figures = [("audit", "σ of each matrix, with 95 % intervals.", inline(figure_of(plot_audit(audit))))]
    page = render("audit.html.jinja", audit=audit, figures=figures, provenance=provenance, command=command)
    write_text(path, page)
