"""An audit as one HTML page."""

from pathlib import Path

from sdeinfer._files import write_text
from sdeinfer._html import render
from sdeinfer.auditing import Audit
from sdeinfer.plots import plot_audit
from sdeinfer.report._render import figure_of, inline, versions


def write_audit(audit: Audit, path: str | Path, *, command: str = "") -> None:
    """Write the page of an audit.

    Arguments:
        audit: the audit.
        path: the file to write.
        command: the command that reproduces it, if there is one.
    """
    sizes = audit.data.sizes
    provenance = {
        "recipe": "none" if audit.recipe is None else f"{audit.recipe.name}: {audit.recipe.source}",
        "width": str(int(audit.data["width"].values[0])),
        "layers": str(audit.layers),
        "networks": str(sizes["network"]),
        "tokens": str(sizes["token_a"]),
        "page by": versions("sdeinfer", "jax"),
    }
    figure = inline(figure_of(plot_audit(audit)))
    page = render(
        "audit.html.jinja",
        audit=audit,
        figures=[("audit", "Strength of each branch over the declared one, with 95 % intervals.", figure)],
        provenance=provenance,
        command=command,
    )
    write_text(path, page)
