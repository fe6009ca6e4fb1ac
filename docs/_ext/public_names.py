"""A build fails, under -W, if the API reference leaves out a public name."""

import importlib
from types import ModuleType

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

COMPLETE = ("sdeinfer", "sdeinfer.criteria", "sdeinfer.models", "sdeinfer.plots", "sdeinfer.tuning")
"""Packages that are documented name by name; of others, what a user calls."""

logger = logging.getLogger(__name__)


def warn_of_missing(_: Sphinx, env: BuildEnvironment) -> None:
    """Compare the names of each package with the objects that the pages describe."""
    described = {name.rpartition(".")[2] for name in env.domains["py"].data["objects"]}
    for package in COMPLETE:
        module = importlib.import_module(package)
        names = getattr(module, "__all__", None) or [name for name in vars(module) if not name.startswith("_")]
        for name in names:
            if name not in described and not isinstance(getattr(module, name), ModuleType):
                logger.warning("%s.%s is in no page of the API reference", package, name)


def setup(app: Sphinx) -> dict[str, bool]:
    """Look when all pages are read."""
    app.connect("env-check-consistency", warn_of_missing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
