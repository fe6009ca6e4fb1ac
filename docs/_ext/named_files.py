"""A build fails, under -W, if a page names a file of the repository that is not there."""

import re
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging

PATH = re.compile(r"(sdeinfer|models|tests|notebooks|docs)/[\w./-]*")

logger = logging.getLogger(__name__)


def warn_of_missing(app: Sphinx, doctree: nodes.document) -> None:
    """Look for each literal that is a path."""
    root = Path(app.srcdir).parent
    for literal in doctree.findall(nodes.literal):
        name = literal.astext()
        if PATH.fullmatch(name) and not (root / name).exists():
            logger.warning("%s does not exist", name, location=literal)


def setup(app: Sphinx) -> dict[str, bool]:
    """Look at each page when it is read."""
    app.connect("doctree-read", warn_of_missing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
