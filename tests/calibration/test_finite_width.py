"""Coverage of posteriors on real finite networks: parameters from the prior, data from the exact covariance chain.

Every data set is fitted by the law of its width, which is asserted to be calibrated. Beside it are printed the same law
with the mode of the sufficient statistics in place of the exact one, and the limit's law, whose bias shows: the data
tell variances to 4 % at n = 32 and to 0.3 % at n = 512, and the limit's are wrong by 5 % and 0.3 %.

The data sets run in parallel processes, an hour and a half on two cores; finished ones are kept in pytest's cache.
"""

import itertools

import jax.random as jr
import numpy as np
import pytest
from arviz_stats.base import array_stats
from calibration.finite_width import ASSUMED, CASES, IDENTIFIED, LAWS, NOT_MOVED, SIZES, data_set, ranks_of
from calibration.runs import run_all
from calibration.study import (
    assert_calibrated,
    importance_sample,
    nuts_draws,
    report,
    shares_held,
    statistics,
)
from helpers.budget import assert_estimate

DATA_SETS, MORE = {512: 300}, 40
"""Data sets by width, 200 where none are named; more at n = 512, where 200 once left a doubt about γ."""

MOST_LEFT_OUT = 0.5
"""Posteriors of few transitions are not asserted to be calibrated: some are of networks all of whose layers are out of
the range of the law. `check` says that they are of few, or that the layers are not those of the law."""

PATTERN_WORDS = {
    "full": "",
    "causal": ", causal mask",
    "prompts": ", two prompts of two tokens",
    "single precision": ", densities in single precision",
}


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "width"), CASES)
def test_posteriors_of_finite_networks_are_calibrated(pattern, width, first_seed, kept_results, record):
    fitted = _fitted(pattern, width, first_seed, kept_results)
    most = [each for each in fitted if each["left_out"] <= MOST_LEFT_OUT]
    by_nuts = sum(each["by_nuts"] for each in fitted)
    print(f"\n{pattern}, n = {width}: {by_nuts} fits by NUTS; {len(most)} sets have most transitions in range")
    for law in (*LAWS, NOT_MOVED):
        report(_ranks(fitted, law), f"{pattern}, n = {width}, {law}")
        report(_ranks(most, law), f"{pattern}, n = {width}, {law}, in range")
    by_limit = ", ".join(map(shares_held, _ranks(fitted, "limit").values()))
    record("coverage", {f"{width:,}{PATTERN_WORDS[pattern]}": [str(len(fitted)), *_cells(fitted), by_limit]})
    assert_calibrated(_ranks(most, "finite-width"), f"{pattern}, n = {width}")


@pytest.mark.slow
def test_posteriors_of_all_widths_together(first_seed, kept_results, record):
    """Of sets with most transitions in range, and of the others, which are not asserted; no set is fitted again."""
    cases = [case for case in CASES if case[0] in ("full", "causal")]
    every = [each for case in cases for each in _fitted(*case, first_seed, kept_results)]
    few, most = ([each for each in every if (each["left_out"] > MOST_LEFT_OUT) == is_few] for is_few in (True, False))
    for words, sets in (("all, at most half of the transitions", most), ("all, more than half", few)):
        report(_ranks(sets, "finite-width"), words)
        record("coverage", {f"{words} out of range": [f"{len(sets):,}", *_cells(sets), ""]})
    assert_calibrated(_ranks(most, "finite-width"), "all")


def _fitted(pattern: str, width: int, first_seed: int, kept_results) -> list[dict]:
    """Results of the data sets that are in range of the law."""
    found, sets = [], DATA_SETS.get(width, 200) if pattern == "full" else 200
    while len(fitted := [each for each in found if each]) < sets:
        first = first_seed + len(found)
        more = range(first, first + (MORE if found else sets))
        found += run_all(ranks_of, [(pattern, width, number) for number in more], kept_results)
    return fitted[:sets]


def _cells(fitted: list[dict]) -> list[str]:
    return list(map(shares_held, _ranks(fitted, "finite-width").values()))


def _ranks(found: list[dict], law: str) -> dict[str, np.ndarray]:
    return {name: np.array([each["ranks"][law][name] for each in found]) for name in IDENTIFIED}


@pytest.mark.slow
def test_importance_sampling_equals_nuts(key):
    """Means and variances are one within their Monte Carlo errors, on data sets of every width."""
    for number, width in enumerate(SIZES):
        truth, data = data_set(width, jr.fold_in(key, number))
        if data is None:
            continue
        prepared = statistics(data, ASSUMED["full"]["finite-width"])
        sampled, draws = importance_sample(prepared, key), nuts_draws(prepared, key)
        for name, power in itertools.product(("gamma", "c_gap"), (1, 2)):
            mean, _ = sampled.mean_and_sd(name)
            own, theirs = ((each[name] - mean) ** power for each in (sampled.draws, draws))
            expected = sampled.weights @ own
            error = np.sqrt(sampled.weights**2 @ (own - expected) ** 2)
            mcse = float(array_stats.mcse(theirs.reshape(4, -1), chain_axis=0, draw_axis=1, method="mean"))
            assert_estimate(theirs.mean(), expected, np.hypot(error, mcse))
