"""Fits of observed tokens, the law against loops, and verdicts on networks inside and outside of it."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import xarray as xr
from helpers.budget import assert_distribution, assert_within
from helpers.fits import AtTheMode
from helpers.internals import _tested
from meanfield.test_projected_normal import log_integral
from scipy import stats

import sdeinfer as si
from sdeinfer import InputError, meanfield
from sdeinfer.infer import NUTS
from sdeinfer.meanfield import NoisyLayers, SelfAttentionFlow, TokenModel, TokenPath, on_sphere

NETWORKS, LAYERS, TOKENS, DIMENSION = 6, 6, 16, 3
BETA, STEP, NOISE = 4.0, 0.2, 0.05
SETTINGS = {"sampler": AtTheMode(chains=2, draws=300, searched=True), "predictions": 10, "key": jr.key(1)}
"""Of all fits, which share what is compiled."""

RNG = np.random.default_rng(0)
Q, V = RNG.normal(size=(2, DIMENSION, DIMENSION))
HIDDEN, READ = RNG.normal(size=(DIMENSION, 8)), RNG.normal(size=(8, DIMENSION)) / 4
VALUES = RNG.normal(size=(LAYERS, DIMENSION, DIMENSION))
LAW = SelfAttentionFlow(BETA)


def by_flow(flow):
    return lambda x, layer: flow.layer(x, STEP, normalise=False)


OUTSIDE = {
    "values": by_flow(SelfAttentionFlow(BETA, V=V)),
    "repelled": by_flow(SelfAttentionFlow(BETA, V=-0.5 * np.eye(DIMENSION))),
    "queries": by_flow(SelfAttentionFlow(BETA, Q=Q)),
    "mlp": by_flow(SelfAttentionFlow(BETA, mlp=lambda x: jax.nn.relu(x @ HIDDEN) @ READ)),
    "depth": lambda x, layer: LAW.layer(x, 2 * STEP * layer / LAYERS, normalise=False),
    "random values": lambda x, layer: x + STEP * LAW.residual(x, x) @ VALUES[layer],
    "unnormalised": by_flow(SelfAttentionFlow(BETA, normalised=False)),
}
"""Layers of other networks, functions of the tokens and the number of the layer."""


def starts(networks, key):
    return jnp.stack([meanfield.random_tokens(TOKENS, DIMENSION, key=each) for each in jr.split(key, networks)])


def observed(layer, *, collapsed: bool = False):
    """Tokens of networks with these layers and the law's noise, normalised after each; uniform or equal at first."""
    x = starts(NETWORKS, jr.key(3))
    x = jnp.broadcast_to(x[:, :1], x.shape) if collapsed else x
    tokens = [x]
    for number in range(LAYERS):
        moved = jnp.stack([layer(each, number) for each in x])
        x = on_sphere(moved + NOISE * jr.normal(jr.key(number + 10), x.shape))
        tokens.append(x)
    return meanfield.tokens_dataset(np.stack(tokens, axis=1))


@pytest.fixture(scope="module")
def data():
    return observed(by_flow(LAW)).assign_attrs(truth_beta=BETA, truth_step=STEP, truth_noise=NOISE)


@pytest.mark.long
@pytest.mark.parametrize("sampler", [SETTINGS["sampler"], NUTS(chains=2, draws=300, warmup=300)], ids=["mode", "NUTS"])
def test_fit_recovers_the_parameters(sampler, data, tmp_path):
    post = si.fit(meanfield.one_step, data, **SETTINGS | {"sampler": sampler})
    found = si.check(post)
    assert found.passed, found
    assert {verdict.topic for verdict in found.verdicts} >= {"calibrated", "converged", "identified", "true"}
    assert post["log_likelihood"]["tokens"].dims == ("chain", "draw", "network")
    assert post["posterior_predictive"]["tokens"].shape == (2, 5, NETWORKS, LAYERS, TOKENS, DIMENSION)
    assert post["prior_predictive"]["tokens"].dims == ("chain", "draw", "network", "layer", "token", "component")
    np.testing.assert_allclose(np.linalg.norm(post["posterior_predictive"]["tokens"], axis=-1), 1)
    assert set(post["posterior"]) == {"beta", "step", "noise"}
    si.write(post, tmp_path / "post.nc")
    assert si.check(si.observation.read_posterior(tmp_path / "post.nc")).verdict == found.verdict


