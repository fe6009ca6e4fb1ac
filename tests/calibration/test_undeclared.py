"""What was not declared, or is not identified: prompts in the place of networks, masks, and softmaxes that choose."""

import collections
import re

import pytest
from calibration.judged import is_miss
from calibration.runs import run_all
from calibration.undeclared import SIZES, judged

SEEDS = {name: 100 if "chooses" in name else 20 for name in SIZES}


@pytest.mark.slow
def test_what_was_not_declared_is_seen(kept_results, first_seed):
    cases = [(name, first_seed + seed) for name, seeds in SEEDS.items() for seed in range(seeds)]
    found = run_all(judged, cases, kept_results)
    by_name = {name: [each for each in found if each["name"] == name] for name in SIZES}
    for name, each in by_name.items():
        causes = collections.Counter(one["cause"] or ("unsure" if one["conditional"] else "good") for one in each)
        print(f"{name:32} {dict(causes)}")
    assert not any(each["trusted"] for each in by_name["prompts of one network"])
    independent = by_name["networks"] + by_name["networks of other prompts"]
    assert not any("correlation between networks" in each["failed"] for each in independent)
    # Where the data do not tell the mask, it moves no parameter: see the last line.
    assert any("mask" in each["verdict"] for each in by_name["a mask"] if not each["trusted"])
    assert all(each["trusted"] for each in by_name["no mask"])
    assert not any(is_miss(each) for each in found)


@pytest.mark.long
def test_gamma_depends_on_a_tau0_that_the_data_do_not_identify():
    found = judged("a softmax that chooses, n = 96", 17)
    assert re.match(r"conditional: gamma ± \S+ % by the prior of tau0", found["verdict"]), found["verdict"]
