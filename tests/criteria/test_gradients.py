"""Norms of gradients and exponents: exact laws, near tokens, and networks whose weights are arguments."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pandas as pd
import pytest
from helpers.budget import assert_distribution, assert_estimate, assert_mean, assert_same_distribution, mean_and_error
from helpers.cases import CAUSAL, LAYERS, masked_layer_of, random_covariance
from helpers.references import assert_agrees
from scipy import stats

import sdeinfer as si

T, PATHS, STEP = 0.2, 2**11, 0.02
"""Shared, as the numbers of tokens are: programs are compiled once."""


@pytest.fixture
def V0():
    """So small that hardly any path explodes."""
    return 0.5 * random_covariance(3)


def gradient_norms(layer, V0, ts, *, key, time=T, **options):
    return si.criteria.gradient_norms(layer, V0, ts, time=time, paths=PATHS, step=STEP, key=key, **options)


@pytest.mark.one_case("mlp")
@pytest.mark.parametrize("name", ["transformer", "mlp"])
def test_one_token_has_its_exact_law(name, key):
    """log D ~ N(−a(T − t), 2a(T − t)), from every depth-time t."""
    layer, ts = LAYERS[name](), [0.0, T / 2]
    found = gradient_norms(layer, 1.3 * jnp.eye(1), ts, key=key)
    assert found.norms.shape == (PATHS, 2, 1)
    np.testing.assert_array_equal(found.times, ts)
    a = float(layer.limit().linear_noise)
    for left, norms in zip([T, T / 2], found.norms[:, :, 0].T, strict=True):
        assert_distribution(np.log(norms), stats.norm(-a * left, np.sqrt(2 * a * left)).cdf)


@pytest.mark.long
def test_the_tokens_norms_have_the_sum_of_a_tangent_of_all_tokens(V0, key):
    """In the mean only: the tangents of two tokens also have a product, whose mean is zero."""
    layer, keys = LAYERS["transformer"](), jr.split(key)
    norms = gradient_norms(layer, V0, [0.0, T / 2], key=keys[0]).norms[:, 0].sum(axis=1)
    together = si.tangents(layer, V0, [T], jnp.eye(3), paths=PATHS, step=STEP, key=keys[1])
    together = np.asarray(si.criteria.squared_jacobian_norm(together))[:, 0]
    (mean, error), (other, other_error) = map(mean_and_error, (norms, together))
    assert_estimate(mean, other, np.hypot(error, other_error))


@pytest.mark.one_case
@pytest.mark.parametrize("of", ["queries", "values"])
@pytest.mark.parametrize("name", ["transformer", "causal transformer"])
def test_weights_gradients_start_in_the_directions_of_a_change_of_the_weights(name, of, V0, key):
    """Just before the end: γ² tr V, and the mean γ²/τ0² Σ_α V_αα tr(V H_α V H_α)/m_α²."""
    layer = (LAYERS | CAUSAL)[name]()
    gamma, tau0, V = float(layer.gamma), float(layer.tau0), np.asarray(V0)
    norms, expected = gradient_norms(layer, V0, [0.0], time=1e-12, of=of, key=key).norms[:, 0, 0], 0.0
    if of == "values":
        assert_agrees(norms, np.full(PATHS, gamma**2 * np.trace(V)), rtol=1e-5)
        return
    for token, row in enumerate(layer.limit().pattern.mask(3).astype(float)):
        HV = (np.diag(row) - np.outer(row, row) / row.sum()) @ V
        expected += V[token, token] * np.trace(HV @ HV) / row.sum() ** 2
    assert_mean(norms, gamma**2 / tau0**2 * expected)


@pytest.mark.one_case("queries")
@pytest.mark.parametrize("of", ["tokens", "values", "queries"])
def test_paths_that_explode_have_infinite_norms(of, V0, key):
    layer = dataclasses.replace(LAYERS["transformer"](), gamma=0.9, tau0=0.05)
    found = gradient_norms(layer, 0.2 * V0, [0.0, T / 2], of=of, key=key)
    assert not np.isnan(found.norms).any()
    exploded = np.isinf(found.norms).mean(axis=(0, 2))
    assert (exploded > 0.01).all()
    assert (exploded < 0.99).all()
    assert not np.isnan(found.quantiles([0.05, 0.5, 0.95])).any()


@pytest.mark.long
@pytest.mark.parametrize("name", ["feedforward", "mlp"])
def test_exponents_of_one_token_have_exact_laws(name, key):
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


@pytest.mark.long
def test_exponents_have_a_gradient(key):
    """The parameters that change are γ and τ0 of attention; the two tokens that part are the only ones."""

    def both(change):
        layer = si.ShapedAttention(0.7 + change, 0.8 + change)
        found = si.criteria.exponents(layer, 1.44 * np.eye(1), T, paths=8, step=T / 2, key=key)
        return jnp.mean(found.angle) + jnp.mean(found.gradient)

    step, along = 1e-5, jax.jit(lambda change: jax.jvp(both, (change,), (1.0,)))
    (_, slope), (up, _), (down, _) = along(0.0), along(step), along(-step)
    np.testing.assert_allclose(slope, (up - down) / (2 * step), rtol=1e-5)


@pytest.mark.long
def test_exponents_of_paths_that_explode_are_not_known(key):
    layer = dataclasses.replace(LAYERS["transformer"](), gamma=0.9, tau0=0.05)
    V0 = si.equicorrelated(tokens=2, correlation=0.2, norm=0.35)
    found = si.criteria.exponents(layer, V0, T, paths=PATHS, step=STEP, key=key)
    assert found.summary()["exploded"].between(0.01, 0.99).all()


def test_a_summary_is_of_the_paths_that_do_not_explode():
    rates = np.array([0.3, np.nan, -0.2, 0.8])
    table = si.criteria.Exponents(rates, np.full(4, np.nan)).summary()
    low, high = np.nanquantile(rates, [0.05, 0.95])
    expected = {"mean": 0.3, "sd": 0.5, "5%": low, "95%": high, "exploded": 0.25}
    pd.testing.assert_series_equal(table.loc["angle"], pd.Series(expected), check_names=False)
    np.testing.assert_array_equal(table.loc["gradient"], [np.nan] * 4 + [1])


NORMS, EXPONENTS = si.criteria.gradient_norms, si.criteria.exponents
REFUSED = {
    "ts too late": (NORMS, "mlp", {"ts": [T]}, r"ts: increasing depth-times from 0 to less than 0.2 .* got \[0.2\]"),
    "ts twice": (NORMS, "mlp", {"ts": [0.1, 0.1]}, "ts: increasing depth-times"),
    "no ts": (NORMS, "mlp", {"ts": []}, "ts: increasing depth-times"),
    "weights without attention": (NORMS, "mlp", {"of": "values"}, "of a layer with one ShapedAttention or"),
    "keys": (NORMS, "transformer", {"of": "keys"}, "of: tokens, or values or queries of a layer with one"),
    "a token that is not there": (EXPONENTS, "mlp", {"token": 3}, "token: 0 to 2 is needed, got 3"),
    "a mask": (EXPONENTS, "causal transformer", {}, "layer: exponents of a token and its copy need"),
    "prompts": (EXPONENTS, "prompts", {}, "layer: exponents of a token and its copy need"),
    "a time": (EXPONENTS, "mlp", {"time": -1.0}, "ts: "),
    "no paths": (EXPONENTS, "mlp", {"paths": 0}, "paths: "),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.usefixtures("unchecked")
def test_what_cannot_be_is_refused_in_one_line(case, key):
    function, name, options, message = REFUSED[case]
    layer = LAYERS[name]() if name in LAYERS else masked_layer_of(name, 3)
    V0, own = si.equicorrelated(tokens=3, correlation=0.2), {"time": T, "paths": 2, "key": key}
    given = own | ({"ts": [0.0]} if function is NORMS else {}) | options
    with pytest.raises(si.InputError, match=message) as caught:
        function(layer, V0, **given)
    assert "\n" not in str(caught.value)


WIDTH, DEPTH, LAYER, NETWORKS = 128, 32, 8, 384
GAMMA, TAU0 = 0.5, 1.0


def attention(X, W, mask, heads: int):
    """Shaped attention (Eq. 9) with the weights as an argument, of shape (3, n, n)."""
    tokens, width = X.shape
    queries, keys, values = jnp.swapaxes((X @ W / math.sqrt(width)).reshape(3, tokens, heads, -1), 1, 2)
    tau = TAU0 * math.sqrt(width * width / heads)
    scores = jnp.where(mask, queries @ jnp.swapaxes(keys, 1, 2) / tau, -jnp.inf)
    A = jnp.eye(tokens) + jax.nn.softmax(scores, axis=-1) - mask / mask.sum(axis=1, keepdims=True)
    branch = jnp.swapaxes(A.astype(X.dtype) @ values, 0, 1).reshape(tokens, width)
    return math.sqrt(1 - GAMMA**2) * X + GAMMA * branch


@functools.partial(jax.jit, static_argnames="heads")
def weights_gradients(V0, mask, keys, *, heads: int):
    """Squared norms of the gradients of one layer's W_Q, W_K and W_V, for a white gradient of the output."""

    def network(key):
        key_tokens, key_weights, key_output = jr.split(key, 3)
        W = jr.normal(key_weights, (DEPTH, 3, WIDTH, WIDTH), V0.dtype)
        directions, _ = jnp.linalg.qr(jr.normal(key_tokens, (WIDTH, len(V0)), V0.dtype))
        X = jnp.linalg.cholesky(V0) @ directions.T * math.sqrt(WIDTH)
        G = jr.normal(key_output, X.shape, X.dtype)

        def pass_through(X, W):
            return jax.lax.scan(lambda X, W: (attention(X, W, mask, heads), None), X, W)[0]

        def loss(own):
            return jnp.sum(G * pass_through(attention(X_before, own, mask, heads), W[LAYER + 1 :]))

        X_before = pass_through(X, W[:LAYER])
        # The norm of the output's gradient, which is 1 for large n, is divided out.
        return jnp.sum(jax.grad(loss)(W[LAYER]) ** 2, axis=(1, 2)) / jnp.mean(G**2)

    return jax.lax.map(network, keys)


