"""Verdicts of `check` against what is true: a confusion matrix over data sets with known parameters or known failures.

A verdict is *conditional* if it names the wrong size of an architecture as one that the data do not identify; such a
fit is no miss. The verdicts do not see the truth. Finished data sets are kept in pytest's cache, and are not run again
by the same source code (`--cache-clear` removes them). `--held-out` takes data sets that no rule was chosen by.
"""

import collections

import pytest
from calibration.judged import is_false_alarm, is_miss
from calibration.runs import run_all
from calibration.verdicts import PLANTED, UNIDENTIFIED, cases, judged

FALSE_ALARMS = {"in range": 0.05, "at the edge": 0.15}
"""Bounds on the rate of false alarms."""

MISSED = 0.1
"""Bound on the rate at which a planted failure is trusted; a τ0 at the threshold may be identified by chance."""


def counts(every: list[dict]) -> dict[str, int]:
    """Columns of the table, of the data sets of one name."""
    ran = [each for each in every if "z" in each]
    trusted = [each for each in ran if each["trusted"]]
    conditional = [each for each in trusted if each["wrong_size_named"]]
    return {
        "sets": len(every),
        "refused": len(every) - len(ran),
        "trusted": len(trusted) - len(conditional),
        "conditional": len(conditional),
        "false alarms": sum(each["group"] in FALSE_ALARMS and is_false_alarm(each) for each in ran),
        "misses": sum(is_miss(each) and not each["wrong_size_named"] for each in ran),
    }


@pytest.mark.slow
def test_verdicts_are_right(first_seed, kept_results, record):
    rows = collections.defaultdict(list)
    for each in run_all(judged, cases(first_seed), kept_results):
        rows[each["name"]].append(each)
    found = {name: counts(every) for name, every in rows.items()}
    for name, every in rows.items():
        causes = collections.Counter(each["cause"] for each in every if each.get("cause"))
        words = "; ".join(f"{count}: {cause}" for cause, count in causes.most_common())
        record("verdicts", {name: [*map(str, found[name].values()), words]})
        print(f"{name}: {found[name]}; {words}")
    assert not [name for name, each in found.items() if each["misses"]]
    for group, most in FALSE_ALARMS.items():
        assert found[group]["false alarms"] <= most * found[group]["sets"], group
    for name in PLANTED.keys() - {"usual temperature"}:  # a shaped Transformer with a small τ0, out of range
        each = found[name]
        assert each["trusted"] + each["conditional"] <= MISSED * (each["sets"] - each["refused"]), name
    for name, (_, _, parameter) in UNIDENTIFIED.items():
        ran = [each for each in rows[name] if "z" in each]
        assert sum(parameter in each["unidentified"] for each in ran) >= (1 - MISSED) * len(ran), name
