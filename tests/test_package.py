"""The package as its users get it: what a wheel holds, which names are public, which way imports point."""

import ast
import pkgutil
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import sdeinfer as si

ROOT = Path(__file__).parent.parent
ROOMS = [
    "covariance",
    "layers",
    "solve",
    "observe",
    "networks",
    "likelihood",
    "models",
    "infer",
    "check",
    "covariance_dataset",
    "plots",
    "report",
]
"""Imports point backwards in this list only."""

PUBLIC = {
    "InputError",
    "LowPrecisionWarning",
    "Observer",
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
    "read",
    "sample_networks",
    "simulate",
    "summarise",
    "validate",
    "write",
}


def source_folder(room: str) -> Path:
    return ROOT / "models" if room == "models" else ROOT / "sdeinfer" / room


def test_public_names_are_there():
    assert all(hasattr(si, name) for name in PUBLIC)
    assert callable(si.models.full_path)


@pytest.mark.parametrize("room", ROOMS)
def test_imports_point_one_way(room):
    allowed = {*ROOMS[: ROOMS.index(room) + 1], "_files"}
    for file in source_folder(room).glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sdeinfer."):
                imported = node.module.split(".")[1]
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
    assert "sdeinfer/report/page.html.jinja" in names
    packages = [module.name for module in pkgutil.walk_packages(si.__path__, "sdeinfer.")] + ["sdeinfer.models"]
    script = f"import importlib, sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
    script += "import sdeinfer\nassert 'site' in sdeinfer.__file__\n"
    script += f"for name in {packages!r}: importlib.import_module(name)\n"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
