"""Verdicts of `check` against what is true: a confusion matrix over data sets with known parameters or known failures.

A verdict is *conditional* if it names the wrong size of an architecture as one that the data do not identify.
A *miss* is a fit that is trusted without such a condition on a wrong size, although a parameter that it calls told is
more than 4 posterior standard deviations from the truth. A *false alarm* is a fit that is not trusted although all
parameters are within 2. The verdicts do not see the truth.

The data sets run in parallel processes; finished ones are kept in pytest's cache and are not run again by the same
source code (`--cache-clear` removes them). `--held-out` takes data sets that no rule was chosen by.
"""

import collections
from typing import Any

import pytest
from calibration.runs import run_all
from calibration.verdicts import PLANTED, UNIDENTIFIED, cases, judged

FAR, NEAR = 4.0, 2.0
FALSE_ALARMS = {"in range": 0.05, "at the edge": 0.15}
"""Bounds on the rate of false alarms."""

MISSED = 0.1
"""Bound on the rate at which a planted failure is trusted; a τ0 at the threshold may be told by chance."""


def identified(each: dict[str, Any]) -> dict[str, float]:
    return {name: z for name, z in each["z"].items() if name not in each["unidentified"]}


def is_miss(each: dict[str, Any]) -> bool:
    far = any(abs(z) > FAR for z in identified(each).values())
    return each["trusted"] and not each["conditional"] and far


def is_false_alarm(each: dict[str, Any]) -> bool:
    good = each["group"] in FALSE_ALARMS
    return good and not each["trusted"] and all(abs(z) < NEAR for z in each["z"].values())


@pytest.mark.slow
def test_verdicts_are_right(first_seed, kept_results, record):
    found = run_all(judged, cases(first_seed), kept_results)
    rows = collections.defaultdict(list)
    for each in found:
        rows[each["group"], each["name"]].append(each)
    print(f"\n{'':42} {'sets':>5} {'refused':>8} {'trusted':>8} {'conditional':>12} {'false alarms':>13} {'misses':>7}")
    for (_, name), judged_ in rows.items():
        ran = [each for each in judged_ if "z" in each]
        counts = (
            len(judged_),
            len(judged_) - len(ran),
            sum(each["trusted"] and not each["conditional"] for each in ran),
            sum(each["trusted"] and each["conditional"] for each in ran),
            sum(map(is_false_alarm, ran)),
            sum(map(is_miss, ran)),
        )
        causes = collections.Counter(each["cause"] for each in ran if each["cause"])
        columns = "".join(f"{count:{size}}" for count, size in zip(counts, (6, 9, 9, 13, 14, 8), strict=True))
        print(f"{name:42}{columns}  {dict(causes)}")
        words = "; ".join(f"{count}: {cause}" for cause, count in causes.most_common())
        record("verdicts", {name: [*map(str, counts), words]})
    ran = [each for each in found if "z" in each]
    assert not [each for each in found if "error" in each]
    assert not [each for each in ran if is_miss(each)]
    for group, most in FALSE_ALARMS.items():
        mine = [each for each in ran if each["group"] == group]
        assert sum(map(is_false_alarm, mine)) <= most * len(mine), group
    for name in PLANTED:
        if name == "usual temperature":  # a shaped Transformer with a small τ0, out of the range of the law
            continue
        mine = [each for each in ran if each["name"] == name]
        assert sum(each["trusted"] for each in mine) <= MISSED * len(mine), name
    for name, (_, _, parameter) in UNIDENTIFIED.items():
        mine = [each for each in ran if each["name"] == name]
        assert sum(parameter in each["unidentified"] for each in mine) >= (1 - MISSED) * len(mine), name
