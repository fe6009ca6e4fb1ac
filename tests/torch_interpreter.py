"""The interpreter that has PyTorch: `SDEINFER_TORCH_PYTHON`, or the one that runs the tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PYTHON = os.environ.get("SDEINFER_TORCH_PYTHON", sys.executable)


def require(libraries: str) -> None:
    """Skip the test where the interpreter does not import libraries, as "torch, transformers"."""
    probe = subprocess.run([PYTHON, "-c", f"import {libraries}"], capture_output=True, text=True)
    if probe.returncode:
        pytest.skip(f"{PYTHON}: set SDEINFER_TORCH_PYTHON: {' '.join(probe.stderr.split())[-200:]}")


def run(script: str, *arguments: object, libraries: str = "torch, transformers, equinox", **environment: str) -> str:
    """Run a script of this folder, or "-c" and a program, with this package; print and return its output."""
    require(libraries)
    command = [PYTHON, script if script == "-c" else str(TESTS / script), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(TESTS.parent), "HF_HUB_OFFLINE": "1"} | environment
    printed = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True).stdout
    print(printed, end="")
    return printed
