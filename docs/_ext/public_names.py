"""A build fails, under -W, if the API reference leaves out a public name or a recipe, or the gallery a plot."""

import importlib
from pathlib import Path
from types import ModuleType

from other_names import public_names
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import sdeinfer as si

logger = logging.getLogger(__name__)


def warn_of_missing(_: Sphinx, env: BuildEnvironment) -> None:
    """Compare the names of each package with the objects that the pages describe."""
    described = {name.rpartition(".")[2] for name in env.domains["py"].data["objects"]}
    subpackages = [each for each in public_names("sdeinfer") if isinstance(getattr(si, each), ModuleType)]
    for package in ("sdeinfer", *(f"sdeinfer.{each}" for each in subpackages)):
        module = importlib.import_module(package)
        for name in public_names(package):
            if name not in described and not isinstance(getattr(module, name), ModuleType):
                logger.warning("%s.%s is in no page of the API reference", package, name)
    for name in si.audit.recipes.RECIPES:
        if f"sdeinfer.audit.recipes.{name}" not in env.domains["py"].data["objects"]:
            logger.warning("the recipe %s is in no page of the API reference", name)
    gallery = Path(env.doc2path("gallery")).read_text(encoding="utf-8")
    for name in public_names("sdeinfer.plots"):
        if name.startswith("plot_") and name not in gallery:
            logger.warning("sdeinfer.plots.%s has no picture in the gallery", name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Look when all pages are read."""
    app.connect("env-check-consistency", warn_of_missing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
