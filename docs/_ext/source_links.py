"""Links from a source page to the entries of its names, also where these are in the pages of several packages.

`sphinx.ext.viewcode` takes all names of a module to be in the package that it came upon first.
"""

import pkgutil
import re
from typing import Any

from sphinx.application import Sphinx

import sdeinfer

BACK = re.compile(r'(class="viewcode-back" href="(?:\.\./)*([^"#]*)\.html#)([^"]*)"')


def correct(app: Sphinx, pagename: str, _template: str, context: dict[str, Any], _doctree: Any) -> None:
    """Replace the anchors by those of the names, whatever their package."""
    if not pagename.startswith("_modules/"):
        return
    modules = "|".join(each.name for each in pkgutil.iter_modules(sdeinfer.__path__))
    package = re.compile(rf"sdeinfer\.(?:(?:{modules})\.)?(?=.)")
    objects = app.env.domains["py"].data["objects"].items()
    anchors = {(it.docname, package.sub("", name)): it.node_id for name, it in objects if not it.aliased}

    def anchor(link: re.Match) -> str:
        return f'{link[1]}{anchors.get((link[2], package.sub("", link[3])), link[3])}"'

    context["body"] = BACK.sub(anchor, context["body"])


def setup(app: Sphinx) -> dict[str, bool]:
    """Correct each page before it is written."""
    app.connect("html-page-context", correct)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
