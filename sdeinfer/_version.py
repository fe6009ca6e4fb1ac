"""The version of the installed package. Tests: `tests/test_package.py`."""

import importlib.metadata

__version__ = importlib.metadata.version("sdeinfer")
