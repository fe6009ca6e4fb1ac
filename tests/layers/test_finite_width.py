"""Sampled layers of width n against their law to the next order in 1/n, in the spectral coordinates of V.

As in `test_widths`, a layer is sampled with its reflection and its linear twin on the same random numbers, here of the
covariance chain, for which all three cost O(m² n). What n E[dV] and n var[dV] differ from the law by is fitted by a
series in 1/n: the term 1/n itself must vanish, which for the limit it does not.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import references
from helpers.budget import assert_estimate, assert_within
from helpers.cases import LAYERS
from helpers.internals import NetworkKeys, PatternSpectrum, _initial_blocks, drift_terms, variance_terms
from helpers.moment_references import along, layer_moments
from helpers.references import assert_agrees

import sdeinfer as si
from sdeinfer.covariance import coordinates
from sdeinfer.layers import FiniteWidth, Limit

CASES = {
    "attention": si.ShapedAttention(0.7, 0.8),
    "attention, 4 heads": si.ShapedAttention(0.7, 0.8, heads=4),
    "attention, 4 heads and W_O": si.ShapedAttention(0.7, 0.8, heads=4, output_projection=True),
    "feed-forward": si.ResidualFeedForward(0.7, 1.2, -1.2),
    "feed-forward, r = 4": si.ResidualFeedForward(0.7, 1.2, -1.2, expansion=4),
    "MLP": si.ShapedMLP(1.2, -1.2),
    "transformer": si.ShapedTransformer(0.6, 0.8, 1.0, -1.0),
    "transformer, 4 heads, W_O, r = 4": si.ShapedTransformer(
        0.6, 0.8, 1.0, -1.0, heads=4, output_projection=True, expansion=4
    ),
    "attention, MLP": si.Stack((si.ShapedAttention(0.6, 0.8), si.ShapedMLP(1.0, -1.0))),
    "causal attention": si.ShapedAttention(0.7, 0.8, pattern=si.CAUSAL),
    "causal transformer, 4 heads, W_O": si.ShapedTransformer(
        0.6, 0.8, 1.0, -1.0, heads=4, output_projection=True, pattern=si.CAUSAL
    ),
    "transformer, prompts": si.ShapedTransformer(0.6, 0.8, 1.0, -1.0, pattern=si.Pattern(prompts=(2, 1))),
    "attention, MLP, a mask": si.Stack(
        (
            si.ShapedAttention(0.6, 0.8, pattern=si.Pattern.of_mask([[0, 1, 1], [1, 1, 0], [0, 0, 1]])),
            si.ShapedMLP(1.0, -1.0),
        )
    ),
}
"""Slopes with c₊ = −c₋, for which corrections are a series in 1/n and not in 1/√n."""

NEVER = 1e12
V = jnp.array([[1.0, 0.3, 0.1], [0.3, 1.4, -0.2], [0.1, -0.2, 0.7]])
BATCH = 4096


def replaced(layer, change):
    """The layer, or every layer of a stack, with its slopes and its τ0 replaced."""
    if isinstance(layer, si.Stack):
        return si.Stack([replaced(part, change) for part in layer.layers])
    new = change(layer)
    names = [name for name in new if name in layer.parameters()]
    return eqx.tree_at(lambda x: [getattr(x, name) for name in names], layer, [jnp.asarray(new[n]) for n in names])


def reflected(layer):
    def change(x):
        return {name: -value for name, value in x.parameters().items() if name != "gamma"}

    return replaced(layer, change)


def linear(layer):
    return replaced(layer, lambda x: {"c_plus": 0.0, "c_minus": 0.0, "tau0": NEVER})


@eqx.filter_jit
def _sums(layers, W, key, *, width, batches):
    """Over networks, means and mean squares of n dZ and n dZ², less those of the linear twin."""
    layers, V32 = jax.tree.map(lambda x: x.astype(jnp.float32), (layers, V))

    def batch(number):
        keys = NetworkKeys.numbered(key, jnp.arange(BATCH, dtype=jnp.uint32) + jnp.uint32(BATCH) * number)
        key_start, key_layer = keys.split(2)

        def move(layer):
            V0 = jnp.broadcast_to(V32[:, :, None, None], (*V.shape, 1, BATCH))
            start = _initial_blocks(V0, layer.column_blocks, width, key_start)
            after = layer.forward_covariance(start, width=width, keys=key_layer).sum(axis=2)
            return jnp.einsum("qab,abs->qs", W, after.astype(V.dtype) - V[:, :, None])

        shaped, mirrored, twin = jax.lax.map(move, layers)
        drift, square = (width * ((shaped**k + mirrored**k) / 2 - twin**k) for k in (1, 2))
        return [jnp.mean(x, axis=-1) for x in (drift, drift**2, square, square**2)]

    return [x.mean(axis=0) for x in jax.lax.map(batch, jnp.arange(batches, dtype=jnp.uint32))]


def moments(layer, width: int, batches: int, key) -> list[tuple[np.ndarray, np.ndarray]]:
    """Estimates of n E z and n var z, each with its Monte Carlo error."""
    W = forms(layer.limit().pattern)
    layers = jax.tree.map(lambda *values: jnp.stack(values), layer, reflected(layer), linear(layer))
    at = np.array(width) if layer.column_blocks == 1 else width  # one program for all widths, where they may be traced
    drift, drift2, square, square2 = map(np.asarray, _sums(layers, W, key, width=at, batches=batches))
    of_linear = references.linear_layer_covariance(linear(layer), V, width=width)
    known = width * np.einsum("qab,abdw,qdw->q", W, of_linear, W)
    variance = square + known - drift**2 / width
    drift_error, error = (np.sqrt((s - x**2) / (BATCH * batches)) for x, s in ((drift, drift2), (square, square2)))
    return [(drift, drift_error), (variance, error)]


@functools.cache
def forms(pattern: si.Pattern) -> np.ndarray:
    """W_q with z_q = ⟨W_q, dV⟩."""
    at = coordinates(np.asarray(V), pattern)
    return at.forms()[0] if isinstance(at, PatternSpectrum) else references.spectral_forms(np.asarray(V))


@functools.cache
def terms(pattern: si.Pattern) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """B₁ and the other terms of the drift, f_k, and e; all in the spectral coordinates of V."""
    at, drift = coordinates(np.asarray(V), pattern), drift_terms(np.asarray(V), pattern)
    features = variance_terms(np.asarray(V), at, drift, pattern)
    return np.einsum("qab,sab->sq", forms(pattern), drift), features, np.asarray(at.mixing)


def predicted(law: FiniteWidth) -> list[np.ndarray]:
    """What the law says of these moments."""
    drift, features, e = terms(law.limit.pattern)
    variance = law.limit.linear_noise + law.limit.attention_noise * e
    variance = variance + law.variance @ features + e * (law.variance_mixing @ features)
    return [np.asarray(law.drift) @ drift, np.asarray(variance)]


def predicted_limit(limit: Limit) -> list[np.ndarray]:
    drift, _, e = terms(limit.pattern)
    theta = np.array([limit.attention_drift, limit.relu_drift])
    return [theta @ drift[:2], np.asarray(limit.linear_noise + limit.attention_noise * e)]


def first_order(widths, differences, errors) -> tuple[np.ndarray, np.ndarray]:
    """Weighted least squares in 1/n, 1/n², 1/n³, one term less than widths: the coefficient of 1/n, and its error."""
    design = np.stack([np.asarray(widths, float) ** -(k + 1) for k in range(max(2, len(widths) - 1))], axis=1)
    weights = 1 / np.maximum(np.stack(errors), 1e-12) ** 2
    normal = np.einsum("ni,np,nj->pij", design, weights, design)
    moment = np.einsum("ni,np,np->pi", design, weights, np.stack(differences))
    return np.linalg.solve(normal, moment[..., None])[:, 0, 0], np.sqrt(np.linalg.inv(normal)[:, 0, 0])


def rms(x) -> float:
    return float(np.sqrt(np.mean(np.square(x))))


def assert_next_order(name: str, widths: list[int], batches: int, key) -> None:
    """The law leaves nothing of order 1/n, which the limit does; a table of the errors is printed."""
    layer = CASES[name]
    found = [moments(layer, n, batches, jr.fold_in(key, n)) for n in widths]
    laws = [predicted(layer.finite_width(n)) for n in widths]
    limit = predicted_limit(layer.limit())
    print()
    for which, what in enumerate(("mean", "variance")):
        estimates, errors = zip(*(pair[which] for pair in found), strict=True)
        scale = rms(limit[which])
        without = [estimate - limit[which] for estimate in estimates]
        left = [estimate - law[which] for estimate, law in zip(estimates, laws, strict=True)]
        for n, one, other, error in zip(widths, without, left, errors, strict=True):
            of_limit, of_law, noise = (rms(x) / scale for x in (one, other, error))
            print(f"{name}: {what}, n = {n:3d}: limit {of_limit:.5f}, finite width {of_law:.5f} ± {noise:.5f} off")
        coefficient, error = first_order(widths, left, errors)
        assert_estimate(coefficient, 0, error)
    # Were the limit taken for the law, its variances would show it.
    coefficient, error = first_order(widths, without, errors)
    with pytest.raises(AssertionError):
        assert_within(coefficient / error)


@pytest.mark.long
@pytest.mark.parametrize("name", ["attention", "feed-forward, r = 4", "causal attention"])
def test_moments_are_those_of_sampled_layers(name, key):
    assert_next_order(name, [8, 16], 2, key)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_moments_are_those_of_sampled_layers_closely(name, key):
    layer = CASES[name]
    widths = [n for n in (16, 32, 64, 128) if n >= 2 * len(V) * layer.column_blocks]
    assert_next_order(name, widths, 32, jr.fold_in(key, 1))


@pytest.mark.parametrize("width", [16, 400])
@pytest.mark.parametrize("name", CASES)
def test_moments_are_those_of_sums_over_tokens(name, width):
    """The same order in 1/n, from tensors of moments of the layer's parts: exact."""
    layer = CASES[name]
    expected, W = layer_moments(layer, np.asarray(V), width), forms(layer.limit().pattern)
    mean, variance = predicted(layer.finite_width(width))
    assert_agrees(mean, width * np.einsum("qab,ab->q", W, expected.increment))
    assert_agrees(variance, along(W, expected.covariance))