@pytest.mark.one_case("repelled")
@pytest.mark.parametrize("name", OUTSIDE)
def test_other_networks_are_not_this_law(name):
    found = si.check(si.fit(meanfield.one_step, observed(OUTSIDE[name]), **SETTINGS))
    assert not found.passed
    assert "not this law" in str(found)


def test_collapsed_tokens_do_not_identify_beta():
    """Their means have the same direction whatever the weights; the step still brings tokens back to it."""
    found = si.check(si.fit(meanfield.one_step, observed(by_flow(LAW), collapsed=True), **SETTINGS))
    assert found.passed
    assert found.unidentified == ("beta",)


@pytest.mark.long
def test_what_is_known_is_given_by_the_flow_and_the_prior():
    """Networks that are not the law of the default flow are that of their own, with the true β."""
    data = observed(OUTSIDE["queries"]).assign_attrs(truth_beta=BETA)
    model = TokenModel(flow=SelfAttentionFlow(1.0, Q=Q))
    post = si.fit(model, data, prior={"step": STEP}, **SETTINGS)
    assert post.attrs["fixed_step"] == STEP
    assert post.attrs["identified"] == "beta noise"
    assert si.check(post).passed


def test_density_of_noisy_layers_is_the_product_over_transitions(key):
    """With attention by loops, and the projected normal by quadrature; through `prepare`, as other samplers take it."""
    data = observed(by_flow(LAW)).isel(network=slice(2), layer=slice(3), token=slice(4))
    path = si.prepare(meanfield.one_step, data)
    states = data["tokens"].values
    expected = 0.0
    for before, after in zip(states[:, :-1].reshape(-1, 4, 3), states[:, 1:].reshape(-1, 4, 3), strict=True):
        for own, x in zip(before, after, strict=True):
            kernel = np.exp(2.0 * before @ own)
            expected += log_integral(x, own + 0.3 * kernel @ before / kernel.sum(), 0.2)
    found = NoisyLayers(SelfAttentionFlow(2.0), 0.3, 0.2, path).log_prob(path.observed).sum()
    assert found == pytest.approx(expected, rel=1e-10)


@pytest.mark.long
def test_score_tests_are_uniform_inside_the_law():
    """Over 40 sets of networks at the true parameters, of all directions; their variances have an error of 1 %."""
    law = NoisyLayers(LAW, STEP, NOISE, TokenPath(starts(NETWORKS, jr.key(3)), None, LAW, LAYERS))
    draw = eqx.filter_jit(law.sample)
    p = [meanfield.score_tests(law, draw(jr.fold_in(jr.key(5), i)), {})["p"].values for i in range(40)]
    for column in np.transpose(p):
        assert_distribution(column, stats.uniform.cdf)


def test_scores_of_many_tokens_have_mean_zero_inside_the_law():
    """Of 24,576 tokens, so that a wrong coefficient of a score shows."""
    law = NoisyLayers(LAW, STEP, NOISE, TokenPath(starts(64, jr.key(6)), None, LAW, 24))
    table = meanfield.score_tests(law, eqx.filter_jit(law.sample)(jr.key(7)), {})
    assert_within(stats.norm.isf(table["p"]), "p of each direction, as normal scores")


def test_the_size_of_a_misfit_by_hand():
    """Scores of 1,000 tokens of two components, which a shift by .2 sds moves; nothing is fitted."""
    found = _tested(np.full((1000, 2), 0.2), 1000 * np.eye(2), [], components=2)
    statistic = 2 * 1000 * 0.2**2
    assert found["statistic"] == pytest.approx(statistic)
    assert found["effect"] == pytest.approx(math.sqrt((statistic - 2) / 2000))


@pytest.mark.one_case
@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_files_and_labels_of_tokens(data, suffix, tmp_path):
    labels = [f"seed {number}" for number in range(NETWORKS)]
    named = data["tokens"].assign_coords(network=labels).transpose("component", ...)
    found = meanfield.tokens_dataset(3 * named)
    np.testing.assert_allclose(found["tokens"], data["tokens"])
    assert found["network"].values.tolist() == labels
    si.write(found, tmp_path / f"data{suffix}")
    xr.testing.assert_identical(si.read(tmp_path / f"data{suffix}"), found)
    si.write(data.assign(tokens=2 * data["tokens"]), tmp_path / f"data{suffix}")
    with pytest.raises(InputError, match="tokens: network 0, layer 0, token 0 is not on the unit sphere"):
        si.read(tmp_path / f"data{suffix}")
