"""Processes of a user, for benchmarks: byte code is kept, and nothing compiled is there."""

import os
import subprocess


def output(*command: str, **variables: str) -> str:
    """The text that a process prints."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "PYTHONDONTWRITE"))}
    environment = kept | {"SDEINFER_NO_CACHE": "1"} | variables
    return subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
