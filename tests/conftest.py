"""What the whole suite shares; it runs in double precision, except where a test asks for single."""

import gc
import os
from pathlib import Path

import jax
import jax.random as jr
import pytest

import sdeinfer as si

jax.config.update("jax_enable_x64", True)  # noqa: FBT003
os.environ["SDEINFER_NO_CACHE"] = "1"  # commands leave the user's folder alone, and compile as on the first day

MOST_MAPS = 20_000

LAYERS = {
    "transformer": lambda: si.ShapedTransformer(gamma=0.5, tau0=0.6, c_plus=0.3, c_minus=-1.5),
    "attention": lambda: si.ShapedAttention(gamma=0.7, tau0=0.8),
    "feedforward": lambda: si.ResidualFeedForward(gamma=0.6, c_plus=0.5, c_minus=-1.0),
    "mlp": lambda: si.ShapedMLP(c_plus=0.2, c_minus=-1.2),
    "stack": lambda: si.Stack(
        (
            si.ShapedAttention(gamma=0.4, tau0=1.1),
            si.ResidualFeedForward(gamma=0.9, c_plus=1.0, c_minus=-0.5),
        )
    ),
}
"""One of each architecture: the shared property tests run over all of them."""


CAUSAL = {
    "causal attention": lambda: si.ShapedAttention(gamma=0.7, tau0=0.8, causal=True),
    "causal transformer": lambda: si.ShapedTransformer(
        gamma=0.5, tau0=0.6, c_plus=0.3, c_minus=-1.5, heads=2, causal=True
    ),
    "causal stack": lambda: si.Stack(
        (si.ShapedMLP(c_plus=0.2, c_minus=-1.2), si.ShapedAttention(gamma=0.6, tau0=0.9, causal=True))
    ),
}
"""With a causal mask; tokens are not exchangeable then."""


@pytest.fixture(params=CAUSAL)
def causal_layer(request) -> si.layers.AbstractLayer:
    return CAUSAL[request.param]()


@pytest.fixture(params=LAYERS)
def layer(request) -> si.layers.AbstractLayer:
    return LAYERS[request.param]()


def random_covariance(tokens: int, seed: int = 0):
    """A well-conditioned covariance with unequal norms."""
    X = jr.normal(jr.key(seed), (tokens, tokens + 3))
    return X @ X.T / (tokens + 3)


@pytest.fixture(params=range(1, 7), ids=lambda m: f"m{m}")
def V(request):
    return random_covariance(request.param, seed=request.param)


@pytest.fixture(autouse=True, scope="module")
def _compiled_programs_are_forgotten():
    """XLA maps memory for every compiled program, and Linux allows a process 65,530 maps: beyond, XLA crashes."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def key():
    return jr.key(20230630)


@pytest.fixture(scope="session")
def networks():
    """A small data set of finite Transformers with known parameters."""
    truth = si.ShapedTransformer(gamma=0.6, tau0=1.0, c_plus=1.0, c_minus=-3.0)
    V0 = si.equicorrelated(tokens=3, correlation=0.1, norm=1.4)
    return si.sample_networks(truth, V0, width=96, depth=10, networks=24, key=jr.key(1))


@pytest.fixture(scope="session")
def fitted(networks):
    """A short fit of them."""
    return si.fit(si.models.full_path, networks, chains=2, draws=400, warmup=300, predictions=20, key=jr.key(2))
