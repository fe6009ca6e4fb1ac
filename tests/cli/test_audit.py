"""The command `audit`: exit codes, its files, and one line for unusable input."""

import json
import textwrap

import pytest
from typer.testing import CliRunner

from sdeinfer.cli import app

MODEL = """
from helpers import equinox_transformer as of_tests

inputs = of_tests.prompt()
make, copied = of_tests.Transformer, of_tests.copied
"""


@pytest.fixture
def model(tmp_path):
    (tmp_path / "model.py").write_text(MODEL, encoding="utf-8")
    return tmp_path / "model.py"


def run(*flags):
    return CliRunner().invoke(app, ["audit", *map(str, flags)])


def test_a_correct_model_and_a_wrong_one(model, tmp_path):
    # Weights of a linear layer are uniform; the MLP has no biases.
    found = run(model, "--recipe", "lecun", "--out", tmp_path / "out")
    assert found.exit_code == 1, found.output
    written = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert written["passed"] is False
    assert written["verdict"] in found.output
    page = (tmp_path / "out" / "audit.html").read_text()
    assert "Audit of Transformer" in page
    assert "layers.2.mlp" in page
    assert run(model).exit_code == 0
    copied = run(f"{model}:copied")
    assert copied.exit_code == 1
    assert "are equal" in copied.output
    assert run(f"{model}:copied", "--allow", "copies").exit_code == 0


def test_what_is_declared_and_not_tested_has_a_code_of_its_own(model):
    model.write_text(MODEL.replace("of_tests.prompt()", "of_tests.prompt()[:1]"), encoding="utf-8")
    found = run(model, "--no-causal")
    assert found.exit_code == 3, found.output
    assert "NOT TESTED  causal=False: these inputs have no tokens" in found.output
    assert run(model, "--no-causal", "--allow", "causal").exit_code == 0


def test_what_is_declared_reaches_the_audit(model, monkeypatch):
    given = {}
    monkeypatch.setattr("sdeinfer.audit", lambda make, inputs, **declared: given.update(declared) or 1 / 0)
    run(model, "--causal", "--norm", "pre", "--allow", "zeros", "--allow", "copies", "--seed", 3)
    expected = {"causal": True, "norm": "pre", "allow": ["zeros", "copies"], "seed": 3}
    assert {name: given[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("files", "model", "line"),
    [
        ({}, "model.py", "no such file"),
        ({"model.py": "1 / 0"}, "model.py", "cannot be run (ZeroDivisionError"),
        ({"model.py": "import no_such_library"}, "model.py", "no_such_library is not installed: pip install"),
        ({"model.py": "pass"}, "model.py:net", "no function 'net' that makes a model"),
        ({}, "config.json", "no such configuration"),
        ({"config.json": "{"}, "config.json", "is not JSON"),
        ({"config.json": "{}"}, "config.json", "no `model_type` in it"),
        ({"model.py": "def make(seed): return 3"}, "model.py", "model: a module of PyTorch, Flax"),
        (
            {"model.py": "def make(): return 1 / 0"},
            "model.py",
            "make makes no model of a seed, or without arg",
        ),
    ],
)
def test_unusable_input(files, model, line, tmp_path):
    for name, text in files.items():
        (tmp_path / name).write_text(textwrap.dedent(text), encoding="utf-8")
    found = run(tmp_path / model)
    assert found.exit_code == 2
    (message,) = found.output.strip().splitlines()
    assert line in message
