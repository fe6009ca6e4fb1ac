"""Simulation-based calibration of a fit of tokens: parameters from their priors, tokens from the law; and verdicts."""

import jax
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
from calibration.study import assert_calibrated, shares_held
from helpers.internals import LEVEL
from helpers.spending import share
from numpyro import handlers
from scipy import stats

import sdeinfer as si
from sdeinfer.infer import NUTS
from sdeinfer.meanfield import one_step, random_tokens, tokens_dataset

DATA_SETS = 200
THIN = 5
"""Draws of NUTS between those that are ranked, so that they are nearly independent."""

NETWORKS, LAYERS, TOKENS, DIMENSION = 2, 6, 12, 3
PRIORS = {
    "beta": dist.LogNormal(np.log(4.0), 0.5),
    "step": dist.LogNormal(np.log(0.2), 0.5),
    "noise": dist.LogNormal(np.log(0.1), 0.5),
}


@pytest.mark.slow
def test_posteriors_of_tokens_are_calibrated(key, record):
    """And their verdicts: the share of sets in which a score test is significant is at most `LEVEL`."""
    shape = (NETWORKS, LAYERS + 1, TOKENS, DIMENSION)
    blank = tokens_dataset(random_tokens(int(np.prod(shape[:3])), DIMENSION, key=key).reshape(shape))
    path = si.prepare(one_step, blank, prior=PRIORS).unobserved()

    @jax.jit
    def simulate(key):
        trace = handlers.trace(handlers.seed(one_step, key)).get_trace(path)
        return {name: trace[name]["value"] for name in PRIORS}, trace["tokens"]["value"]

    ranks = {name: [] for name in PRIORS}
    rejected = 0
    for number in range(DATA_SETS):
        truth, tokens = simulate(jr.fold_in(key, number))
        data = tokens_dataset(np.concatenate([np.asarray(path.initial)[:, None], tokens], axis=1))
        settings = {"prior": PRIORS, "sampler": NUTS(chains=1, draws=500, warmup=500), "predictions": 1}
        post = si.fit(one_step, data, **settings, key=jr.fold_in(jr.fold_in(key, 10_000), number))
        p = post["score_tests"]["p"]
        rejected += bool((p * p.size < LEVEL).any())
        for name, own in truth.items():
            kept = post["posterior"][name].values[0, ::THIN]
            ranks[name].append((np.sum(kept < float(own)) + 0.5) / (len(kept) + 1))
    uniform = {name: np.array(u) for name, u in ranks.items()}
    assert_calibrated(uniform, "meanfield.one_step")
    row = f"`one_step`; {NETWORKS} × {LAYERS} × {TOKENS}, {DIMENSION}"
    record("coverage_of_meanfield", {row: [*map(shares_held, uniform.values()), f"{rejected} of {DATA_SETS}"]})
    print(f"meanfield.one_step: {rejected} of {DATA_SETS} laws rejected")
    assert stats.binom.sf(rejected - 1, DATA_SETS, LEVEL) > share()
