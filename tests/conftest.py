"""What the whole suite shares; it runs in double precision, except where a test asks for single.

Most of its time is compilation. Tests run in one process a core (`-n 0` for one process), which share a folder of
compiled programs for the time of the run. Of XLA's work only LLVM's optimisations are left out: that halves the time,
and changes results by rounding. `XLA_FLAGS= pytest` runs the machine code that users run, as do slow tests and
benchmarks.
"""

import functools
import gc
import math
import os
import shutil
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import jax.random as jr
import jaxtyping
import numpy as np
import pytest
import records
from helpers import budget, typechecking
from long_cases import LONG_CASES

jaxtyping.install_import_hook("sdeinfer", f"{typechecking.__name__}.check")

from helpers.internals import vech  # noqa: E402

import sdeinfer as si  # noqa: E402

jax.config.update("jax_enable_x64", True)  # noqa: FBT003
os.environ["SDEINFER_NO_CACHE"] = "1"  # commands leave the user's folder alone, and compile as on the first day

MOST_MAPS = 32_000
MOST_WORKERS = 8
"""Each takes some GB of memory."""

LONGEST = ("test_notebooks", "test_latent", "test_cli", "test_readme", "tests/infer", "tests/diagnostics")
"""Where the tests that take longest are; the sort keeps the order of all others."""

COMPILED = pytest.StashKey[str]()

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


