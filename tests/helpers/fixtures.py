"""What tests share, in their processes: the process that starts them loads neither JAX nor the package."""

import contextlib
import ctypes
import gc
from pathlib import Path

import jax
import jax.random as jr
import jaxtyping
import psutil
import pytest
import records
from helpers.cases import LAYERS, random_covariance
from helpers.fits import WARMUP

import sdeinfer as si

MOST_MAPS = 32_000
"""XLA maps memory for every compiled program, and Linux allows a process 65,530 maps: beyond, XLA crashes."""

MOST_MEMORY = 1.1e9
"""Bytes that a process may hold before it forgets its programs."""


@pytest.fixture(params=LAYERS)
def layer(request) -> si.layers.AbstractLayer:
    return LAYERS[request.param]()


@pytest.fixture(scope="session")
def record(request):
    """Write rows of a table to its record, see `records`, where `--record` asks for it."""
    return records.update if request.config.getoption("--record") else lambda name, rows: None


@pytest.fixture(params=range(1, 7), ids=lambda m: f"m{m}")
def V(request):
    return random_covariance(request.param, seed=request.param)


@pytest.fixture(autouse=True, scope="module")
def _memory_is_given_back():
    """After each file: half of what a process holds is what compilation took and freed, and glibc keeps."""
    yield
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    maps = Path("/proc/self/maps")
    many = maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS
    if many or psutil.Process().memory_info().rss > MOST_MEMORY:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def unchecked():
    """For tests of what the package itself says of bad input, and of where its warnings point."""
    jaxtyping.config.update("jaxtyping_disable", True)  # noqa: FBT003
    yield
    jaxtyping.config.update("jaxtyping_disable", False)  # noqa: FBT003


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
    return si.fit(si.models.full_path, networks, chains=2, draws=400, warmup=WARMUP, predictions=20, key=jr.key(3))


@pytest.fixture(scope="session")
def checked(fitted, networks):
    """Its verdicts."""
    return si.check(fitted, networks)


@pytest.fixture(scope="session")
def tuned():
    """A feed-forward layer tuned for a constraint of each kind, of which the first is active."""
    of = si.criteria
    constraints = [
        of.probability(of.NormFactor(), below=2) >= 0.95,
        of.probability(of.LogNorm(1), above=0.5) <= 0.3,
        of.quantile(of.LogNorm(1), 0.9) <= 30,
        of.spread(of.LogNorm(1)) <= 5,
        of.expectation(of.NormFactor()) <= 300,
    ]
    V0 = si.equicorrelated(tokens=2, correlation=0.2, norm=1.0)
    sizes = {"width": 64, "depth": 32, "paths": 256, "step": 0.1, "key": jr.key(0)}
    return si.tune("feedforward", V0, maximise="gamma", subject_to=constraints, fixed={"c_gap": 1.0}, **sizes)
