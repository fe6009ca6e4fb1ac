"""Versions of transformers whose GPT-2 has not the scale 1/√(2L) of its last matrices fail an audit; others pass.

Each is installed by uv, with what it needs, into a folder of its own, which is kept in that for temporary files.
`SDEINFER_TORCH_PYTHON` names an interpreter with torch and the dependencies of this package, which imports them; its
default is the one that runs the tests.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch_interpreter

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
FOLDER = Path(tempfile.gettempdir()) / "sdeinfer-published"
SCRIPT = """
import json, torch, transformers, sdeinfer as si
torch.manual_seed(0)
config = transformers.GPT2Config(vocab_size=99, n_embd=256, n_layer=6, n_head=4, bos_token_id=0, eos_token_id=0)
found = si.audit(transformers.GPT2Model(config), recipe="gpt2")
print(json.dumps([transformers.__version__, found.verdict]))
"""


def folder_with(requirement: str) -> Path:
    """A folder with a version of transformers."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    torch_interpreter.require("torch, equinox")
    folder = FOLDER / requirement
    if not (folder / "complete").exists():
        where = ["--python", torch_interpreter.PYTHON, "--target", str(folder)]
        command = [uv, "pip", "install", "--quiet", *where, requirement]
        run = subprocess.run(command, capture_output=True, text=True)
        if run.returncode:
            pytest.skip(f"{requirement} cannot be installed: {' '.join(run.stderr.split())[-300:]}")
        (folder / "complete").touch()
    return folder


def verdict_of(requirement: str) -> tuple[str, str]:
    """The version, and the verdict on its GPT-2."""
    path = os.pathsep.join([str(ROOT), str(folder_with(requirement))])
    printed = torch_interpreter.run("-c", SCRIPT, libraries="torch, equinox", PYTHONPATH=path)
    version, verdict = json.loads(printed.splitlines()[-1])
    print(f"\ntransformers {version}: {verdict}")
    return version, verdict


def test_gpt2_without_its_residual_scale_fails():
    version, verdict = verdict_of("transformers==5.10.0")
    assert version == "5.10.0"
    assert verdict.startswith("failed: GPT2Model: attention.strength is 3.")
    assert verdict.endswith("√(2L) = 3.46: the factor 1/√(2L) of the attention and mlp output matrix is missing")


def test_gpt2_of_the_latest_version_passes():
    _, verdict = verdict_of("transformers")
    assert verdict.startswith("passed: GPT2Model: ")
