"""What was not declared, or is not identified: prompts in the place of networks, masks, and softmaxes that choose."""

import collections

import pytest
from calibration.runs import run_all
from calibration.undeclared import SIZES, judged

SEEDS = dict.fromkeys(SIZES, 20) | dict.fromkeys([name for name in SIZES if "chooses" in name], 100)


@pytest.mark.slow
def test_what_was_not_declared_is_seen(kept_results, first_seed):
    cases = [(name, first_seed + seed) for name, seeds in SEEDS.items() for seed in range(seeds)]
    found = run_all(judged, cases, kept_results)
    assert not [each for each in found if "error" in each]
    by_name = collections.defaultdict(list)
    for each in found:
        by_name[each["name"]].append(each)
    for name, each in by_name.items():
        causes = dict(collections.Counter(one["cause"] or ("unsure" if one["conditional"] else "good") for one in each))
        misses = sum(one["trusted"] and max(one["off"].values(), default=0.0) > 4 for one in each)
        print(f"{name:32} {sum(one['warned'] for one in each):3} warned, {misses} misses, {causes}")
    assert all(each["warned"] and not each["trusted"] for each in by_name["prompts of one network"])
    for name in ("networks", "networks of other prompts"):
        assert not [
            each for each in by_name[name] if each["warned"] or "correlation between networks" in each["failed"]
        ]
    # Where the data do not tell the mask, it moves no parameter: see the last line.
    assert any("mask" in each["verdict"] for each in by_name["a mask"] if not each["trusted"])
    assert not [each for each in by_name["no mask"] if not each["trusted"]]
    assert not [each for each in found if each["trusted"] and max(each["off"].values(), default=0.0) > 4]


def test_gamma_depends_on_a_tau0_that_the_data_do_not_identify():
    found = judged("a softmax that chooses, n = 96", 17)
    assert not found["off"]
    assert "only by the prior of tau0: gamma" in found["verdict"]
