"""Fits of increments of sampled networks of blocks, their checks, and tests of independence and of tails."""

import functools

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
import xarray as xr
from helpers.budget import assert_distribution, assert_estimate, assert_holds, mean_and_error
from helpers.cases import random_covariance
from helpers.fits import WARMUP, AtTheMode
from helpers.internals import dependence_of_pairs, dependence_on_input, kurtosis_of_normals
from jaxtyping import Array

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, SelfAttention
from sdeinfer.layers import OverDepth

DEPTH, WIDTH, OTHER_WIDTH = 4, 64, 96
TRUTH = {"attention.strength": 0.4, "mlp.strength": 0.3}
FREE = {"mlp.gain": dist.LogNormal(0.0, 1.0), "attention.temperature": dist.LogNormal(0.0, 1.0)}
NO_U_TURN = si.infer.NUTS(chains=2, draws=400, warmup=WARMUP)
AT_THE_MODE = AtTheMode(chains=2, draws=400)


def layer(temperature: float = 1.0, gain: float = 2.0) -> si.Stack:
    attention = SelfAttention(temperature, 4.0, heads=4, pattern=si.CAUSAL)
    return si.Stack((Block(attention, 0.4, "layer"), Block(MLP(gain, "gelu_tanh"), 0.3, "layer")))


class Profile(eqx.Module):
    """The strengths of the MLPs of networks of one width: arrays, so that all have one program."""

    strengths: Array
    width: Array

    def __call__(self, time):
        return self.strengths[jnp.floor(time * self.width).astype(int)]


def sampled(strengths, width: int, seed: int) -> xr.Dataset:
    profile = Profile(jnp.asarray(strengths), jnp.asarray(width))
    over_depth = OverDepth(layer(), **{"mlp.strength": profile})
    data = si.sample_branches(over_depth, random_covariance(3), width=width, depth=DEPTH, key=jr.key(seed))
    assert "truth_mlp.strength" not in data.attrs
    assert data.attrs["truth_attention.strength"] == TRUTH["attention.strength"]
    return data.assign_coords(network=[seed])


ALIKE = (TRUTH["mlp.strength"],) * DEPTH


@functools.cache
def network() -> xr.Dataset:
    return sampled(ALIKE, WIDTH, 0)


def networks(strengths=ALIKE, width: int = WIDTH) -> xr.Dataset:
    """Two networks, the second of some width."""
    return xr.concat([sampled(strengths, WIDTH, 0), sampled(strengths, width, 7)], "network")


def fitted(data, model=si.models.branches, *, architecture=None, prior=None, sampler=NO_U_TURN) -> xr.DataTree:
    architecture = layer() if architecture is None else architecture
    return si.fit(model, data, architecture=architecture, prior=prior, sampler=sampler, key=jr.key(1))


def assert_strengths(post: xr.DataTree) -> None:
    for name, value in TRUTH.items():
        assert_holds(post["posterior"][name].values, value)
    check = si.check(post)
    assert check.passed, check.verdict
    assert "attention.strength ± " in check.verdict
    assert "mlp.strength ± " in check.verdict


@pytest.mark.long
def test_strengths_of_networks_of_one_width():
    post = fitted(networks())
    assert_strengths(post)
    assert set(post["posterior"].data_vars) == set(TRUTH)
    assert {f"declared_{name}": value for name, value in TRUTH.items()}.items() <= post.attrs.items()


@pytest.mark.long
def test_strengths_of_two_networks_of_two_widths():
    post = fitted(networks(width=OTHER_WIDTH))
    assert_strengths(post)
    # 4 · 160 rows of three tokens give 1/√(2 · 4 · 160 · 3), about 1.6 %, without the fluctuations of S.
    sd = np.log(post["posterior"]["mlp.strength"]).std()
    least = 1 / np.sqrt(2 * DEPTH * (WIDTH + OTHER_WIDTH) * 3)
    assert least < sd < 1.5 * least
    sizes = post["log_likelihood"]["increments"].sizes
    assert (sizes["network"], sizes["branch"]) == (2, 2 * DEPTH)


@pytest.mark.long
def test_gains_and_temperatures_are_latent_by_a_prior_and_strengths_may_be_fixed():
    post = fitted(network(), prior=FREE | {"mlp.strength": 0.3}, architecture=layer(0.5, 1.0))
    assert set(post["posterior"].data_vars) == set(TRUTH) | set(FREE)
    np.testing.assert_array_equal(post["posterior"]["mlp.strength"], 0.3)
    assert_holds(post["posterior"]["attention.strength"].values, TRUTH["attention.strength"])
    for name, value in {"mlp.gain": 2.0, "attention.temperature": 1.0}.items():
        # In logarithms, in which the posterior is nearly normal.
        assert_holds(np.log(post["posterior"][name].values), np.log(value))
    assert set(post.attrs["identified"].split()) == {"attention.strength", *FREE}


def test_layers_have_latent_strengths_of_their_own():
    post = fitted(networks(), si.models.branches_over_depth, sampler=AT_THE_MODE)
    own = post["posterior"]["mlp.layer_strength"]
    assert own.dims == ("chain", "draw", "layer")
    assert own.sizes["layer"] == DEPTH
    assert "mlp.strength_sd ± " in si.check(post).verdict


