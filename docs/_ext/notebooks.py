"""The notebooks, which are beside the documentation, copied into its source folder before a build.

Notebooks link to pages as `../docs/guides/audit.md`, and pages to notebooks as `../notebooks/3_tune.ipynb`, from where
they are in the repository; both are read as the site has them.
"""

import re
from pathlib import Path

from sphinx.application import Sphinx


def copy_notebooks(app: Sphinx) -> None:
    """Copy what changed, and remove copies of notebooks that are gone."""
    source, copies = Path(app.srcdir).parent / "notebooks", Path(app.srcdir) / "notebooks"
    copies.mkdir(exist_ok=True)
    for copy in copies.glob("*.ipynb"):
        if not (source / copy.name).exists():
            copy.unlink()
    for notebook in source.glob("*.ipynb"):
        copy, text = copies / notebook.name, notebook.read_text(encoding="utf-8").replace("](../docs/", "](../")
        if not copy.exists() or copy.read_text(encoding="utf-8") != text:
            copy.write_text(text, encoding="utf-8")


def links_to_copies(app: Sphinx, name: str, source: list[str]) -> None:
    """Links of a page to notebooks become links to their copies."""
    up = "../" * name.count("/")
    source[0] = re.sub(rf"\]\(\.\./{re.escape(up)}notebooks/(?=\w+\.ipynb)", f"]({up}notebooks/", source[0])


def setup(app: Sphinx) -> dict[str, bool]:
    """Copy at the start of a build."""
    app.connect("builder-inited", copy_notebooks)
    app.connect("source-read", links_to_copies)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
