"""Exponents of angles and gradients: exact laws, two near tokens of the SDE, and bad input."""

import dataclasses

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from budget import assert_distribution, assert_same_distribution
from conftest import LAYERS, masked_layer_of
from references import assert_agrees
from scipy import stats

import sdeinfer as si

T, PATHS, STEP = 0.2, 2**11, 0.02


@pytest.mark.parametrize("name", [pytest.param("feedforward", marks=pytest.mark.long), "mlp"])
def test_one_token_without_attention_has_its_exact_laws(name, key):
    """N(−a, 2a/T) and N(−a, 4a/T).

    The angle is that of a linear network, since the ReLU's drift is ~ (1 − ρ)^{3/2}: of two tokens the squared norm of
    one, and that of the other's part orthogonal to it, are independent and log-normal.
    """
    layer = LAYERS[name]()
    a = float(layer.limit().linear_noise)
    found = si.criteria.exponents(layer, 1.3 * jnp.eye(1), T, paths=PATHS, step=STEP, key=key)
    assert found.gradient.shape == found.angle.shape == (PATHS,)
    assert_distribution(found.gradient, stats.norm(-a, np.sqrt(2 * a / T)).cdf)
    assert_distribution(found.angle, stats.norm(-a, np.sqrt(4 * a / T)).cdf)


def test_the_angle_is_that_of_two_near_tokens_of_the_sde(key):
    layer, near, keys = LAYERS["transformer"](), 2e-6, jr.split(key)
    V0 = si.equicorrelated(tokens=2, correlation=0.2, norm=0.8)
    repeated, apart = si.criteria.repeated_token(V0, 1)
    V = si.simulate(layer, repeated + near * apart, [0.0, T], paths=PATHS, step=STEP, key=keys[0])
    x, y, both = V[..., 1, 1], V[..., 2, 2], V[..., 1, 2]
    # 1 − ρ = (1 − ρ²)/2 for near tokens, from the part of their difference that is orthogonal to them.
    angle = (x + y - 2 * both - (x - y) ** 2 / (4 * x)) / x
    found = si.criteria.exponents(layer, V0, T, token=1, paths=PATHS, step=STEP, key=keys[1])
    rates = np.log(angle[:, 1] / angle[:, 0]) / T
    assert_same_distribution(found.angle[np.isfinite(found.angle)], rates[np.isfinite(V[:, 1]).all(axis=(1, 2))])
    assert np.isfinite(found.angle).mean() >= 0.99


def test_the_angle_is_that_of_tokens_moved_by_the_tangent(key):
    """1 − ρ of x + εu/2 and x − εu/2 with their covariances, on the same paths: those of the first of two keys."""
    layer, size = LAYERS["mlp"](), 1e-4
    repeated, apart = si.criteria.repeated_token(1.3 * np.eye(1), 0)
    settings = {"paths": PATHS, "step": STEP}

    def log_distance(V, C, D):
        moved = V + size * (C + np.swapaxes(C, -1, -2)) + size**2 * D
        return np.log(1 - moved[..., 0, 1] / np.sqrt(moved[..., 0, 0] * moved[..., 1, 1]))

    paths = si.tangents(layer, repeated, [T], apart, **settings, key=jr.split(key)[0])
    end = log_distance(*(np.asarray(x)[:, 0] for x in (paths.covariance, paths.cross, paths.tangent)))
    found = si.criteria.exponents(layer, 1.3 * jnp.eye(1), T, **settings, key=key)
    np.testing.assert_allclose(found.angle, (end - log_distance(repeated, 0 * apart, apart)) / T, atol=1e-5)


def test_the_parted_tokens_start_with_the_given_token():
    V0 = si.equicorrelated(tokens=3, correlation=0.2)
    repeated, apart = si.criteria.repeated_token(V0, 1)
    np.testing.assert_array_equal(repeated[:3, :3], V0)
    np.testing.assert_array_equal(repeated[3], repeated[1])
    expected = np.zeros((4, 4))
    expected[[1, 3], [1, 3]], expected[[1, 3], [3, 1]] = 0.25, -0.25
    np.testing.assert_array_equal(apart, expected)


def test_exponents_have_a_gradient(key):
    """The parameters that change are γ and τ0 of attention; the two tokens that part are the only ones."""

    def both(change):
        layer = si.ShapedAttention(0.7 + change, 0.8 + change)
        found = si.criteria.exponents(layer, 1.44 * np.eye(1), T, paths=8, step=T / 2, key=key)
        return jnp.mean(found.angle) + jnp.mean(found.gradient)

    step, along = 1e-5, jax.jit(lambda change: jax.jvp(both, (change,), (1.0,)))
    (_, slope), (up, _), (down, _) = along(0.0), along(step), along(-step)
    np.testing.assert_allclose(slope, (up - down) / (2 * step), rtol=1e-5)


def test_paths_that_explode_are_counted(key):
    layer, V0 = (
        dataclasses.replace(LAYERS["transformer"](), gamma=0.9, tau0=0.05),
        si.equicorrelated(tokens=2, correlation=0.2, norm=0.35),
    )
    found = si.criteria.exponents(layer, V0, T, paths=PATHS, step=STEP, key=key)
    table = found.summary()
    assert list(table.index) == ["angle", "gradient"]
    for name, rates in zip(found._fields, found, strict=True):
        assert np.isfinite(rates).any()
        assert_agrees(table.loc[name, "exploded"], np.isnan(rates).mean())
        assert_agrees(table.loc[name, "mean"], np.nanmean(rates))
        assert_agrees(table.loc[name, "sd"], np.nanstd(rates, ddof=1))
        assert_agrees(table.loc[name, ["5%", "95%"]].to_numpy(), np.nanquantile(rates, [0.05, 0.95]))
    assert table["exploded"].between(0.01, 0.99).all()


def test_of_paths_that_all_explode_nothing_is_known():
    table = si.criteria.Exponents(np.full(3, np.nan), np.array([1.0, np.nan, np.nan])).summary()
    assert table["exploded"].tolist() == [1.0, 1 - 1 / 3]
    assert table[["mean", "sd"]].isna().all(axis=None)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mlp", {"token": 3}, "token: 0 to 2 is needed, got 3"),
        ("mlp", {"token": -1}, "token: 0 to 2 is needed, got -1"),
        ("causal transformer", {}, "layer: a token and its copy must attend to the same tokens; only without a mask"),
        ("prompts", {}, "layer: a token and its copy must attend to the same tokens; only without a mask they do"),
        ("mlp", {"time": -1.0}, "ts: "),
        ("mlp", {"paths": 0}, "paths: "),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_exponents_that_cannot_be_are_refused(name, options, message, key):
    layer = LAYERS[name]() if name in LAYERS else masked_layer_of(name, 3)
    V0 = si.equicorrelated(tokens=3, correlation=0.2)
    with pytest.raises(si.InputError, match=message) as caught:
        si.criteria.exponents(layer, V0, **{"time": T, "paths": 2} | options, key=key)
    assert "\n" not in str(caught.value)
