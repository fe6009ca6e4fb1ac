import jax.random as jr
import pytest
from likelihood.programs import NETWORKS

import sdeinfer as si


@pytest.fixture(scope="module")
def data():
    """Networks of two tokens for programs of users."""
    V0 = si.equicorrelated(tokens=2, correlation=0.2, norm=1.0)
    layer = si.ResidualFeedForward(gamma=0.6, c_plus=1.0, c_minus=-1.0)
    return si.sample_networks(layer, V0, width=48, depth=6, networks=NETWORKS, key=jr.key(0))
