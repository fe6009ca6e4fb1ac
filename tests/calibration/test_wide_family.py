"""Posteriors and verdicts on networks of others: random shapes, tokens and masks, sampled from the definitions alone.

The networks come from `wide_family`, which shares no code with the package. All 400 sets take one and a half hours on
two cores; finished ones are kept in pytest's cache, and `--held-out` takes sets that no rule was chosen by:

    pytest -m slow -s tests/calibration/test_wide_family.py
"""

import pytest
from budget import assert_within
from calibration.runs import run_all
from calibration.study import shares_held
from calibration.wide_verdicts import judged
from scipy import stats

SETS = 400
FAR, NEAR = 4.0, 2.0
"""A *miss* is a trusted fit with an identified parameter further than `FAR` posterior sds from the truth; a *false
alarm* one that is not trusted though none is further than `NEAR`."""

MOST_FALSE_ALARMS = 0.04
"""Of the fits that have transitions in the range of the law. Without one the verdict says so, which is no false one."""


def furthest(line: dict) -> float:
    """The largest deviation of an identified parameter."""
    return max([abs(z) for name, z in line["z"].items() if name not in line["unidentified"]], default=0.0)


@pytest.mark.slow
def test_posteriors_hold_the_truth_and_verdicts_trust_them(first_seed, kept_results, record):
    lines = run_all(judged, [(seed,) for seed in range(first_seed, first_seed + SETS)], kept_results)
    assert not [line for line in lines if "error" in line]
    fits = [line for line in lines if line.get("in_range")]
    misses = [line["seed"] for line in fits if line["trusted"] and furthest(line) > FAR]
    alarms = [line["seed"] for line in fits if not line["trusted"] and furthest(line) < NEAR]
    trusted = [line for line in fits if line["trusted"]]
    counts = f"{len(fits)} of {len(lines)} fitted in range, {len(trusted)} trusted"
    print(f"\n{counts}, misses {misses}, false alarms {alarms}")
    refused = [line for line in lines if "refused" in line]
    rows = {"all": lines, "refused": refused, "fitted, with transitions in range": fits, "trusted": trusted}
    rows |= {"misses": misses, "false alarms": alarms}
    record("wide_family", {name: [str(len(each))] for name, each in rows.items()})
    for name, symbol in (("gamma", "γ"), ("tau0", "τ0"), ("c_gap", "c₊ − c₋")):
        ranks = stats.norm.cdf([line["z"][name] for line in fits if name in line["z"]])
        record("wide_family_coverage", {symbol: [shares_held(ranks)]})
    assert len(fits) > 0.85 * SETS
    assert not misses
    assert_within([furthest(line) for line in trusted], "identified parameters of trusted fits")
    assert len(alarms) <= MOST_FALSE_ALARMS * len(fits)
