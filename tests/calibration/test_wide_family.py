"""Posteriors and verdicts on networks of others: random shapes, tokens and masks, sampled from the definitions alone.

The networks come from `wide_family`, which shares no code with the package. All 400 sets take three hours of a core;
each is printed, as one line of JSON:

    OPENBLAS_NUM_THREADS=1 pytest -m slow -s tests/calibration/test_wide_family.py
"""

import json

import jax.random as jr
import numpy as np
import pytest
from budget import assert_within
from calibration.wide_family import Family, draw_family, hidden_states

import sdeinfer as si
from sdeinfer.layers import Architecture

SETS = 400
MOST_FALSE_ALARMS = 0.04
"""Of the fits that have transitions in the range of the law. Without one the verdict says so, which is no false one."""


def observed(family: Family, seed: int):
    """The networks of a family as a Dataset, and their architecture."""
    pattern = si.Pattern(causal=family.causal, prompts=family.prompts) if family.attends else si.Pattern()
    sizes = {"heads": family.heads, "output_projection": family.output_projection, "expansion": family.expansion}
    observer = si.observation.Observer(pattern=pattern)
    with np.errstate(all="ignore"):  # some explode
        for X in hidden_states(family, seed):
            observer.add(X)
    return observer.dataset(), Architecture(family.architecture, **sizes, pattern=pattern)


def judged(seed: int) -> dict:
    """What the package says of one family: why it refuses it, or the verdict."""
    family = draw_family(seed)
    line = {"seed": seed, "architecture": family.architecture, "tokens": len(family.V0), "width": family.width}
    try:
        data, architecture = observed(family, seed)
        post = si.fit(si.models.full_path, data, architecture=architecture, key=jr.key(seed))
        check = si.check(post)
    except si.InputError as error:  # anything else is a defect
        return {**line, "refused": str(error)}
    assert si.check(post, data).verdict == check.verdict
    if check.passed:
        assert_within(
            [
                _deviation(post["posterior"][name].values, truth, architecture.coordinates.sampled[name].to_real)
                for name, truth in family.truth.items()
                if name not in check.unidentified
            ]
            or [0.0],
            f"seed {seed}, {list(family.truth)}",
        )
    in_range = "out_of_range" not in post.attrs and post.attrs["left_out"] < 0.99
    return {**line, "trusted": check.passed, "in_range": in_range, "verdict": check.verdict}


def _deviation(draws: np.ndarray, truth: float, to_real) -> float:
    """How many standard deviations a truth is from the mean of draws, on the line where they are near normal."""
    draws, truth = np.asarray(to_real(draws)), np.asarray(to_real(np.float64(truth)))
    return float((truth - draws.mean()) / draws.std())


@pytest.mark.slow
def test_posteriors_hold_the_truth_and_verdicts_trust_them():
    lines = []
    for seed in range(SETS):
        lines.append(judged(seed))
        print(json.dumps(lines[-1]), flush=True)
    fits = [line for line in lines if line.get("in_range")]
    assert len(fits) > 0.85 * SETS
    assert sum(not line["trusted"] for line in fits) <= MOST_FALSE_ALARMS * len(fits)