@pytest.mark.parametrize("name", CASES)
def test_wide_layers_have_the_law_of_the_limit(name):
    layer = CASES[name]
    limit = predicted_limit(layer.limit())
    gaps = [
        [
            np.abs(found - expected).max()
            for found, expected in zip(predicted(layer.finite_width(n)), limit, strict=True)
        ]
        for n in (1e4, 1e5, 1e6)
    ]
    # For slopes of one size and opposite sign the difference is a series in 1/n.
    np.testing.assert_allclose(np.divide(gaps[0], gaps[1]), 10, rtol=1e-2)
    np.testing.assert_allclose(np.divide(gaps[1], gaps[2]), 10, rtol=1e-3)


def leaves(law: FiniteWidth) -> np.ndarray:
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(law)])


@pytest.mark.parametrize("kind", ["transformer", "feedforward", "mlp"])
def test_slopes_count_by_the_kink_alone(kind):
    """Exchanged slopes, and slopes of one ratio s₊/s₋, are one layer: only q = δ²/(s̄² + δ²) is left of them."""
    n, (c_plus, c_minus) = 50, (0.7, -1.9)
    scaled = [1.3 * (np.sqrt(n) + c) - np.sqrt(n) for c in (c_plus, c_minus)]
    one, *others = (
        leaves(replaced(LAYERS[kind](), lambda x, p=p, m=m: {"c_plus": p, "c_minus": m}).finite_width(n))
        for p, m in ((c_plus, c_minus), (c_minus, c_plus), scaled)
    )
    for other in others:
        np.testing.assert_allclose(other, one, rtol=1e-12)


@pytest.mark.parametrize("kind", ["transformer", "feedforward", "mlp"])
def test_the_drift_of_a_relu_has_the_he_constant_of_the_width(kind):
    layer, n = LAYERS[kind](), 20
    s_plus, s_minus = (1 + float(c) / np.sqrt(n) for c in (layer.c_plus, layer.c_minus))
    he = 2 / (s_plus**2 + s_minus**2)
    np.testing.assert_allclose(layer.finite_width(n).limit.relu_drift, he * layer.limit().relu_drift, rtol=1e-12)


@pytest.mark.one_case("stack")
def test_a_layer_has_one_law_for_each_of_several_widths(layer):
    widths = jnp.array([10.0, 64.0, 500.0])
    together = jax.jit(jax.vmap(layer.finite_width))(widths)
    for row, n in enumerate((10, 64, 500)):
        one = leaves(jax.tree.map(lambda x, row=row: x[row], together))
        np.testing.assert_allclose(one, leaves(layer.finite_width(n)), rtol=1e-12)
