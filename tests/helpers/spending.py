"""What the whole suite may spend on false failures; statistical assertions, `budget`, take their thresholds from it.

A correct library fails this suite with probability at most `SUITE` over the choice of all seeds. Every comparison, that
is every call of an assertion of `budget`, gets an equal share; a comparison of several numbers divides its share among
them (Bonferroni). Nothing is tuned: a threshold follows from the share, and the error bars from the samples.

The share is `SUITE / COMPARISONS`, where `COMPARISONS` counts the tests of every marker: one run of each kind of tests,
in whatever order and however many processes, spends no more than `SUITE`. Each kind has its own part. A process that
makes more comparisons of a kind than were declared fails at once. Of several, each reports to pytest what it has spent,
and the run fails where the sum is larger (`conftest`).
"""

from collections import Counter
from collections.abc import Mapping

SUITE = 1e-3
"""Probability that any test of a correct library fails, whatever its marker."""

DECLARED = {"default": 800, "long": 400, "slow": 900, "docs": 60, "torch": 60, "benchmark": 20}
"""How many statistical comparisons the tests of each kind may make; the next one is an error, not a bigger budget."""

COMPARISONS = sum(DECLARED.values())

SHARE = SUITE / COMPARISONS
"""Probability that one comparison fails."""

_spent: Counter[str] = Counter()
_kind = "default"


def begin(kind: str) -> None:
    """The comparisons that follow are of a test of this kind."""
    global _kind
    _kind = kind


def spend(comparisons: Mapping[str, int]) -> None:
    """Count comparisons of each kind that are made, here or in another process."""
    _spent.update(comparisons)


def spent() -> dict[str, int]:
    """How many comparisons of each kind were made."""
    return dict(_spent)


def overspent() -> dict[str, int]:
    """The kinds of which more comparisons were made than declared, and how many."""
    return {kind: count for kind, count in _spent.items() if count > DECLARED[kind]}


def share() -> float:
    """Take one comparison's share of the budget."""
    spend({_kind: 1})
    if overspent():
        raise RuntimeError(f"budget: {DECLARED[_kind]} comparisons of {_kind} tests were declared, and all are made")
    return SHARE
