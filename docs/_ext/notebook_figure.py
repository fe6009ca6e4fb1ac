"""Figures as notebooks store them: with the lines that drew them, or as small pictures on cards.

``.. notebook-figure:: 0_quickstart plot_posterior`` is a figure and its lines. The package of a function that is not in
``sdeinfer.plots`` follows: ``6_audit plot_audit sdeinfer.auditing``.

A line of ``.. figure-cards::`` is a card: ``0_quickstart plot_posterior [A posterior](#a-posterior) What it shows``. It
links to a heading of its page or to a notebook. In place of a notebook and what it calls, a card may have a stored
picture, or ``-`` for none.
"""

import base64
import io
import re
from pathlib import Path

import nbformat
from docutils import nodes
from PIL import Image
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

FOLDER = "notebooks/figures"
CARD = re.compile(r"(?P<figure>.+?) \[(?P<title>.+?)\]\((?P<link>\S+)\)(?: (?P<text>.*))?")
SMALL = (480, 320)


class FromNotebooks(SphinxDirective):
    """What looks for figures in the stored notebooks."""

    def figure(self, name: str, call: str) -> tuple[bytes, str, str]:
        """The image of the first cell that calls a function or method, the cell's lines, and what the image shows."""
        stored = Path(self.env.srcdir) / "notebooks" / f"{name}.ipynb"
        if not stored.exists():
            raise self.error(f"there is no notebook {name}")
        self.env.note_dependency(f"notebooks/{name}.ipynb")
        for cell in nbformat.read(stored, as_version=4).cells:
            images = [each.data["image/png"] for each in cell.get("outputs", []) if "image/png" in each.get("data", {})]
            if images and f"{call}(" in cell.source:
                shown = cell.metadata.get("mystnb", {}).get("image", {}).get("alt", f"{call} in the notebook {name}")
                return base64.b64decode(images[0]), cell.source, shown
        raise self.error(f"{name}.ipynb has no cell with an image and a call of {call}")

    def written(self, image: bytes, name: str) -> str:
        """The address of an image, beside the copied notebooks."""
        path = Path(self.env.srcdir) / FOLDER / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(image)
        return f"/{FOLDER}/{name}"


class NotebookFigure(FromNotebooks):
    """A figure, its source, and links to the function and the notebook."""

    required_arguments = 2
    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Write the image, which browsers load when it comes into view."""
        name, call, package = (*self.arguments, "sdeinfer.plots")[:3]
        stored, source, shown = self.figure(name, call)
        address = self.written(stored, f"{name}-{call}.png")
        image = nodes.image(uri=address, alt=shown, loading="lazy")
        code = nodes.literal_block(source, source, language="python")
        nested = self.parse_text_to_nodes(
            f"{{py:func}}`{package}.{call.rpartition('.')[2]}`, in the notebook {{doc}}`/notebooks/{name}`."
        )
        return [*nested, image, code]


class FigureCards(FromNotebooks):
    """A grid of cards, each with a small picture, a title that is a link, and a line of text."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Write the pictures, and read the grid of sphinx-design."""
        lines = ["::::{grid} 1 2 3 3", ":gutter: 3", ":class-container: figure-cards", ""]
        for line in filter(None, self.content):
            card = CARD.fullmatch(line)
            if card is None:
                raise self.error(f"not a card: {line}")
            link, here = card["link"], card["link"].startswith("#")
            lines += [f":::{{grid-item-card}} {card['title']}"]
            lines += [f":link: '{link if here else '/' + link.removeprefix('../').removesuffix('.ipynb')}'"]
            lines += [f":link-type: {'url' if here else 'doc'}"]
            if card["figure"] != "-":
                lines += [f":img-top: {self.small(card['figure'])}", f":img-alt: '{card['title']}'"]
            lines += ["", card["text"] or "", ":::"]
        return self.parse_text_to_nodes("\n".join([*lines, "::::"]))

    def small(self, figure: str) -> str:
        """The address of a small picture."""
        if figure.endswith(".png"):
            stored = (Path(self.env.srcdir) / figure).read_bytes()
            self.env.note_dependency(figure)
        else:
            stored, *_ = self.figure(*figure.split())
        picture = Image.open(io.BytesIO(stored)).convert("RGB")
        picture.thumbnail(SMALL)
        small = io.BytesIO()
        picture.quantize(64).save(small, "PNG", optimize=True)
        return self.written(small.getvalue(), f"small-{re.sub(r'[^\w.]+', '-', figure).removesuffix('.png')}.png")


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directives."""
    app.add_directive("notebook-figure", NotebookFigure)
    app.add_directive("figure-cards", FigureCards)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
