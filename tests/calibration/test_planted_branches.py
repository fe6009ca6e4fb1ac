"""Networks with one thing wrong are named by `check`, and correct ones pass."""

import collections

import pytest
from calibration import planted_blocks
from calibration.planted_branches import CAUSES, judged
from calibration.runs import run_all

SEEDS = 20

CORRECT = ("right", "uniform weights")

LEAST_NAMED = 0.9
"""Least share of networks of which the cause is named, or is seen at all after training."""


def verdict_on(found: dict) -> str:
    """The cause that `check` names: a failed test, or else declared strengths that differ."""
    if CAUSES[found["name"]] == "declared" and found["declared"]:
        return "declared"
    return found["cause"] or ("declared" if found["declared"] else "")


def right_of(name: str, counts: collections.Counter) -> int:
    """How many networks have the verdict that they should have; after training any cause will do."""
    return SEEDS - counts[""] if name == "100 steps of training" else counts[CAUSES[name]]


@pytest.mark.slow
def test_what_is_wrong_is_named(kept_results, record):
    found = run_all(judged, [(name, seed) for name in CAUSES for seed in range(SEEDS)], kept_results)
    named = collections.defaultdict(collections.Counter)
    for each in found:
        named[each["name"]][verdict_on(each)] += 1
    for name, counts in named.items():
        print(f"{name:30} {dict(counts)}")
    record("planted", {name: [str(right_of(name, counts))] for name, counts in named.items()})
    assert sum(named[name][""] for name in CORRECT) >= (1 - 0.04) * len(CORRECT) * SEEDS
    assert all(name in CORRECT or right_of(name, named[name]) >= LEAST_NAMED * SEEDS for name in CAUSES)


@pytest.mark.slow
def test_what_is_wrong_with_blocks_of_today_is_found(kept_results, record):
    """By a failed test, or by a note on the declared strength."""
    names = planted_blocks.FAULTS
    results = run_all(planted_blocks.judged, [(name, seed) for name in names for seed in range(SEEDS)], kept_results)
    seen = collections.Counter(result["name"] for result in results if result["failed"] or result["declared"])
    for name in names:
        causes = collections.Counter(cause for r in results if r["name"] == name for cause in r["failed"][:1])
        print(f"{name:50} {seen[name]} of {SEEDS}: {dict(causes)}")
    named = collections.Counter(result["name"] for result in results if result["named"])
    counts = {name: str(named[name]) if name in planted_blocks.NAMED_AS else "" for name in names}
    record("planted_blocks", {name: [str(seen[name]), counts[name]] for name in names})
    right = [name for name in names if name.startswith("right")]
    assert sum(seen[name] for name in right) <= 0.04 * len(right) * SEEDS
    assert sum(seen[name] >= LEAST_NAMED * SEEDS for name in names if name not in right) >= 8


@pytest.mark.long
def test_a_planted_layer_is_named():
    assert verdict_on(judged("one layer × 1.5", 0)) == CAUSES["one layer × 1.5"]
