"""Posteriors and verdicts on networks of others: random shapes, tokens and masks, sampled from the definitions alone.

The networks share no code with the package. All 400 sets take a quarter of an hour on two cores; finished ones are kept
in pytest's cache, and `--held-out` takes sets that no rule was chosen by.
"""

import pytest
from calibration.judged import furthest, is_false_alarm, is_miss
from calibration.runs import run_all
from calibration.study import shares_held
from calibration.wide_family import judged
from helpers.budget import assert_within
from scipy import stats

SETS = 400
MOST_FALSE_ALARMS = 0.04
"""Of the fits that have transitions in the range of the law. Without one the verdict says so, which is no false one."""


@pytest.mark.slow
def test_posteriors_hold_the_truth_and_verdicts_trust_them(first_seed, kept_results, record):
    lines = run_all(judged, [(seed,) for seed in range(first_seed, first_seed + SETS)], kept_results)
    fits = [line for line in lines if line.get("in_range")]
    rows = {
        "all": lines,
        "refused": [line for line in lines if "refused" in line],
        "fitted, with transitions in range": fits,
        "trusted": [line for line in fits if line["trusted"]],
        "misses": [line for line in fits if is_miss(line)],
        "false alarms": [line for line in fits if is_false_alarm(line)],
    }
    counts = {name: len(each) for name, each in rows.items()}
    print(f"\n{counts}, misses {[each['seed'] for each in rows['misses']]}")
    record("wide_family", {name: [str(count)] for name, count in counts.items()})
    for name, symbol in (("gamma", "γ"), ("tau0", "τ0"), ("c_gap", "c₊ − c₋")):
        ranks = stats.norm.cdf([line["z"][name] for line in fits if name in line["z"]])
        record("wide_family_coverage", {symbol: [shares_held(ranks)]})
    assert len(fits) > 0.85 * SETS
    assert not rows["misses"]
    assert_within([furthest(line) for line in rows["trusted"]], "identified parameters of trusted fits")
    assert len(rows["false alarms"]) <= MOST_FALSE_ALARMS * len(fits)
