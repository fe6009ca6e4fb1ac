"""Fits of increments of sampled networks of blocks, their checks, and tests of independence and of tails."""

import functools

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
import xarray as xr
from budget import assert_distribution, assert_estimate, assert_holds, mean_and_error
from conftest import WARMUP, random_covariance

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, SelfAttention
from sdeinfer.diagnostics._dependence import dependence_of_pairs, dependence_on_input, kurtosis_of_normals
from sdeinfer.layers import OverDepth

DEPTH, WIDTH = 6, 64
TRUTH = {"attention.strength": 0.4, "mlp.strength": 0.3}


def layer(temperature: float = 1.0, gain: float = 2.0) -> si.Stack:
    attention = SelfAttention(temperature, 4.0, heads=4, pattern=si.CAUSAL)
    return si.Stack((Block(attention, 0.4, "rms"), Block(MLP(gain), 0.3, "rms")))


@functools.cache
def network(width: int = WIDTH, seed: int = 0) -> xr.Dataset:
    data = si.sample_branches(layer(), random_covariance(3), width=width, depth=DEPTH, key=jr.key(seed))
    return data.assign_coords(network=[seed])


def fitted(data, model=si.models.branches, *, architecture=None, prior=None, seed: int = 1) -> xr.DataTree:
    architecture = layer() if architecture is None else architecture
    sizes = {"chains": 2, "draws": 400, "warmup": WARMUP}
    return si.fit(model, data, architecture=architecture, prior=prior, **sizes, key=jr.key(seed))


def assert_strengths(post: xr.DataTree) -> None:
    for name, value in TRUTH.items():
        assert_holds(post["posterior"][name].values, value)


@functools.cache
def plain_fit() -> xr.DataTree:
    return fitted(network())


def test_strengths_of_one_network():
    post = plain_fit()
    assert_strengths(post)
    assert set(post["posterior"].data_vars) == set(TRUTH)
    # Of 6 · 64 rows of three tokens, without the fluctuations of S: 1/√(2 · 6 · 64 · 3), about 2 %.
    sd = np.log(post["posterior"]["mlp.strength"]).std()
    assert 1 / np.sqrt(2 * DEPTH * WIDTH * 3) < sd < 2 / np.sqrt(2 * DEPTH * WIDTH * 3)
    assert post["log_likelihood"]["increments"].sizes["branch"] == 2 * DEPTH
    assert {f"declared_{name}": value for name, value in TRUTH.items()}.items() <= post.attrs.items()


def test_check_of_one_network():
    check = si.check(plain_fit())
    assert check.passed, check.verdict
    assert check.verdict.startswith("good: trust attention.strength ± ")
    assert "mlp.strength ± " in check.verdict


def test_gains_and_temperatures_are_latent_by_a_prior():
    prior = {"mlp.gain": dist.LogNormal(0.0, 1.0), "attention.temperature": dist.LogNormal(0.0, 1.0)}
    post = fitted(network(), prior=prior, architecture=layer(0.5, 1.0))
    assert set(post["posterior"].data_vars) == set(TRUTH) | set(prior)
    assert_strengths(post)
    for name, value in {"mlp.gain": 2.0, "attention.temperature": 1.0}.items():
        # In logarithms, in which the posterior is nearly normal.
        assert_holds(np.log(post["posterior"][name].values), np.log(value))
    assert set(post.attrs["identified"].split()) == set(TRUTH) | set(prior)


def test_a_strength_that_is_fixed():
    post = fitted(network(), prior={"mlp.strength": 0.3})
    np.testing.assert_array_equal(post["posterior"]["mlp.strength"], 0.3)
    assert post.attrs["identified"] == "attention.strength"
    np.testing.assert_allclose(
        post["posterior"]["attention.strength"].mean(), plain_fit()["posterior"]["attention.strength"].mean(), rtol=0.02
    )


