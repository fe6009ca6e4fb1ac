"""Programs inside of others: calls, and NumPyro's handlers."""

import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pytest
from likelihood.programs import SHORT, density
from numpyro import handlers

import sdeinfer as si

FULL_PATH = si.models.full_path


def calls(path):
    numpyro.sample("other", dist.Normal())
    FULL_PATH(path)


CONDITIONED = handlers.condition(FULL_PATH, data={"gamma": 0.6})
PRIOR = {"c_gap": dist.LogNormal(0.0, 0.5)}


@pytest.mark.one_case("conditioned")
@pytest.mark.parametrize(
    ("model", "assumed", "prior"),
    [
        (calls, "finite-width", {}),
        (CONDITIONED, "limit", PRIOR | {"gamma": 0.6}),
        (handlers.substitute(FULL_PATH, data={"gamma": 0.6}), "limit", PRIOR),  # where a chain may start, for NumPyro
        (handlers.reparam(FULL_PATH, config={"c_mean": numpyro.infer.reparam.LocScaleReparam(0.0)}), "limit", PRIOR),
    ],
    ids=["called", "conditioned", "substituted", "reparameterised"],
)
def test_wrapped_models_have_the_density_of_the_model(model, assumed, prior, data):
    """Up to a constant, with the architecture of the data, priors as for the model, and the same adjustment."""
    own = {name: value for name, value in prior.items() if name in PRIOR}
    ours, theirs = (si.prepare(each, data, law=assumed, prior=x) for each, x in ((FULL_PATH, prior), (model, own)))
    if assumed == "finite-width":
        np.testing.assert_allclose(theirs.adjustment.matrix, ours.adjustment.matrix, atol=1e-4)
    at = [{"gamma": 0.6, "c_gap": gap, "c_mean": mean, "other": 0.0} for gap, mean in ((1.0, 0.1), (2.5, 0.4))]
    decentered = [each | {"c_mean_decentered": each["c_mean"] / np.sqrt(2)} for each in at]
    expected = [float(density(FULL_PATH, ours, each)) for each in at]
    found = [float(density(model, theirs, each)) for each in decentered]
    np.testing.assert_allclose(np.diff(found), np.diff(expected), rtol=1e-3)


@pytest.mark.long
def test_a_conditioned_model_is_fitted(data):
    post = si.fit(CONDITIONED, data, law="limit", prior=PRIOR, **SHORT)
    assert post.attrs["model"] == "condition(full_path)"
    assert post.attrs["identified"] == "c_gap"
    table = si.summarise(post)
    assert list(table.index) == ["c_gap", "c_plus", "c_minus", "gamma"]
    assert tuple(table.loc["gamma", ["mean", "sd"]]) == (pytest.approx(0.6), 0.0)
    np.testing.assert_allclose(post["layers"]["gamma"], 0.6)
    assert si.check(post).to_frame().loc["c_gap contraction", "topic"] == "identified"


def test_what_cannot_be_wrapped_is_one_line(data):
    grouped = data.assign_coords(group=("network", [0, 0, 1, 1, 1]))
    for model in (si.models.hierarchical, si.models.terminal):
        with pytest.raises(si.InputError, match=f"model: {model.name} cannot be used inside another"):
            si.fit(handlers.condition(model, data={"gamma": 0.6}), grouped, key=jr.key(0))
    everything = handlers.condition(FULL_PATH, data={"gamma": 0.6, "c_gap": 2.0, "c_mean": 0.0})
    with pytest.raises(si.InputError, match="model: nothing is left to be sampled"):
        si.fit(everything, data, key=jr.key(0))
