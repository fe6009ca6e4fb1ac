"""The notebooks, which are beside the documentation, copied into its source folder before a build."""

import shutil
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
        copy = copies / notebook.name
        if not copy.exists() or copy.read_bytes() != notebook.read_bytes():
            shutil.copyfile(notebook, copy)


def setup(app: Sphinx) -> dict[str, bool]:
    """Copy at the start of a build."""
    app.connect("builder-inited", copy_notebooks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
