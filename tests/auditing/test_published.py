"""Versions of transformers whose GPT-2 has not the scale 1/√(2L) of its last matrices fail an audit; others pass.

Each is installed by uv into an environment of its own, which is kept in the folder for temporary files: some minutes.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
FOLDER = Path(tempfile.gettempdir()) / "sdeinfer-published"
PYTORCH = "https://download.pytorch.org/whl/cpu"
SCRIPT = """
import json, torch, transformers, sdeinfer as si
torch.manual_seed(0)
config = transformers.GPT2Config(vocab_size=99, n_embd=256, n_layer=6, n_head=4, bos_token_id=0, eos_token_id=0)
found = si.audit(transformers.GPT2Model(config), recipe="gpt2")
print(json.dumps([transformers.__version__, found.verdict]))
"""


def python_with(requirement: str) -> Path:
    """The interpreter of an environment with a version of transformers, and what this package needs."""
    uv = shutil.which("uv")
    if uv is None:
        pytest.skip("uv is not installed")
    place = FOLDER / requirement.replace("=", "-")
    python = place / "bin" / "python"
    if not (place / "complete").exists():
        install = [uv, "pip", "install", "--quiet", "--python", str(python), "--index", PYTORCH]
        install += ["--index-strategy", "unsafe-best-match", requirement, "torch", str(ROOT)]
        for command in ([uv, "venv", "--quiet", "--clear", "--python", sys.executable, str(place)], install):
            run = subprocess.run(command, capture_output=True, text=True)
            if run.returncode:
                pytest.skip(f"{requirement} cannot be installed: {' '.join(run.stderr.split())[-300:]}")
        (place / "complete").touch()
    return python


def verdict_of(requirement: str) -> tuple[str, str]:
    """The version, and the verdict of its GPT-2 by this source code."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [str(python_with(requirement)), "-c", SCRIPT]
    run = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    version, verdict = json.loads(run.stdout.splitlines()[-1])
    print(f"\ntransformers {version}: {verdict}")
    return version, verdict


def test_gpt2_without_its_residual_scale_fails():
    version, verdict = verdict_of("transformers==5.10.0")
    assert version == "5.10.0"
    assert verdict.startswith("failed: GPT2Model: attention.strength is 3.")
    for role in ("attention output", "mlp output"):
        assert f"the factor 1/√(2L) of the {role} matrix is missing" in verdict


def test_gpt2_of_the_latest_version_passes():
    _, verdict = verdict_of("transformers")
    assert verdict.startswith("passed: GPT2Model: ")
