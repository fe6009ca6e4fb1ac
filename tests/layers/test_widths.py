"""Sampled layers at finite width against their limits: n E[V′ − V] → b(V) and n Cov[V′ − V] → Σ(V) like 1/n.

Each shaped layer is sampled together with its linear twin (c± = 0, τ0 = ∞) and with its reflection (c₊ and c₋
exchanged, τ0 → −τ0) on the same weights. The twin's moments are known exactly at every width and it shares most of the
noise: a control variate. The reflection has the layer's own law, since the weights' signs are random, and deviates from
the twin to the other side: an antithetic variate. The slopes are c₊ = −c₋, for which the finite-width corrections are a
series in 1/n; other slopes add the factor c ≈ 1 − (c₊ + c₋)/√n to the ReLU's drift.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import references
from helpers.budget import assert_estimate, assert_mean, mean_and_error
from helpers.internals import vech
from helpers.references import packed

import sdeinfer as si
from sdeinfer.networks import tokens_with_covariance

NEVER = 1e12  # a temperature at which the softmax is flat
PAIRS = {
    "mlp": (si.ShapedMLP(1.0, -1.0), si.ShapedMLP(0.0, 0.0)),
    "feedforward": (si.ResidualFeedForward(0.8, 1.0, -1.0), si.ResidualFeedForward(0.8, 0.0, 0.0)),
    "attention": (si.ShapedAttention(0.9, 0.5, key_width=8), si.ShapedAttention(0.9, NEVER, key_width=8)),
    "transformer": (
        si.ShapedTransformer(0.9, 0.5, 1.0, -1.0, key_width=8),
        si.ShapedTransformer(0.9, NEVER, 0.0, 0.0, key_width=8),
    ),
    "causal attention": (
        si.ShapedAttention(0.9, 0.5, key_width=8, pattern=si.CAUSAL),
        si.ShapedAttention(0.9, NEVER, key_width=8, pattern=si.CAUSAL),
    ),
}
"""A layer and its linear twin. A narrow key is as good as a wide one: the limit does not depend on it."""

V = jnp.array([[1.0, -0.5], [-0.5, 0.7]])
"""Two tokens in opposition, between which attention has much to do."""

STARTS = {"causal attention": jnp.array([[0.9, -0.4, 0.1], [-0.4, 0.8, -0.3], [0.1, -0.3, 0.6]])}
"""With a causal mask three: the first of two attends to nothing but itself."""


ROUNDING = 1e-4
"""Of moments in single precision, n = 256 times."""


def sample(layers, V, width, keys) -> list[np.ndarray]:
    """V′ after one layer, packed, for each of the layers on the same tokens and weights.

    In single precision, whose rounding is far below every Monte Carlo error here.
    """
    layers = jax.tree.map(lambda *x: np.array(x, np.float32), *layers)
    return list(np.asarray(_sample(layers, np.asarray(V, np.float32), width, keys), np.float64))


@eqx.filter_jit
def _sample(layers, V, width, keys):
    def one(key):
        key_tokens, key_layer = jr.split(key)
        X = tokens_with_covariance(V, width=width, key=key_tokens)
        outputs = jax.vmap(lambda layer: layer.forward(X, key=key_layer))(layers)
        return jax.vmap(lambda Y: vech(Y @ Y.T / width))(outputs)

    return jnp.moveaxis(jax.lax.map(one, keys, batch_size=500), 1, 0)


def reflected(layer):
    """The layer with c₊ = −c₋ exchanged and the sign of τ0 reversed, which its constructor would refuse."""
    names = [name for name in ("c_plus", "c_minus", "tau0") if name in layer.parameters()]
    return eqx.tree_at(lambda x: [getattr(x, name) for name in names], layer, [-getattr(layer, name) for name in names])


def moments(name: str, width: int, samples: int, key) -> tuple[tuple, tuple]:
    """Estimates of n E[V′ − V] and n Cov[V′ − V], each with its Monte Carlo error."""
    (layer, linear), start = PAIRS[name], STARTS.get(name, V)
    shaped, mirrored, twin = sample((layer, reflected(layer), linear), start, width, jr.split(key, samples))
    drift = width * ((shaped + mirrored) / 2 - twin)  # the twin's mean is V
    mean = packed(start) + drift.mean(axis=0) / width
    products = (outer(shaped - mean) + outer(mirrored - mean)) / 2 - outer(twin - packed(start))
    known = references.packed_tensor(references.linear_layer_covariance(linear, start, width=width))
    covariance, error = mean_and_error(width * products)
    return mean_and_error(drift), (covariance + width * known, error)


def outer(x: np.ndarray) -> np.ndarray:
    return x[:, :, None] * x[:, None, :]


def intercept(widths, estimates, errors) -> tuple[np.ndarray, np.ndarray]:
    """Weighted least squares in 1, 1/n, 1/n², as far as the widths go: each entry's value at n = ∞, and its error."""
    design = np.stack([np.asarray(widths, float) ** -k for k in range(min(3, len(widths)))], axis=1)
    weights = 1 / np.stack(errors) ** 2
    normal = np.einsum("ni,n...,nj->...ij", design, weights, design)
    moment = np.einsum("ni,n...,n...->...i", design, weights, np.stack(estimates))
    return np.linalg.solve(normal, moment[..., None])[..., 0, 0], np.sqrt(np.linalg.inv(normal)[..., 0, 0])