def halves(tokens: int) -> tuple[int, ...]:
    return (tokens,) if tokens == 1 else (tokens // 2, tokens - tokens // 2)


def any_mask(tokens: int) -> si.Pattern:
    """A mask without structure, in which not every token attends to itself."""
    if tokens == 2:
        return si.Pattern.of_mask([[0, 1], [1, 1]])
    chosen = np.random.default_rng(tokens).random((tokens, tokens)) < 0.6
    return si.Pattern.of_mask(chosen | np.eye(tokens, k=-1, dtype=bool) | np.eye(tokens, k=tokens - 1, dtype=bool))


PATTERNS = {
    "causal": lambda tokens: si.CAUSAL,
    "prompts": lambda tokens: si.Pattern(prompts=halves(tokens)),
    "causal prompts": lambda tokens: si.Pattern(causal=True, prompts=halves(tokens)),
    "mask": lambda tokens: any_mask(tokens) if tokens > 1 else si.Pattern(),
}
"""Attention patterns of a number of tokens."""

CAUSAL = {
    "causal attention": lambda: si.ShapedAttention(gamma=0.7, tau0=0.8, pattern=si.CAUSAL),
    "causal transformer": lambda: si.ShapedTransformer(
        gamma=0.5, tau0=0.6, c_plus=0.3, c_minus=-1.5, heads=2, pattern=si.CAUSAL
    ),
    "causal stack": lambda: si.Stack(
        (si.ShapedMLP(c_plus=0.2, c_minus=-1.2), si.ShapedAttention(gamma=0.6, tau0=0.9, pattern=si.CAUSAL))
    ),
}
"""With a causal mask; tokens are not exchangeable then."""


def masked_layer_of(name: str, tokens: int) -> si.layers.AbstractLayer:
    """One of `CAUSAL`, or a Transformer with one of `PATTERNS`."""
    if name in CAUSAL:
        return CAUSAL[name]()
    return si.ShapedTransformer(gamma=0.6, tau0=0.7, c_plus=0.4, c_minus=-1.1, pattern=PATTERNS[name](tokens))


@pytest.fixture(params=[*CAUSAL, *list(PATTERNS)[1:]])
def masked_layer(request):
    """Maps a number of tokens to a layer whose attention has a pattern."""
    return functools.partial(masked_layer_of, request.param)


@pytest.fixture(params=LAYERS)
def layer(request) -> si.layers.AbstractLayer:
    return LAYERS[request.param]()


def pytest_addoption(parser):
    parser.addoption("--record", action="store_true", help="write what studies find to docs/records")


@pytest.fixture(scope="session")
def record(request):
    """Write rows of a table to its record, see `records`, where `--record` asks for it."""
    return records.update if request.config.getoption("--record") else lambda name, rows: None


def takes_its_time(config) -> bool:
    """Whether slow tests or benchmarks were asked for."""
    asked = config.option.markexpr
    return any(mark in asked and f"not {mark}" not in asked for mark in ("slow", "benchmark"))


def pytest_xdist_auto_num_workers(config) -> int:
    """`-n auto`: a process a core; none where output is not captured, or for slow tests and benchmarks."""
    alone = config.option.capture == "no" or takes_its_time(config)
    return 0 if alone else min(len(os.sched_getaffinity(0)), MOST_WORKERS)


def pytest_configure(config):
    """Before the workers start, which inherit the environment."""
    if hasattr(config, "workerinput"):
        return
    # One thread of BLAS a process: more would be in each other's way.
    if config.option.numprocesses:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if not takes_its_time(config):
        os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        folder = config.stash[COMPILED] = tempfile.mkdtemp(prefix="sdeinfer-tests-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = folder
        jax.config.update("jax_compilation_cache_dir", folder)
    for name, everything in (("min_compile_time_secs", 0), ("min_entry_size_bytes", -1)):
        os.environ[f"JAX_PERSISTENT_CACHE_{name.upper()}"] = str(everything)
        jax.config.update(f"jax_persistent_cache_{name}", everything)


def pytest_collection_finish():
    """Look for garbage less often, and not among modules: traced programs are many objects, and hardly any garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark the long cases, and start with what takes longest."""
    for item in items:
        if item.nodeid.endswith(LONG_CASES):
            item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: next((i for i, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST)))


KINDS = ("benchmark", "torch", "slow", "docs", "long")
"""Markers of tests that do not run by default; the first of them that a test has is its kind in the budget."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Comparisons are counted by the kind of test that makes them."""
    budget.begin(next((kind for kind in KINDS if item.get_closest_marker(kind)), "default"))
    return (yield)


def pytest_unconfigure(config):
    """Remove what was compiled."""
    if COMPILED in config.stash:
        shutil.rmtree(config.stash[COMPILED], ignore_errors=True)


def pytest_testnodedown(node):
    """Add up what the workers have spent."""
    budget.spend(getattr(node, "workeroutput", {}).get("comparisons", {}))


def pytest_sessionfinish(session):
    """Fail where more comparisons were made than were declared, by all processes together."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["comparisons"] = budget.spent()
    elif budget.overspent():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """Say what was spent of the budget for false failures, where it was exceeded or somebody asks."""
    if budget.overspent() or terminalreporter.config.option.verbose > 0:
        spent = ", ".join(f"{count} of {budget.DECLARED[kind]} {kind}" for kind, count in budget.spent().items())
        terminalreporter.write_line(f"budget: statistical comparisons made, of those declared: {spent or 'none'}")


def layer_of(kind, **parameters):
    """The layer of a template with those of some parameters that it has."""
    return kind.with_parameters({name: parameters[name] for name in kind.declared()})


@functools.cache
def random_covariance(tokens: int, seed: int = 0):
    """A well-conditioned covariance with unequal norms."""
    with jax.ensure_compile_time_eval():  # also where a traced function asks first
        X = np.asarray(jr.normal(jr.key(seed), (tokens, tokens + 3)))
        return jnp.asarray(X @ X.T / (tokens + 3))


def matrix_of(move, *shape: int, dtype=float):
    """A linear map from normals of this shape to symmetric matrices, as the matrix of their packed entries."""
    normals = jnp.eye(math.prod(shape), dtype=dtype).reshape(-1, *shape)
    return vech(jax.vmap(move)(normals)).T


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


WARMUP = 300
"""Of the fits in the suite: its length is compiled in, so that fits of one shape and one warmup share a sampler."""


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