@pytest.mark.parametrize("model", [pytest.param("every_branch", marks=pytest.mark.long), "branches_over_depth"])
def test_strengths_of_layers(model):
    post = fitted(network(), getattr(si.models, model))
    for name, value in TRUTH.items():
        of_layer = name if model == "every_branch" else name.replace("strength", "layer_strength")
        own = post["posterior"][of_layer]
        assert own.dims == ("chain", "draw", "layer")
        assert own.sizes["layer"] == DEPTH
        for number in range(DEPTH):
            assert_holds(np.log(own.isel(layer=number).values), np.log(value))
    assert si.check(post).passed, si.check(post).verdict


@pytest.mark.slow
def test_layers_that_differ_are_told_apart():
    """As easy for the sampler as equal ones."""
    strengths = 0.3 * np.exp(0.5 * np.random.default_rng(3).standard_normal(DEPTH))

    def profile(time):
        return jnp.asarray(strengths)[jnp.floor(time * WIDTH).astype(int)]

    data = si.sample_branches(
        OverDepth(layer(), **{"mlp.strength": profile}), random_covariance(3), width=WIDTH, depth=DEPTH, key=jr.key(4)
    )
    post = fitted(data, si.models.branches_over_depth)
    for number, value in enumerate(strengths):
        assert_holds(np.log(post["posterior"]["mlp.layer_strength"].isel(layer=number).values), np.log(value))
    assert si.check(post).passed, si.check(post).verdict


def test_two_networks_of_two_widths():
    both = xr.concat([network(), network(96, 7)], "network")
    post = fitted(both)
    assert_strengths(post)
    assert post["log_likelihood"]["increments"].sizes["network"] == 2
    one = np.log(plain_fit()["posterior"]["mlp.strength"]).std()
    assert np.log(post["posterior"]["mlp.strength"]).std() < 0.85 * one
    assert si.check(post).passed


def test_a_wrong_temperature_is_named():
    check = si.check(fitted(network(), architecture=layer(4.0)))
    assert check.cause.name == "ratio of attention.temperature to the assumed one"
    assert "the increments prefer 0." in check.cause.advice


def test_one_stronger_layer_is_named():
    def profile(time):
        return jnp.where(jnp.floor(time * WIDTH) == 3, 0.45, 0.3)

    planted = OverDepth(layer(), **{"mlp.strength": profile})
    data = si.sample_branches(planted, random_covariance(3), width=WIDTH, depth=DEPTH, key=jr.key(2))
    assert "truth_mlp.strength" not in data.attrs
    assert data.attrs["truth_attention.strength"] == TRUTH["attention.strength"]
    check = si.check(fitted(data))
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


@pytest.mark.parametrize("widths", [pytest.param((24,), marks=pytest.mark.long), (32, 64)])
@pytest.mark.parametrize("test", [on_input, dependence_of_pairs])
def test_p_values_of_independent_rows_are_uniform(test, widths):
    rng = np.random.default_rng(list(widths))
    assert_distribution([test(increments(rng, widths)).p for _ in range(1_500)], lambda p: p)


def test_p_values_of_the_worst_pair_count_the_pairs():
    rng, level, count = np.random.default_rng(0), 0.1, 1_500
    found = np.array([dependence_of_pairs(increments(rng, (32,), 4)).p for _ in range(count)])
    # Nearly: six pairs of independent increments have the probability 1 − (1 − 0.1/6)⁶.
    expected = 1 - (1 - level / 6) ** 6
    assert_estimate((found < level).mean(), expected, np.sqrt(expected * (1 - expected) / count))


def test_dependence_is_seen_and_measured():
    tie, rng = 0.5, np.random.default_rng(1)
    data = increments(rng, (4_000,), 4, tie=tie)
    worst = dependence_of_pairs(data)
    assert worst.p < 1e-10
    # Rows of unit variance and those with a share ρ² of them; among themselves they share ρ⁴.
    assert worst.where[0] == 0
    np.testing.assert_allclose(worst.share, tie**2 / (1 + tie**2), atol=4 / np.sqrt(4_000))
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
