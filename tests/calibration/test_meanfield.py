"""Simulation-based calibration of the models of tokens: parameters from their priors, tokens from the model's law."""

import jax
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
from budget import share
from calibration.study import assert_calibrated, shares_held
from numpyro import handlers
from scipy import stats

from sdeinfer import meanfield
from sdeinfer.diagnostics import LEVEL
from sdeinfer.infer import NUTS
from sdeinfer.likelihood import Assumptions, checked_priors
from sdeinfer.meanfield import SelfAttentionFlow, TokenPath, on_sphere, random_tokens
from sdeinfer.meanfield._models import LATENT

DATA_SETS = 200
THIN = 5
"""Draws of NUTS between those that are ranked, so that they are nearly independent."""

SIZES = {
    "one_step": (2, 6, 12, 3),
    "symmetric_values": (2, 6, 12, 3),
    "trajectory": (1, 5, 8, 2),
    "layer_trajectory": (1, 5, 8, 2),
}
"""Networks, layers, tokens, dimension."""

PRIORS = {
    "beta": dist.LogNormal(np.log(4.0), 0.5),
    "step": dist.LogNormal(np.log(0.2), 0.5),
    "scale": dist.LogNormal(np.log(0.2), 0.5),
    "noise": dist.LogNormal(np.log(0.1), 0.5),
}


def data_set(model, path, key):
    """Parameters from the prior, and tokens; with a latent start, also the observed first tokens."""
    trace = handlers.trace(handlers.seed(model, key)).get_trace(path)
    truth = {name: site["value"] for name, site in trace.items() if name in (*PRIORS, "spectrum")}
    if not model.latent_start:
        return truth, path.initial, trace["tokens"]["value"]
    # The exact start is uniform; the model's latent start is its law given the first observation.
    noise = truth["noise"] * jr.normal(jr.fold_in(key, 1), path.initial.shape)
    law = trace["tokens"]["fn"]
    observed = type(law)(law.flow, law.step, law.noise, path, path.initial).sample(jr.fold_in(key, 2))
    return truth, on_sphere(path.initial + noise), observed


def is_rejected(model, path, draws) -> bool:
    """Whether the law at the posterior means has a significant misfit, although the tokens are of the law."""
    means = {site: value.mean(axis=(0, 1)) for site, value in draws.items() if site not in LATENT}
    if model.latent_start:
        means["start"] = on_sphere(means["start"])
    trace = handlers.trace(handlers.substitute(handlers.seed(model, jr.key(0)), means)).get_trace(path)
    found = meanfield.misfits(trace["tokens"]["fn"], path.observed)
    return bool((found["p"] * len(found) < LEVEL).any())


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_posteriors_of_tokens_are_calibrated(name, key, record):
    """And their verdicts: the share of rejected laws is at most `LEVEL`."""
    model = getattr(meanfield, name)
    networks, layers, n, D = SIZES[name]
    priors = {parameter.name: PRIORS[parameter.name] for parameter in model.parameters}
    assumptions = Assumptions(prior=checked_priors(priors, model))
    sampler = NUTS(chains=1, draws=500, warmup=500)

    @jax.jit
    def simulate(key):
        key_start, key_data = jr.split(key)
        start = random_tokens(networks * n, D, key=key_start).reshape(networks, n, D)
        path = TokenPath(start, None, SelfAttentionFlow(1.0), tuple(range(1, layers + 1)), assumptions)
        truth, initial, tokens = data_set(model, path, key_data)
        return truth, TokenPath(initial, tokens, path.flow, path.layers, assumptions)

    ranks: dict[str, list[float]] = {}
    rejected = 0
    for number in range(DATA_SETS):
        truth, path = simulate(jr.fold_in(key, number))
        draws = sampler.sample(model, path, key=jr.fold_in(jr.fold_in(key, 10_000), number)).samples
        rejected += is_rejected(model, path, draws)
        for site, value in truth.items():
            for place, own in np.ndenumerate(np.asarray(value)):
                kept = draws[site][0, ::THIN][(slice(None), *place)]
                label = site + "".join(f"[{index}]" for index in place)
                ranks.setdefault(label, []).append((np.sum(kept < own) + 0.5) / (len(kept) + 1))
    uniform = {site: np.array(u) for site, u in ranks.items()}
    assert_calibrated(uniform, f"meanfield.{name}")
    columns = ("beta", ("step", "scale"), "noise", "spectrum")
    held = [", ".join(shares_held(u) for site, u in uniform.items() if site.startswith(starts)) for starts in columns]
    row = f"`{name}`; {networks} × {layers} × {n}, {D}"
    record("coverage_of_meanfield", {row: [*held, f"{rejected} of {DATA_SETS}"]})
    print(f"meanfield.{name}: {rejected} of {DATA_SETS} laws rejected")
    assert stats.binom.sf(rejected - 1, DATA_SETS, LEVEL) > share()
