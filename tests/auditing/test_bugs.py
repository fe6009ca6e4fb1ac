"""Audits find and name bugs in initialisations, and raise no alarm after the fix.

`SDEINFER_TORCH_PYTHON` names an interpreter with torch, transformers, flax and this package; its default is the one
that runs the tests.
"""

import json

import pytest
import torch_interpreter

pytestmark = pytest.mark.torch

SEEDS = 10
SAME_LAW = ("scaling_of_up",)
"""Bugs that leave the law of increments as it is: the factor of a product is in another of its matrices."""

LEAST_NAMED, MOST_ALARMS = 0.9, 0.02
"""Shares of all networks."""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory) -> dict[str, dict]:
    """For each bug its cause, and the verdicts before and after the fix."""
    file = tmp_path_factory.mktemp("bugs") / "verdicts.json"
    libraries = "torch, transformers, flax"
    torch_interpreter.run("audited_bugs.py", "--seeds", SEEDS, "--json", file, libraries=libraries)
    return json.loads(file.read_text())


def test_bugs_are_found(verdicts):
    for name, each in verdicts.items():
        passed = [verdict for verdict in each["before"] if verdict.startswith("passed")]
        assert len(passed) == (SEEDS if name in SAME_LAW else 0), (name, passed)


def test_bugs_are_named(verdicts):
    named = [
        each["cause"] in verdict
        for name, each in verdicts.items()
        if name not in SAME_LAW
        for verdict in each["before"]
    ]
    assert sum(named) >= LEAST_NAMED * len(named)


def test_fixed_networks_pass(verdicts):
    failed = [verdict for each in verdicts.values() for verdict in each["after"] if not verdict.startswith("passed")]
    assert len(failed) <= MOST_ALARMS * SEEDS * len(verdicts), failed
    assert all("\n" not in verdict for verdict in failed)