@pytest.mark.long
@pytest.mark.parametrize("model", ["every_branch", "branches_over_depth"])
def test_strengths_of_layers_that_differ(model):
    """As easy for the sampler as equal ones."""
    strengths = 0.3 * np.exp(0.5 * np.random.default_rng(3).standard_normal(DEPTH))
    post = fitted(sampled(strengths, WIDTH, 4), getattr(si.models, model))
    truth = {"attention.strength": [TRUTH["attention.strength"]] * DEPTH, "mlp.strength": strengths}
    for name, values in truth.items():
        of_layer = name if model == "every_branch" else name.replace("strength", "layer_strength")
        for number, value in enumerate(values):
            assert_holds(np.log(post["posterior"][of_layer].isel(layer=number).values), np.log(value))
    assert si.check(post).passed, si.check(post).verdict


def test_a_wrong_temperature_is_named():
    check = si.check(fitted(networks(), architecture=layer(4.0), sampler=AT_THE_MODE))
    assert check.cause.name == "ratio of attention.temperature to the assumed one"
    assert "the increments prefer 0." in check.cause.advice


def test_one_stronger_layer_is_named():
    check = si.check(fitted(networks((0.3, 0.3, 0.3, 0.45)), sampler=AT_THE_MODE))
    assert check.cause.name == "largest ratio of a layer's strength"
    # Branch 7 is the MLP of layer 3.
    assert "mlp of branch 7: 1." in check.cause.advice


def increments(rng: np.random.Generator, widths, branches: int = 2, tokens: int = 3, tie: float = 0.0) -> xr.Dataset:
    """What tests of independence read, of normal U and Δ; U is in the first branch, and `tie` of it in the others."""
    found = []
    for width in widths:
        rows = rng.standard_normal((branches, tokens, width))
        rows[1:] += tie * rows[0]
        found.append(np.einsum("bik,cjk->bcij", rows, rows) / width)
    between = np.stack(found)
    own = np.moveaxis(np.diagonal(between, axis1=1, axis2=2), -1, 1)
    # The smallest Dataset that they take.
    return xr.Dataset(
        {"between": (tuple("nbcij"), between), "increment": (tuple("nbij"), own)}, coords={"width": ("n", list(widths))}
    )


def on_input(data: xr.Dataset):
    """The first branch as what the second one reads."""
    cross, D = data["between"][:, 0, 1:2].rename(c="b"), data["increment"]
    of_second = xr.Dataset({"input": D[:, :1], "cross": cross, "increment": D[:, 1:2]})
    return dependence_on_input(of_second.assign_coords(width=data["width"]))


@pytest.mark.one_case("dependence_of_pairs-widths1")
@pytest.mark.parametrize("widths", [(24,), (32, 64)])
@pytest.mark.parametrize("test", [on_input, dependence_of_pairs])
def test_p_values_of_independent_rows_are_uniform(test, widths):
    rng = np.random.default_rng(list(widths))
    assert_distribution([test(increments(rng, widths)).p for _ in range(1_000)], lambda p: p)


def test_p_values_of_the_worst_pair_count_the_pairs():
    rng, level, count = np.random.default_rng(0), 0.1, 1_000
    found = np.array([dependence_of_pairs(increments(rng, (32,), 4)).p for _ in range(count)])
    # Nearly: six pairs of independent increments have the probability 1 − (1 − 0.1/6)⁶.
    expected = 1 - (1 - level / 6) ** 6
    assert_estimate((found < level).mean(), expected, np.sqrt(expected * (1 - expected) / count))


def test_dependence_is_seen_and_measured():
    tie, rng = 0.5, np.random.default_rng(1)
    data = increments(rng, (4_000,), 4, tie=tie)
    where, share, p = dependence_of_pairs(data)
    assert p < 1e-10
    # Rows of unit variance and those with a share ρ² of them; among themselves they share ρ⁴.
    assert where[0] == 0
    np.testing.assert_allclose(share, tie**2 / (1 + tie**2), atol=4 / np.sqrt(4_000))
    np.testing.assert_allclose(on_input(data).share, tie**2 / (1 + tie**2), atol=4 / np.sqrt(4_000))


def test_fourth_moments_of_normals():
    tokens, width, count = 3, 24, 4_000
    rng = np.random.default_rng(2)
    D = rng.standard_normal((count, tokens, width))
    squares = np.einsum("dik,dij,djk->dk", D, np.linalg.inv(D @ np.swapaxes(D, 1, 2) / width), D)
    kurtosis = np.square(squares).mean(1) / (tokens * (tokens + 2))
    mean, sd, skewness = kurtosis_of_normals(tokens, width)
    estimate, error = mean_and_error(kurtosis)
    assert_estimate(estimate, mean, np.sqrt(2) * error)
    squared, error = mean_and_error((kurtosis - estimate) ** 2)
    assert_estimate(squared, sd**2, np.sqrt(2) * error)
    cubed, error = mean_and_error(((kurtosis - estimate) / kurtosis.std()) ** 3)
    assert_estimate(cubed, skewness, np.sqrt(2) * error)
