"""Networks with random shapes that are wrong in one of thirty ways: is the verdict right, and does it name the cause?"""

import collections

import numpy as np
import pytest
from calibration import misspecified
from calibration.misspecified import WAYS, Case, draw_case, hidden_states, judged, one_layer, outcome
from calibration.runs import run_all
from numpy_networks import Network
from numpy_networks import hidden_states as plain_states

SEEDS = 5


@pytest.mark.slow
def test_verdicts_on_networks_that_are_wrong_in_one_way(first_seed, kept_results, record):
    cases = [(name, first_seed + seed) for name in WAYS for seed in range(SEEDS)]
    rows = collections.defaultdict(list)
    for found in run_all(judged, cases, kept_results):
        rows[found["name"]].append(found)
    for name, every in rows.items():
        counts = sum((collections.Counter(outcome(each)) for each in every), collections.Counter())
        cells = [counts[key] for key in outcome(every[0])]
        record("misspecified", {name: [WAYS[name].answer, str(len(every)), *map(str, cells)]})
        print(f"{name:34} {WAYS[name].answer:9} {cells}")
        for each in every:
            print(f"    {each['seed']}: {each.get('refused') or each['verdict']} {each.get('z')}")
