"""A build fails, under -W, if the API reference leaves out a recipe, or docs/notebooks.md a plot."""

from pathlib import Path

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import sdeinfer as si

logger = logging.getLogger(__name__)


def warn_of_missing(_: Sphinx, env: BuildEnvironment) -> None:
    """Compare the names of recipes and plots with what the pages describe; `tests/test_package.py` has all others."""
    for name in si.audit.recipes.RECIPES:
        if f"sdeinfer.audit.recipes.{name}" not in env.domains["py"].data["objects"]:
            logger.warning("the recipe %s is in no page of the API reference", name)
    figures = Path(env.doc2path("notebooks")).read_text(encoding="utf-8")
    for name in dir(si.plots):
        if name.startswith("plot_") and name not in figures:
            logger.warning("sdeinfer.plots.%s has no picture in docs/notebooks.md", name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Look when all pages are read."""
    app.connect("env-check-consistency", warn_of_missing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
