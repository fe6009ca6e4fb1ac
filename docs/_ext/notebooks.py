"""The notebooks, which are beside the documentation, copied into its source folder before a build.

A notebook links to a page as `../docs/guides/audit.md`, from where it is; its copy is in the documentation.
"""

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


def setup(app: Sphinx) -> dict[str, bool]:
    """Copy at the start of a build."""
    app.connect("builder-inited", copy_notebooks)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
