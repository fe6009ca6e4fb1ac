"""The public names of a package that no other page of the API describes: ``.. other-names:: sdeinfer.covariance``."""

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from docutils import nodes
from docutils.statemachine import StringList
from plain_docstrings import escaped
from sphinx.application import Sphinx
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.docutils import SphinxDirective

DESCRIBED = re.compile(r"^\.\. (?:auto\w+|py:\w+):: (\S+)", re.MULTILINE)


def public_names(package: str) -> dict[str, str]:
    """The names that a package re-exports, `X as X`, and the module from which it has each."""
    start = Path(str(importlib.import_module(package).__file__))
    stub = start.with_suffix(".pyi")
    tree = ast.parse((stub if stub.exists() else start).read_text(encoding="utf-8"))
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            module = ".".join(filter(None, [package if node.level else "", node.module]))
            found |= {each.asname: module for each in node.names if each.asname}
    return found


def described(pages: Path) -> set[str]:
    """The names that pages describe, without their packages."""
    return {name.rpartition(".")[2] for page in pages.glob("*.rst") for name in DESCRIBED.findall(page.read_text())}


class OtherNames(SphinxDirective):
    """An entry for each name."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Write the directives of autodoc, and read them."""
        package = self.arguments[0]
        known = described(Path(self.env.srcdir) / "api")
        lines: list[str] = []
        for name, module in sorted(public_names(package).items(), key=lambda each: each[0].lower()):
            if name not in known:
                lines += ["", *_entry(package, name, module)]
        return self.parse_text_to_nodes(StringList(lines, source=f"{package}.__init__"))


def _entry(package: str, name: str, module: str) -> Iterator[str]:
    obj = getattr(importlib.import_module(package), name)
    if isinstance(obj, ModuleType):
        return
    if inspect.isclass(obj):
        yield f".. autoclass:: {package}.{name}"
    elif callable(obj) and hasattr(obj, "__doc__") and hasattr(obj, "__name__"):
        yield f".. autofunction:: {package}.{name}"
    else:
        yield f".. py:data:: {package}.{name}"
        yield ""
        comments = ModuleAnalyzer.for_module(module).find_attr_docs()
        for line in comments.get(("", name), []):
            yield f"   {escaped(line)}"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the directive."""
    app.add_directive("other-names", OtherNames)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
