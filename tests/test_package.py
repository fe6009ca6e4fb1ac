"""The package as its users get it: what a wheel holds, which names are public, which way imports point."""

import ast
import importlib
import pkgutil
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import sdeinfer as si

ROOT = Path(__file__).parent.parent
ROOMS = [
    "covariance",
    "layers",
    "solve",
    "criteria",
    "observation",
    "networks",
    "likelihood",
    "models",
    "infer",
    "diagnostics",
    "tuning",
    "covariance_dataset",
    "plots",
    "report",
]
"""Imports point backwards in this list only."""

LAZY = [si, *(importlib.import_module(f"sdeinfer.{room}") for room in ("infer", "diagnostics", "plots", "report"))]
"""Packages whose names are imported when they are used; a stub names them."""

UNUSED = {
    "jax",
    "numpy",
    "scipy",
    "pandas",
    "xarray",
    "matplotlib",
    "arviz",
    "arviz_base",
    "arviz_stats",
    "arviz_plots",
}
"""What `import sdeinfer` leaves alone."""

PUBLIC = {
    "InputError",
    "LowPrecisionWarning",
    "Metropolis",
    "NUTS",
    "Observer",
    "Parameter",
    "ResidualFeedForward",
    "ShapedAttention",
    "ShapedMLP",
    "ShapedTransformer",
    "Stack",
    "check",
    "covariance_dataset",
    "equicorrelated",
    "fit",
    "models",
    "observe",
    "prepare",
    "read",
    "sample_networks",
    "simulate",
    "summarise",
    "use_compilation_cache",
    "validate",
    "write",
}


def source_folder(room: str) -> Path:
    return ROOT / "models" if room == "models" else ROOT / "sdeinfer" / room


def test_public_names_are_there():
    assert all(hasattr(si, name) for name in PUBLIC)
    assert callable(si.models.full_path)


def in_new_process(*lines: str) -> None:
    subprocess.run([sys.executable, "-W", "error", "-c", "\n".join(lines)], check=True)


def stubbed(package) -> set[str]:
    stub = Path(package.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    return {name.asname for node in ast.parse(stub).body for name in node.names}  # pyright: ignore


@pytest.mark.parametrize("package", LAZY, ids=lambda package: package.__name__)
def test_the_stub_names_what_is_there(package):
    names = stubbed(package)
    assert set(dir(package)) == set(package.__all__) == names
    assert all(getattr(package, name) is not None for name in names)
    outside = {name for name, value in vars(package).items() if name[0] != "_" and not isinstance(value, ModuleType)}
    assert outside <= names


def test_nothing_is_imported_before_it_is_used():
    in_new_process(
        "import sys, sdeinfer as si",
        f"unused = {UNUSED!r}",
        "dir(si), si.InputError",
        "assert not unused & set(sys.modules), unused & set(sys.modules)",
        "import jax",
        "before = dict(jax.config.values)",
        "si.sample_networks, si.fit, si.models.full_path",
        "assert not {'matplotlib', 'arviz_stats', 'arviz_plots', 'scipy.stats'} & set(sys.modules)",
        "assert jax.config.values == before",
    )


@pytest.mark.long  # imports in processes of their own
def test_numpyro_is_whole_after_a_report_and_functions_are_not_replaced_by_packages():
    """In one process: most of the time goes into its imports."""
    in_new_process(
        "import sdeinfer as si",
        "si.report.figures",
        "import numpyro",
        "assert numpyro.distributions.distribution",
        "import sdeinfer.diagnostics, sdeinfer.observation, sdeinfer.report",
        "import sdeinfer as si",
        "assert type(si.check).__name__ == 'function' and callable(si.observe)",
        "assert all(map(callable, (si.observe.equinox, si.observe.flax, si.observe.torch)))",
        "from sdeinfer import check, fit, observe",
        "from sdeinfer.diagnostics import Check, check as the_same",
        "assert check is the_same is si.check and observe is si.observe and fit is si.infer.fit",
        "assert si.layers.AbstractLayer and callable(si.models.full_path)",
    )


@pytest.mark.long  # imports in processes of their own
@pytest.mark.parametrize("name", ["NUTS", "check"])
def test_numpyro_is_whole_where_arviz_came_first(name):
    """ArviZ leaves a NumPyro that is loaded when a name of it is looked up: a subpackage imported then comes twice."""
    in_new_process(
        "import arviz_stats, sdeinfer as si",
        f"si.{name}",
        "import numpyro",
        "assert numpyro.distributions.distribution and numpyro.infer.hmc",
    )


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room):
    allowed = {*ROOMS[: ROOMS.index(room) + 1], "_compiler", "_files", "_progress", "parameters"}
    for file in source_folder(room).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sdeinfer."):
                imported, *private = node.module.split(".")[1:]
                assert imported == room or not private, f"{file.name} imports from inside {node.module}"
                assert imported in allowed, f"{file.name} imports {node.module}"


@pytest.mark.slow
def test_the_wheel_holds_every_subpackage_and_imports(tmp_path):
    shutil.copytree(
        ROOT, tmp_path / "source", ignore=shutil.ignore_patterns(".*", "calibration", "*.egg-info", "build")
    )
    subprocess.run(
        ["uv", "build", "--wheel", "--quiet", "--out-dir", tmp_path / "dist", tmp_path / "source"], check=True
    )
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    assert {name.split("/")[0] for name in names if "dist-info" not in name} == {"sdeinfer"}
    assert {"sdeinfer/report/page.html.jinja", "sdeinfer/py.typed", "sdeinfer/__init__.pyi"} <= set(names)
    packages = [module.name for module in pkgutil.walk_packages(si.__path__, "sdeinfer.")] + ["sdeinfer.models"]
    script = f"import importlib, sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
    script += "import sdeinfer\nassert 'site' in sdeinfer.__file__\n"
    script += f"for name in {packages!r}: importlib.import_module(name)\n"
    script += "for name in dir(sdeinfer): getattr(sdeinfer, name)\n"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
