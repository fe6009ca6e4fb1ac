"""The package as its users get it: what a wheel holds, which names are public, which way imports point."""

import ast
import importlib
import pkgutil
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

import sdeinfer as si

ROOT = Path(__file__).parent.parent
ROOMS = """
    covariance terms layers passes auditing blocks solve criteria observation networks likelihood models infer
    diagnostics meanfield tuning plots report
""".split()
"""Imports point backwards in this list only."""

LAZY = [
    importlib.import_module(name)
    for name in (
        "sdeinfer",
        *(f"sdeinfer.{room}" for room in "infer diagnostics meanfield plots auditing report".split()),
    )
]
"""Packages whose names are imported when they are used; a stub names them."""

UNUSED = set("torch flax jax numpy scipy pandas xarray matplotlib arviz arviz_base arviz_stats arviz_plots".split())
"""What `import sdeinfer` leaves alone."""

OPTIONAL = {"sdeinfer.modules.torch", "sdeinfer.modules.flax"}
"""Modules that need a library on which the package does not depend."""


def source_folder(room: str) -> Path:
    return ROOT / "models" if room == "models" else ROOT / "sdeinfer" / room


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


@pytest.mark.long
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
        "from sdeinfer import check, fit, observe",
        "from sdeinfer.diagnostics import Check, check as the_same",
        "assert check is the_same is si.check and observe is si.observe and fit is si.infer.fit",
        "assert si.layers.AbstractLayer and callable(si.models.full_path)",
    )


@pytest.mark.long
def test_numpyro_is_whole_where_arviz_came_first():
    """ArviZ leaves a NumPyro that is loaded when a name of it is looked up: a subpackage imported then comes twice."""
    in_new_process(
        "import arviz_stats",
        "import numpyro.distributions as dist",
        "import sdeinfer as si",
        "si.NUTS",
        "import numpyro",
        "assert numpyro.distributions.distribution and numpyro.infer.hmc",
    )


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room):
    roots = {file.stem for file in (ROOT / "sdeinfer").glob("_[!_]*.py")}
    allowed = {*ROOMS[: ROOMS.index(room) + 1], *roots, "parameters"}
    for file in source_folder(room).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sdeinfer."):
                assert node.module.split(".")[1] in allowed, f"{file.name} imports {node.module}"


def place_of_tests(room: Path) -> Path:
    """The file that the docstring of a room names, or else the one of its place and name."""
    named = re.search(r"Tests: `(\S+)`\.", ast.get_docstring(ast.parse((ROOT / room).read_text("utf-8"))) or "")
    if named:
        return Path(named[1])
    folder = room.parent.relative_to("sdeinfer") if room.parts[0] == "sdeinfer" else room.parent
    return Path("tests", folder, f"test_{room.stem.removeprefix('_')}.py")


def test_every_room_has_its_tests():
    files = [*(ROOT / "sdeinfer").rglob("*.py"), *(ROOT / "models").glob("*.py")]
    rooms = [file.relative_to(ROOT) for file in files if file.name != "__init__.py"]
    assert len(rooms) > 100
    assert not [str(room) for room in rooms if not (ROOT / place_of_tests(room)).is_file()]


def test_what_can_be_imported_is_documented():
    """The other direction, documented names that are not there, fails the build of the site."""
    directive = re.compile(r"^\.\. (?:auto\w+|py:\w+):: (?:\w+\.)*(\w+)", re.MULTILINE)
    pages = (ROOT / "docs" / "api").glob("*.rst")
    documented = {name for page in pages for name in directive.findall(page.read_text(encoding="utf-8"))}
    packages = {f"sdeinfer.{each.name}" for each in pkgutil.iter_modules(si.__path__) if each.ispkg} - {"sdeinfer.cli"}
    for package in ("sdeinfer", "sdeinfer.models", *packages):
        module = importlib.import_module(package)
        names = {name for name in getattr(module, "__all__", dir(module)) if name[0] != "_"}
        public = {name for name in names if not isinstance(getattr(module, name), ModuleType)}
        assert public <= documented, package


