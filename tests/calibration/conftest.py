"""`--held-out` runs studies of verdicts on unseen seeds."""

from pathlib import Path

import pytest
from calibration import runs


def pytest_addoption(parser):
    parser.addoption("--held-out", action="store_true", help="studies of verdicts: the seeds that are for releases")


@pytest.fixture
def first_seed(request) -> int:
    """The first seed of a study of verdicts."""
    return runs.HELD_OUT if request.config.getoption("--held-out") else 0


@pytest.fixture
def kept_results(request) -> Path:
    """The folder of finished data sets."""
    return request.config.cache.mkdir("studies")