@pytest.mark.slow
@pytest.mark.parametrize(("pattern", "heads"), [(si.Pattern(), 1), (si.CAUSAL, 2)], ids=["no mask", "causal"])
def test_weights_gradients_are_those_of_networks(pattern, heads, key):
    tokens, keys = 3, jr.split(key, 3)
    V0 = si.equicorrelated(tokens=tokens, correlation=0.2, norm=1.2).astype(jnp.float32)
    found = weights_gradients(V0, jnp.asarray(pattern.mask(tokens)), jr.split(keys[0], NETWORKS), heads=heads)
    found = np.asarray(found, np.float64)
    layer = si.ShapedAttention(GAMMA, TAU0, heads=heads, pattern=pattern)
    for of, norms, own in (("queries", found[:, 0], keys[1]), ("values", found[:, 2] / WIDTH, keys[2])):
        ts, time = [LAYER / WIDTH], DEPTH / WIDTH
        expected = gradient_norms(layer, V0, ts, time=time, of=of, key=own).norms[:, 0, 0].astype(np.float64)
        assert np.isfinite(expected).all()
        (mean, error), (other, other_error) = map(mean_and_error, (norms, expected))
        test = stats.ks_2samp(norms, expected, method="asymp")
        print(
            f"\n{of}, {pattern}, {heads} heads: mean {mean:.4f} ± {error:.4f} in networks, {other:.4f} ± "
            f"{other_error:.4f} SDE; sd of the log {np.log(norms).std():.3f} and {np.log(expected).std():.3f}; "
            f"KS {test.statistic:.4f}, p {test.pvalue:.2g}"
        )
        assert_estimate(mean, other, np.hypot(error, other_error))
        assert_same_distribution(norms, expected)
