"""Posteriors of strengths, gains and temperatures are calibrated on networks of random residual blocks."""

import collections

import numpy as np
import pytest
from calibration.branches import ranks_of, ranks_of_today
from calibration.runs import run_all
from calibration.study import assert_calibrated, report, shares_held
from scipy.stats import norm

DATA_SETS, MORE = 200, 40
"""Number of data sets, and of those beside them for networks that are refused."""

FALSE_ALARMS = 0.04
"""Largest share of sets of these blocks that are not trusted."""


@pytest.mark.slow
def test_strengths_gains_and_temperatures_are_calibrated(kept_results, record):
    found = run_all(ranks_of, [(seed,) for seed in range(DATA_SETS + MORE)], kept_results)
    found = [each for each in found if "refused" not in each][:DATA_SETS]
    assert len(found) == DATA_SETS
    ranks = {name: np.array([each["ranks"][name] for each in found]) for name in found[0]["ranks"]}
    unadjusted = {name: np.array([each["unadjusted"][name] for each in found]) for name in ranks if "attention" in name}
    report(unadjusted, "branches, unadjusted")
    checked = [each for each in found if "trusted" in each]
    not_trusted = collections.Counter(each["verdict"][:80] for each in checked if not each["trusted"])
    print(f"{len(checked)} sets checked, not trusted: {dict(not_trusted)}")
    record("coverage_of_blocks", rows_of(ranks, unadjusted))
    assert sum(not_trusted.values()) <= FALSE_ALARMS * len(checked)
    assert_calibrated(ranks, "branches")


@pytest.mark.slow
def test_blocks_of_today_are_calibrated(kept_results, record):
    """Norms of queries and keys, caps and sinks, latent attention; experts with all kinds of scores."""
    results = run_all(ranks_of_today, [(seed,) for seed in range(100)], kept_results)
    sets = [result for result in results if "refused" not in result]
    ranks = {name: np.array([result["ranks"][name] for result in sets]) for name in sets[0]["ranks"]}
    checked = [result for result in sets if "trusted" in result]
    not_trusted = [result["verdict"][:80] for result in checked if not result["trusted"]]
    print(f"{len(sets)} sets, {len(checked)} of them checked, not trusted: {not_trusted}")
    record(
        "coverage_of_blocks",
        {f"today: {name}": row for name, row in rows_of(ranks, ranks).items() if "alone" not in name},
    )
    assert_calibrated(ranks, "blocks of today")


def rows_of(ranks: dict[str, np.ndarray], unadjusted: dict[str, np.ndarray]) -> dict[str, list[str]]:
    """The table of the record."""

    def row(name: str, of: dict[str, np.ndarray]) -> list[str]:
        known = of.get(f"{name}, shape known")
        return [shares_held(of[name]), "" if known is None else shares_held(known), f"{norm.ppf(of[name]).std():.2f}"]

    return {
        "strength of attention": row("attention.strength", ranks),
        "temperature, by a t law and adjusted by draws": row("attention.shape", ranks),
        "temperature, by the normal law alone": row("attention.shape", unadjusted),
        "strength of the MLP": row("mlp.strength", ranks),
        "gain of the MLP": row("mlp.shape", ranks),
    }


@pytest.mark.long
def test_ranks_of_one_network():
    found = ranks_of(63)  # a small network
    assert all(0 < rank < 1 for rank in found["ranks"].values())
