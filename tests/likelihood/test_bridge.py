"""Latent layers: the mean of w over innovations is the density of what was observed, by other ways of computing it."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_estimate
from helpers.cases import LAYERS, random_covariance
from helpers.internals import LayerLaw, Span, _log, bridge, layer_step, unvech, vech
from helpers.references import assert_agrees
from scipy import stats

import sdeinfer as si

WIDTH = 48
POWER = 4
SAMPLES = 8_000


@functools.partial(jax.jit, static_argnames=("tokens", "power"))
def _law_of(limit, h, tokens: int, power: int) -> LayerLaw:
    return LayerLaw.of_limit(limit, h, tokens=tokens, power=power)


def law_of(layer, tokens: int, batch: int, width: int = WIDTH, power: int = POWER) -> LayerLaw:
    return _law_of(layer.limit(), np.full(batch, 1 / width), tokens, power)


def normals(latent: int, tokens: int, batch: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(latent, tokens * (tokens + 1) // 2, batch))


def repeated(V, batch: int) -> np.ndarray:
    return np.repeat(np.asarray(V)[..., None], batch, axis=-1)


@jax.jit
def forward(law: LayerLaw, V, layers: int, key):
    """Covariances after some layers, drawn without looking at what was observed."""
    tokens = len(V)

    def move(number, V):
        step = layer_step(law, V)
        xi = jr.normal(jr.fold_in(key, number), (V.shape[-1], tokens * (tokens + 1) // 2))
        Y = step.mean + jnp.sqrt(step.variance) * jnp.moveaxis(jax.vmap(unvech)(xi), 0, -1)
        power = jnp.linalg.matrix_power(jnp.moveaxis(jnp.eye(tokens)[..., None] + Y, -1, 0), law.power)
        return jnp.einsum("ikb,bkl,jlb->ijb", step.Q, power, step.Q)

    return jax.lax.fori_loop(0, layers, move, V)


@functools.partial(jax.jit, static_argnames="outputs")
def bridged(law, start, end, lengths, xi, outputs: int = 0):
    return bridge(law, Span(start, end, lengths, outputs), xi)


def log_weights(law, start, end, layers: int, seed: int = 0, most: int = 4) -> np.ndarray:
    """Log w with room for the normals of spans of several lengths: one program for them."""
    tokens, _, batch = start.shape
    return np.asarray(bridged(law, start, end, np.full(batch, layers), normals(most - 1, tokens, batch, seed))[0])


def log_mean(log_w) -> tuple[float, float]:
    """Log of the mean of w, and its standard error."""
    log_w = np.asarray(log_w)
    w = np.exp(log_w - log_w.max())
    return float(np.log(w.mean()) + log_w.max()), float(w.std() / w.mean() / np.sqrt(len(w)))


def test_one_token_by_quadrature():
    """V is a geometric random walk on a grid of log V: its density after some layers is a power of a matrix."""
    layer = si.ResidualFeedForward(gamma=0.6, c_plus=0.5, c_minus=-1.0)
    x, cell = np.linspace(-4, 4, 2001, retstep=True)
    law = law_of(layer, 1, SAMPLES)
    step = jax.jit(layer_step)(law, np.ones((1, 1, SAMPLES)))
    mean, sd = step.mean[0, 0, 0], np.sqrt(step.variance[0, 0, 0])
    # V′ = V (1 + Y)^p, so that log V′ = log V + p log(1 + Y); the branch below −1 is 20 standard deviations away.
    root = np.exp((x[None] - x[:, None]) / POWER)
    kernel = stats.norm.pdf(root - 1, mean, sd) * root / POWER
    density = kernel[1000]
    for layers in (1, 2, 3, 4):
        for place in (910, 1000, 1120):
            end = np.exp(x[place])
            expected = np.log(density[place] / end)
            found, error = log_mean(log_weights(law, repeated(np.eye(1), SAMPLES), repeated([[end]], SAMPLES), layers))
            assert_estimate(found, expected, np.hypot(error, 1e-5))
        density = density @ kernel * cell


def test_bridges_are_exact_where_steps_commute_and_are_small():
    """Of one token of wide networks: w is the density of the end whatever the innovations, up to O(1/n)."""
    law = law_of(si.ResidualFeedForward(gamma=0.6, c_plus=0.5, c_minus=-1.0), 1, SAMPLES, width=100 * WIDTH)
    for end in (0.97, 1.05):
        assert log_weights(law, repeated(np.eye(1), SAMPLES), repeated([[end]], SAMPLES), 4).std() < 0.02


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "tokens", "layers"),
    [
        ("transformer", 2, 4),
        *[pytest.param(*case, marks=pytest.mark.slow) for case in (("transformer", 3, 3), ("mlp", 2, 4))],
    ],
)
def test_bridges_have_the_density_of_layers_that_know_nothing_of_the_end(name, tokens, layers):
    law, start = law_of(LAYERS[name](), tokens, SAMPLES), repeated(random_covariance(tokens, seed=3), SAMPLES)
    end = repeated(forward(law, start, layers, jr.key(5))[..., 0], SAMPLES)
    found, error = log_mean(log_weights(law, start, end, layers))
    # The last layer's density at the end, averaged over all layers before it.
    before = forward(law, start, layers - 1, jr.key(6))
    expected, its_error = log_mean(log_weights(law, before, end, 1))
    assert_estimate(found, expected, np.hypot(error, its_error))
    assert error < its_error / 3


@pytest.mark.one_case
@pytest.mark.parametrize(("tokens", "power"), [(2, 4), (2, 2), (2, 16), (4, 8)])
def test_one_layer_by_the_change_of_variables(tokens, power):
    law = law_of(LAYERS["transformer"](), tokens, SAMPLES, power=power)
    V, xi = random_covariance(tokens, seed=2), normals(1, tokens, 1)[0, :, 0]

    @jax.jit
    def after(law, V, xi):
        step = jax.tree.map(lambda x: x[..., 0], layer_step(law, V[..., None]))

        def move(xi):
            F = jnp.eye(tokens) + step.mean + jnp.sqrt(step.variance) * unvech(xi)
            end = step.Q @ jnp.linalg.matrix_power(F, power) @ step.Q.T
            return vech(end), end

        return jax.jacfwd(move, has_aux=True)(xi)

    jacobian, end = (np.asarray(x) for x in after(law_of(LAYERS["transformer"](), tokens, 1, power=power), V, xi))
    expected = stats.norm.logpdf(xi).sum() - np.linalg.slogdet(jacobian)[1]
    found = log_weights(law, repeated(V, SAMPLES), repeated(end, SAMPLES), 1)
    assert_agrees(found, np.full(SAMPLES, expected), rtol=1e-8)


@pytest.mark.one_case
@pytest.mark.parametrize("outputs", [1, 6])
def test_outputs_have_the_density_of_their_covariance(outputs):
    tokens, layers, batch = 2, 3, SAMPLES
    layer, V = LAYERS["transformer"](), random_covariance(tokens, seed=4)
    law = law_of(layer, tokens, batch)
    X = np.linalg.cholesky(np.asarray(V)) @ np.random.default_rng(0).normal(size=(tokens, outputs))
    S = repeated(X @ X.T / outputs, batch)
    lengths, xi = np.full(batch, layers), normals(layers, tokens, batch)
    log_w = bridged(law, repeated(V, batch), S, lengths, xi, outputs=outputs)[0]
    # After no layers it is that of independent outputs.
    at_once = bridged(law, repeated(V, batch), S, 0 * lengths, xi, outputs=outputs)[0]
    assert_agrees(at_once, np.full(batch, stats.multivariate_normal.logpdf(X.T, cov=V).sum()))
    found, error = log_mean(log_w)
    last = np.moveaxis(np.asarray(forward(law, repeated(V, batch), layers, jr.key(6))), -1, 0)
    density = -0.5 * (
        np.einsum("aq,nab,bq->n", X, np.linalg.inv(last), X)
        + outputs * (np.linalg.slogdet(last)[1] + tokens * np.log(2 * np.pi))
    )
    expected, its_error = log_mean(density)
    assert_estimate(found, expected, np.hypot(error, its_error))


WIDE, FAR, TOGETHER = 128, 16, 2000
"""Width, layers and batch of spans of three tokens, in one program."""


def three_spans():
    """The law, starts, ends, lengths and normals of three spans of three tokens, over and over again."""
    which = np.arange(TOGETHER) % 3
    starts = np.stack([random_covariance(3, seed=s) for s in range(3)], axis=-1)[..., which]
    lengths, growth = np.array([1, 2, 4])[which], np.array([1.0, 1.2, 0.9])[which]
    law = law_of(LAYERS["transformer"](), 3, TOGETHER)
    return law, starts, starts * growth, lengths, normals(FAR - 1, 3, TOGETHER)


@pytest.mark.long
def test_spans_of_several_lengths_side_by_side_are_those_alone():
    law, starts, ends, lengths, xi = three_spans()
    together, path = (np.asarray(x) for x in bridged(law, starts, ends, lengths, xi))
    alone, mine = (np.asarray(x) for x in bridged(law, starts, ends, np.full(TOGETHER, 2), xi[-1:]))
    two = lengths == 2
    assert_agrees(together[two], alone[two])
    np.testing.assert_allclose(path[-1:, :, :, two], mine[..., two], rtol=1e-12)


@jax.jit
@jax.value_and_grad
def value_and_slope(c, start, xi):
    """Sum of log w where the end is 1.1 times the start, and its gradient in γ, τ0 and c₊."""
    limit = si.ShapedTransformer(gamma=c[0], tau0=c[1], c_plus=c[2], c_minus=-1.0).limit()
    batch = start.shape[-1]
    law = LayerLaw.of_limit(limit, jnp.full(batch, 1 / WIDTH), tokens=len(start), power=POWER)
    return jnp.sum(bridge(law, Span(start, start * 1.1, jnp.full(batch, len(xi) + 1)), xi)[0])


@pytest.mark.long
@pytest.mark.parametrize("start", [si.equicorrelated(tokens=3, correlation=0.2), random_covariance(3)])
def test_gradients_are_finite_and_right(start):
    """In the coefficients, also from a start whose spectrum repeats."""
    at, given = np.array([0.5, 0.8, 0.4]), (repeated(start, 2), normals(3, 3, 2))
    numerical = []
    for unit in 1e-6 * np.eye(3):
        up, down = (value_and_slope(at + step, *given)[0] for step in (unit, -unit))
        numerical.append((up - down) / 2e-6)
    np.testing.assert_allclose(value_and_slope(at, *given)[1], numerical, rtol=1e-5, atol=1e-5)


def test_the_logarithm_is_its_series():
    """Four terms of log D = 2 (y + y³/3 + …) with y = (D − I)(D + I)⁻¹; the rest is at most 2 y⁹/(9 (1 − y²))."""
    values, axes = np.array([0.5, 1.0, 2.0]), np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]
    logarithm = _log(jnp.asarray(axes * values @ axes.T)[..., None])[..., 0]
    y = 1 / 3
    assert np.abs(logarithm - axes * np.log(values) @ axes.T).max() <= 2 * y**9 / (9 * (1 - y**2))
