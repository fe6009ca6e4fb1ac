import pytest
from matplotlib import pyplot


@pytest.fixture(autouse=True)
def _figures_are_closed():
    yield
    pyplot.close("all")
