"""`--record FILE` writes the coverage that the studies found, as a table in Markdown."""

from pathlib import Path

import pytest
from calibration import study


def pytest_addoption(parser):
    parser.addoption("--record", type=Path, help="write every coverage found to this file")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    path = session.config.getoption("--record")
    if path is not None and study.FOUND:
        study.write_record(path)
