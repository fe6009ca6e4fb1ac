"""What the README promises: its example runs, and the files that it names exist."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.printed_outputs import difference, scripts

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
(SCRIPT,) = scripts(README)
EXAMPLE = SCRIPT.code


@pytest.mark.docs
def test_the_example_runs(capsys):
    assert len(EXAMPLE.strip().splitlines()) <= 15
    names: dict = {}
    exec(compile(EXAMPLE, "README.md", "exec"), names)
    assert names["paths"].shape == (512, 2, 4, 4)
    assert not difference(SCRIPT, capsys.readouterr().out)
    assert SCRIPT.output.startswith("conditional: gamma ± ")


@pytest.mark.docs
def test_the_example_passes_a_type_checker(tmp_path):
    """From a checkout; `test_package` checks it in environments with a wheel."""
    (tmp_path / "example.py").write_text(EXAMPLE, encoding="utf-8")
    settings = {"extraPaths": [str(ROOT)], "venvPath": str(Path(sys.prefix).parent), "venv": Path(sys.prefix).name}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings), encoding="utf-8")
    subprocess.run([Path(sys.executable).with_name("pyright"), "example.py"], check=True, cwd=tmp_path)


def test_it_is_one_screen():
    assert len(README.splitlines()) <= 50
