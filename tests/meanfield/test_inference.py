"""Fits of observed tokens, and verdicts on networks inside and outside of the law."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import pandas as pd
import pytest
import xarray as xr
from budget import assert_distribution, assert_holds, assert_within
from scipy import stats

import sdeinfer as si
from sdeinfer import InputError, meanfield
from sdeinfer.infer import NUTS
from sdeinfer.meanfield import NoisyLayers, SelfAttentionFlow, _misfits, on_sphere
from sdeinfer.meanfield._check import _of_misfits
from sdeinfer.meanfield._misfits import CAUSES, SIMULATED

NETWORKS, LAYERS, TOKENS, DIMENSION = 6, 6, 16, 3
BETA, STEP, NOISE = 4.0, 0.2, 0.05
SAMPLER = NUTS(chains=2, draws=300, warmup=300)
SETTINGS = {"sampler": SAMPLER, "predictions": 10, "key": jr.key(1)}
"""Of all fits of one program with the default flow, which share what is compiled."""

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


def observed(layer, *, collapsed: bool = False):
    """Tokens of networks with these layers and the law's noise, normalised after each; uniform or equal at first."""
    x = jnp.stack([meanfield.random_tokens(TOKENS, DIMENSION, key=each) for each in jr.split(jr.key(3), NETWORKS)])
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


@pytest.fixture(scope="module")
def post(data):
    return meanfield.fit(meanfield.one_step, data, **SETTINGS)


def test_fit_recovers_the_parameters(post):
    found = meanfield.check(post)
    assert found.passed, found
    assert {verdict.topic for verdict in found.verdicts} >= {"calibrated", "converged", "identified", "true"}
    assert post["log_likelihood"]["tokens"].dims == ("chain", "draw", "network")
    assert post["posterior_predictive"]["tokens"].shape == (2, 5, NETWORKS, LAYERS, TOKENS, DIMENSION)
    assert post["prior_predictive"]["tokens"].dims == ("chain", "draw", "network", "layer", "token", "component")
    np.testing.assert_allclose(np.linalg.norm(post["posterior_predictive"]["tokens"], axis=-1), 1)
    assert set(post["posterior"]) == {"beta", "step", "noise"}


CASES = [pytest.param(name, marks=[] if name in ("values", "repelled") else pytest.mark.long) for name in OUTSIDE]


@pytest.mark.parametrize("name", CASES)
def test_other_networks_are_not_this_law(name):
    post = meanfield.fit(meanfield.one_step, observed(OUTSIDE[name]), **SETTINGS)
    found = meanfield.check(post)
    assert not found.passed
    assert "not this law" in str(found)


def test_collapsed_tokens_do_not_identify_beta():
    """Their means have the same direction whatever the weights; the step still brings tokens back to it."""
    post = meanfield.fit(meanfield.one_step, observed(by_flow(LAW), collapsed=True), **SETTINGS)
    found = meanfield.check(post)
    assert found.passed
    assert found.unidentified == ("beta",)


@pytest.mark.parametrize(
    ("name", "flow", "prior"),
    [
        ("queries", SelfAttentionFlow(1.0, Q=Q), {"step": STEP, "beta": dist.LogNormal(1.0, 0.2)}),
        *(
            pytest.param(name, flow, {}, marks=pytest.mark.long)
            for name, flow in (
                ("mlp", SelfAttentionFlow(1.0, mlp=lambda x: jax.nn.relu(x @ HIDDEN) @ READ)),
                ("unnormalised", SelfAttentionFlow(1.0, normalised=False)),
            )
        ),
    ],
)
def test_what_is_known_is_given_by_the_flow_and_the_prior(name, flow, prior):
    """Networks that are not the law of the default flow are that of their own, with the true β."""
    data = observed(OUTSIDE[name]).assign_attrs(truth_beta=BETA)
    settings = SETTINGS | {"predictions": 2}
    post = meanfield.fit(meanfield.one_step, data, flow=flow, prior=prior, **settings)
    assert post.attrs.get("fixed_step") == prior.get("step")
    assert post.attrs["identified"] == ("beta noise" if "step" in prior else "beta noise step")
    assert meanfield.check(post, flow=flow).passed


