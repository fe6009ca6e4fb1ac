"""Audits find and name bugs in initialisations, and raise no alarm after the fix; the first two seeds are known."""

import audited_jax  # noqa: F401  registers its bugs
import audited_torch  # noqa: F401
import pytest
from audited import BUGS
from torch_models import TORCH

pytestmark = TORCH

SEEDS = range(10)
SAME_LAW = ("scaling_of_up",)
"""Bugs that leave the law of increments as it is: the factor of a product is in another of its matrices."""

LEAST_NAMED, MOST_ALARMS = 0.9, 0.02
"""Shares of all networks."""


def passed(verdicts) -> int:
    return sum(each.startswith("passed") for each in verdicts)


@pytest.fixture(scope="module")
def verdicts() -> dict[str, tuple[list[str], list[str]]]:
    """Before and after the fix."""
    return {name: (bug.verdicts(SEEDS, fixed=False), bug.verdicts(SEEDS, fixed=True)) for name, bug in BUGS.items()}


def test_bugs_are_found_and_named(verdicts, record):
    found = {name: BUGS[name].row(*both) for name, both in verdicts.items()}
    record("audited_bugs", {BUGS[name].says: row for name, row in found.items()})
    for row in found.items():
        print(*row, sep=" | ")
    for name, (before, _) in verdicts.items():
        assert passed(before) == (len(SEEDS) if name in SAME_LAW else 0), (name, before)
    named = [
        BUGS[name].cause in each for name, (before, _) in verdicts.items() if name not in SAME_LAW for each in before
    ]
    assert sum(named) >= LEAST_NAMED * len(named)


def test_fixed_networks_pass(verdicts):
    failed = [each for _, after in verdicts.values() for each in after if not each.startswith("passed")]
    assert len(failed) <= MOST_ALARMS * len(SEEDS) * len(verdicts), failed
    assert all("\n" not in verdict for verdict in failed)