def assert_limit(name: str, widths: list[int], samples: int, key) -> None:
    (layer, _), start = PAIRS[name], STARTS.get(name, V)
    keys = jr.split(key, len(widths))
    found = [moments(name, n, samples, k) for n, k in zip(widths, keys, strict=True)]
    for which, expected in enumerate((packed(references.drift(layer, start)), references.diffusion(layer, start))):
        estimates, errors = zip(*(pair[which] for pair in found), strict=True)
        # Where layer and twin are one, as for the first token under a mask, nothing but rounding is left.
        errors = [np.maximum(error, ROUNDING) for error in errors]
        extrapolated, error = intercept(widths, estimates, errors)
        assert_estimate(extrapolated, expected, error)


@pytest.mark.long
@pytest.mark.parametrize("name", ["feedforward", "attention", "causal attention"])
def test_moments_of_one_layer_tend_to_the_limit(name, key):
    assert_limit(name, [32, 64], 2_000, key)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_moments_of_one_layer_tend_to_the_limit_closely(name, key):
    assert_limit(name, [32, 64, 128, 256], 6_000, jr.fold_in(key, 1))


NARROW, SLOPES = 6, (0.8, -1.1)
KINDS = {"mlp": si.ShapedMLP, "feedforward": functools.partial(si.ResidualFeedForward, 0.9)}


@functools.cache
def narrow(name: str) -> list[np.ndarray]:
    """V′ after a narrow layer, after one with the slopes exchanged, and after a linear one, on the same weights."""
    layers = [KINDS[name](*slopes) for slopes in (SLOPES, SLOPES[::-1], (0.0, 0.0))]
    return sample(layers, V, NARROW, jr.split(jr.key(20230630), 20_000))


@pytest.mark.one_case("feedforward")
@pytest.mark.parametrize("name", KINDS)
def test_drift_of_relu_layers_is_exact_at_every_width(name):
    # n E[V′ − V] = c b(V) for every n and every pair of slopes, with zero diagonal: E V_αα is constant.
    he = 2 / sum((1 + slope / np.sqrt(NARROW)) ** 2 for slope in SLOPES)
    shaped, _, twin = narrow(name)
    assert_mean(NARROW * (shaped - twin), he * packed(references.drift(KINDS[name](*SLOPES), V)))


@pytest.mark.one_case("feedforward")
@pytest.mark.parametrize("name", [*KINDS, "transformer"])
def test_moments_of_linear_layers_are_exact_at_every_width(name, key):
    if name in KINDS:
        linear, samples = KINDS[name](0.0, 0.0), narrow(name)[2]
    else:
        linear = PAIRS[name][1]
        (samples,) = sample((linear,), V, NARROW, jr.split(key, 20_000))
    moved = samples - packed(V)
    assert_mean(moved, 0)
    expected = references.packed_tensor(references.linear_layer_covariance(linear, V, width=NARROW))
    assert_mean(outer(moved), expected)