def test_type_checkers_know_every_model():
    stub = ast.parse((ROOT / "sdeinfer" / "models.pyi").read_text(encoding="utf-8"))
    kinds = {node.target.id: node.annotation.id for node in stub.body if isinstance(node, ast.AnnAssign)}  # pyright: ignore
    assert kinds == {name: type(getattr(si.models, name)).__name__ for name in dir(si.models) if name in kinds}
    models = {name for name in dir(si.models) if isinstance(getattr(si.models, name), si.likelihood.AbstractModel)}
    assert set(kinds) >= models


def test_changelog_and_citation_name_the_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    assert si.__version__ == version
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def build(source: Path, folder: Path, form: str) -> Path:
    subprocess.run(["uv", "build", f"--{form}", "--quiet", "--out-dir", folder, source], check=True)
    (built,) = folder.glob("*.whl" if form == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> dict[str, Path]:
    """The wheel and the source distribution of this checkout."""
    folder = tmp_path_factory.mktemp("built")
    unused = shutil.ignore_patterns(".*", "calibration", "*.egg-info", "build", "dist", "_build")
    shutil.copytree(ROOT, folder / "source", ignore=unused)
    return {form: build(folder / "source", folder / form, form) for form in ("wheel", "sdist")}


def members(wheel: Path) -> dict[str, int]:
    """Names of the files, and their checksums."""
    with zipfile.ZipFile(wheel) as archive:
        return {member.filename: member.CRC for member in archive.infolist()}


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_no_other(built):
    files = [file for file in (ROOT / "sdeinfer").rglob("*") if file.suffix in {".py", ".pyi", ".jinja", ".typed"}]
    expected = {file.relative_to(ROOT).as_posix() for file in files}
    expected |= {f"sdeinfer/models/{file.name}" for file in (ROOT / "models").glob("*.py")}
    names = set(members(built["wheel"]))
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


@pytest.mark.slow
def test_the_source_distribution_builds_the_same_wheel_and_holds_the_tests(built, tmp_path):
    assert members(build(built["sdist"], tmp_path, "wheel")) == members(built["wheel"])
    with tarfile.open(built["sdist"]) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {
        "LICENSE",
        "CHANGELOG.md",
        "models/full_path.py",
        "tests/conftest.py",
        "tests/helpers/references.py",
    } <= names
    folders = {name.split("/")[0] for name in names if "/" in name}
    assert folders == {"sdeinfer", "sdeinfer.egg-info", "models", "tests"}


@pytest.mark.slow
def test_a_package_index_accepts_both(built):
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *built.values()], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["wheel", "sdist"])
def test_it_runs_with_its_dependencies_alone(form, built, tmp_path):
    subprocess.run(["uv", "venv", "--quiet", "--python", sys.executable, tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run(["uv", "pip", "install", "--quiet", "--python", python, built[form]], check=True)
    packages = [module.name for module in pkgutil.walk_packages(si.__path__, "sdeinfer.")] + ["sdeinfer.models"]
    packages = [name for name in packages if name not in OPTIONAL]
    lines = (
        "import importlib, jax, numpy, sdeinfer as si",
        f"assert si.__file__.startswith({str(tmp_path)!r})",
        f"for name in {packages!r}: importlib.import_module(name)",
        "for name in dir(si): getattr(si, name)",
        "layer = si.ShapedTransformer(gamma=0.6, tau0=1.0, c_plus=2.0, c_minus=-2.0)",
        "V0 = si.equicorrelated(tokens=2, correlation=0.0, norm=1.0)",
        "paths = si.simulate(layer, V0, [0.1], paths=8, key=jax.random.key(0))",
        "assert paths.shape == (8, 1, 2, 2) and numpy.isfinite(paths).all()",
    )
    subprocess.run([python, "-c", "\n".join(lines)], check=True, cwd=tmp_path)
    command = python.with_name("sdeinfer")
    subprocess.run([command], check=True, cwd=tmp_path, capture_output=True)
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}', encoding="utf-8")
    refused = subprocess.run([command, "audit", "config.json"], cwd=tmp_path, capture_output=True, text=True)
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1)
    assert refused.stderr.endswith(": pip install torch transformers\n")
    example = tmp_path / "example.py"
    example.write_text((ROOT / "README.md").read_text(encoding="utf-8").split("```python\n")[1].split("```")[0])
    subprocess.run(
        [Path(sys.executable).with_name("pyright"), "--pythonpath", python, example], check=True, cwd=tmp_path
    )
