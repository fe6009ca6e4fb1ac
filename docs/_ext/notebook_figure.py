"""A figure of a notebook with the lines that drew it: ``.. notebook-figure:: 0_quickstart plot_posterior``.

The package of a function that is not in ``sdeinfer.plots`` follows: ``12_audit plot_audit sdeinfer.auditing``.
"""

import base64
from pathlib import Path

import nbformat
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

FOLDER = "notebooks/figures"


class NotebookFigure(SphinxDirective):
    """The stored image of the first cell that calls a function, or a method as `tuned.plot`, its source, and links."""

    required_arguments = 2
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Write the image beside the copied notebooks."""
        name, function, package = (*self.arguments, "sdeinfer.plots")[:3]
        source = Path(self.env.srcdir)
        stored = source / "notebooks" / f"{name}.ipynb"
        if not stored.exists():
            raise self.error(f"there is no notebook {name}")
        notebook = nbformat.read(stored, as_version=4)
        for cell in notebook.cells:
            images = [each.data["image/png"] for each in cell.get("outputs", []) if "image/png" in each.get("data", {})]
            if images and f"{function}(" in cell.source:
                break
        else:
            raise self.error(f"{name}.ipynb has no cell with an image and a call of {function}")
        path = source / FOLDER / f"{name}-{function}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(images[0]))
        self.env.note_dependency(f"notebooks/{name}.ipynb")
        code = nodes.literal_block(cell.source, cell.source, language="python")
        image = nodes.image(uri=f"/{FOLDER}/{path.name}", alt=f"{function} in the notebook {name}")
        nested = self.parse_text_to_nodes(
            f"{{py:func}}`{package}.{function.rpartition('.')[2]}`, in the notebook {{doc}}`notebooks/{name}`."
        )
        return [*nested, image, code]


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("notebook-figure", NotebookFigure)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