def test_a_program_of_ones_own(data):
    """Two groups of networks share β and have a noise each; such parameters need no declaration, nor one sign."""

    def two_noises(path):
        beta = numpyro.sample("beta", dist.LogNormal(1.0, 1.0))
        noise = numpyro.sample("noise", dist.LogNormal(-2.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("shift", dist.Normal())
        each = jnp.repeat(noise, NETWORKS // 2)[:, None, None]
        numpyro.sample("tokens", NoisyLayers(path.flow_at(beta), STEP, each, path), obs=path.observed)

    post = meanfield.fit(two_noises, data, sampler=NUTS(chains=2, draws=200, warmup=200), predictions=2, key=jr.key(1))
    noise = post["posterior"]["noise"]
    assert noise.shape == (2, 200, 2)
    for group in range(2):
        assert_holds(noise[..., group], NOISE)
    found = meanfield.check(post, model=two_noises)
    assert [each.split(" ±")[0] for each in found.identified] == ["beta", "noise[0]", "noise[1]"]
    assert found.unidentified == ("shift",)


def test_small_misfits_are_notes_whatever_the_names_of_the_parameters(post):
    table = pd.DataFrame(
        {"effect": 0.1, "statistic": 50.0, "p": 1e-9, "beta": 1e-4, "step": 0.0, "noise": 0.0}, ["depth"]
    )
    for names in (["beta"], []):
        verdicts, notes = _of_misfits(table, post, names)
        assert all(verdict.passed for verdict in verdicts)
        assert notes == [f"depth 0.1, small: {CAUSES['depth']}"]


@pytest.mark.parametrize(("sets", "simulated"), [(40, 10_000), pytest.param(200, SIMULATED, marks=pytest.mark.slow)])
def test_score_tests_are_uniform_inside_the_law(data, sets, simulated, monkeypatch):
    """Over sets of networks at the true parameters, all nine directions.

    With 10,000 simulated tokens the variances of scores have an error of 2 %, which 40 sets do not show.
    """
    monkeypatch.setattr(_misfits, "SIMULATED", simulated)
    law = NoisyLayers(LAW, STEP, NOISE, meanfield.token_path(data))
    draw = jax.jit(law.sample)
    p = np.stack([meanfield.misfits(law, draw(jr.fold_in(jr.key(5), i)))["p"] for i in range(sets)])
    for column in p.T:
        assert_distribution(column, stats.uniform.cdf)


def test_symmetric_values_have_the_norm_of_their_normals(data):
    """The squared entries of V = sS add up to s² times those of the independent standard normals."""
    program = numpyro.handlers.seed(meanfield.symmetric_values, jr.key(8))
    trace = numpyro.handlers.trace(program).get_trace(meanfield.token_path(data).unobserved())
    z, scale, V = (np.asarray(trace[name]["value"]) for name in ("values_normals", "scale", "values"))
    np.testing.assert_array_equal(V, V.T)
    np.testing.assert_allclose(np.diagonal(V), scale * z[np.equal(*np.triu_indices(DIMENSION))])
    np.testing.assert_allclose(np.square(V).sum(), scale**2 * np.square(z).sum())


def test_scores_of_many_tokens_have_mean_zero_inside_the_law():
    """Of 24,576 tokens, so that a wrong coefficient of a score shows."""
    starts = [meanfield.random_tokens(TOKENS, DIMENSION, key=each) for each in jr.split(jr.key(6), 64)]
    path = meanfield.TokenPath(jnp.stack(starts), None, LAW, tuple(range(1, 25)))
    law = NoisyLayers(LAW, STEP, NOISE, path)
    table = meanfield.misfits(law, jax.jit(law.sample)(jr.key(7)))
    assert_within(stats.norm.isf(table["p"]), "p of each direction, as normal scores")


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_files_of_tokens_and_of_their_fits(data, post, suffix, tmp_path):
    si.write(data, tmp_path / f"data{suffix}")
    xr.testing.assert_identical(si.read(tmp_path / f"data{suffix}"), data)
    si.write(post, tmp_path / f"post{suffix}")
    back = si.observation.read_posterior(tmp_path / f"post{suffix}")
    assert meanfield.check(back).verdict == meanfield.check(post).verdict
    si.write(data.assign(tokens=2 * data["tokens"]), tmp_path / f"data{suffix}")
    with pytest.raises(InputError, match="tokens: network 0, layer 0, token 0 is not on the unit sphere"):
        si.read(tmp_path / f"data{suffix}")


def test_labels_of_networks_are_kept(data):
    x, labels = data["tokens"].values, [f"seed {number}" for number in range(NETWORKS)]
    coords = {"network": labels, "layer": range(0, 14, 2)}
    named = xr.DataArray(x, dims=data["tokens"].dims, coords=coords).transpose("component", ...)
    found = meanfield.tokens_dataset(named)
    np.testing.assert_allclose(found["tokens"], x)
    assert found["network"].values.tolist() == labels
    assert found["layer"].values.tolist() == [0, 2, 4, 6, 8, 10, 12]
    with pytest.raises(InputError, match="tokens: 48 entries are masked"):
        meanfield.tokens_dataset(np.ma.masked_where(np.arange(NETWORKS * 7 * 48).reshape(x.shape) < 48, x))
    with pytest.raises(InputError, match="tokens: a list of arrays of one shape is needed, got"):
        meanfield.tokens_dataset([x[0], x[1, :3]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flow": SelfAttentionFlow(1.0, V=np.eye(4))}, "V: tokens have 3 components, got a matrix of 4"),
        ({"model": si.models.full_path}, "model: a program of a TokenPath is needed, got 'full_path'"),
        ({"data": xr.Dataset()}, "data: a Dataset with `tokens` over"),
        ({"prior": {"gamma": 1.0}}, "prior: one_step samples beta, step, noise; got a prior of 'gamma'"),
        ({"prior": {"beta": -1.0}}, "prior: beta"),
        ({"predictions": 0}, "predictions: a whole number of at least 1 is needed, got 0"),
        ({"model": lambda path: numpyro.sample("x", dist.Normal())}, "model: no site of the name 'tokens'"),
    ],
)
def test_bad_input(change, message, data):
    arguments = {"model": meanfield.one_step, "data": data, "sampler": SAMPLER, "key": jr.key(0)} | change
    with pytest.raises(InputError, match=message):
        meanfield.fit(arguments.pop("model"), arguments.pop("data"), **arguments)


def test_each_fit_has_its_check(post):
    with pytest.raises(InputError, match="post: is a fit of observed tokens; si.meanfield.check takes it"):
        si.check(post)
    groups = {"posterior": xr.Dataset(), "observed_data": xr.Dataset({"covariance": 1.0})}
    of_covariances = xr.DataTree.from_dict(groups)
    with pytest.raises(InputError, match="post: is a fit of covariances; si.check takes it"):
        meanfield.check(of_covariances)


def test_check_needs_the_program(post):
    other = post.copy()
    other.attrs = post.attrs | {"model": "mine"}
    with pytest.raises(InputError, match="model: the fit is of mine, give the program"):
        meanfield.check(other)
