"""How tests run; what they share is in `helpers`.

Most of their time is compilation. They run in one process a core (`-n 0` for one process), which share a folder of
compiled programs for the time of the run. Of XLA's work only LLVM's optimisations are left out: that halves the time,
and changes results by rounding. `XLA_FLAGS= pytest` runs the machine code that users run, as do slow tests and
benchmarks. The suite runs in double precision, except where a test asks for single.
"""

import gc
import os
import shutil
import tempfile

import psutil
import pytest
from helpers import spending

os.environ["SDEINFER_NO_CACHE"] = "1"  # commands leave the user's folder alone, and compile as on the first day

MOST_WORKERS = 8

MEMORY = 1.5e9
"""Bytes that a process takes at most."""

QUICK_TO_COMPILE = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"

LONGEST = (
    *("test_notebooks", "tests/cli", "test_metropolis", "test_program", "tests/models", "test_readme", "tests/blocks"),
    *("tests/criteria", "tests/diagnostics", "tests/meanfield", "tests/infer", "tests/plots", "tests/tuning"),
)
"""Where the tests that take longest are; the sort keeps the order of all others."""

COMPILED = pytest.StashKey[str]()


def pytest_addoption(parser):
    parser.addoption("--record", action="store_true", help="write what studies find to docs/records")


def takes_its_time(config) -> bool:
    """Whether slow tests or benchmarks were asked for."""
    asked = config.option.markexpr
    return any(mark in asked and f"not {mark}" not in asked for mark in ("slow", "benchmark"))


def pytest_xdist_auto_num_workers(config) -> int:
    """`-n auto`: a process a core, as far as memory goes; none where output is not captured, or for slow tests."""
    if config.option.capture == "no" or takes_its_time(config):
        return 0
    affordable = int(psutil.virtual_memory().available / MEMORY)
    return max(1, min(len(os.sched_getaffinity(0)), affordable, MOST_WORKERS))


def pytest_configure(config):
    """Set the environment before the workers start, which inherit it; load the package where tests run."""
    starts_workers = bool(config.option.numprocesses)
    if not hasattr(config, "workerinput"):
        prepare_environment(config)
    if not starts_workers:
        load_package()
        config.pluginmanager.import_plugin("helpers.fixtures")


def prepare_environment(config):
    """One folder of compiled programs, and one thread of BLAS a process: more would be in each other's way."""
    if config.option.numprocesses:
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if not takes_its_time(config):
        os.environ.setdefault("XLA_FLAGS", QUICK_TO_COMPILE)
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        config.stash[COMPILED] = os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="sdeinfer-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def load_package():
    """Import the package with checks of shapes and types, in double precision."""
    import jax
    import jaxtyping
    from helpers import typechecking

    jaxtyping.install_import_hook("sdeinfer", f"{typechecking.__name__}.check")
    jax.config.update("jax_enable_x64", True)  # noqa: FBT003


def pytest_collection_finish():
    """Look for garbage less often, and not among modules: traced programs are many objects, and hardly any garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of tests marked `one_case` all cases but one are `long`; start with what takes longest."""
    default = {}
    for item in items:
        if marker := item.get_closest_marker("one_case"):
            test = item.nodeid.partition("[")[0]
            if item.callspec.id != default.setdefault(test, marker.args[0] if marker.args else item.callspec.id):
                item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: next((i for i, name in enumerate(LONGEST) if name in item.nodeid), len(LONGEST)))


KINDS = ("benchmark", "torch", "slow", "docs", "long")
"""Markers of tests that do not run by default; the first of them that a test has is its kind in the budget."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Comparisons are counted by the kind of test that makes them."""
    spending.begin(next((kind for kind in KINDS if item.get_closest_marker(kind)), "default"))
    return (yield)


def pytest_unconfigure(config):
    """Remove what was compiled."""
    if COMPILED in config.stash:
        shutil.rmtree(config.stash[COMPILED], ignore_errors=True)


def pytest_testnodedown(node):
    """Add up what the workers have spent."""
    spending.spend(getattr(node, "workeroutput", {}).get("comparisons", {}))


def pytest_sessionfinish(session):
    """Fail where more comparisons were made than were declared, by all processes together."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["comparisons"] = spending.spent()
    elif spending.overspent():
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter):
    """Say what was spent of the budget for false failures, where it was exceeded or somebody asks."""
    if spending.overspent() or terminalreporter.config.option.verbose > 0:
        spent = ", ".join(f"{count} of {spending.DECLARED[kind]} {kind}" for kind, count in spending.spent().items())
        terminalreporter.write_line(f"budget: statistical comparisons made, of those declared: {spent or 'none'}")
