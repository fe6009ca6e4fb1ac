"""The covariance chain has the law that the weights give: weights are its naive twin."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import references
from helpers.budget import assert_distribution, assert_mean, assert_same_distribution
from helpers.cases import random_covariance
from helpers.internals import GROUP, NetworkKeys, NetworkStreams, gram, threefry, wishart_draws, wishart_factor
from helpers.references import assert_agrees, packed
from jax.extend.random import threefry_2x32
from scipy import stats

import sdeinfer as si
from sdeinfer.networks import covariance_chain

NEVER = 1e12  # a temperature at which the softmax is flat
SLOPES = {"c_plus": 1.0, "c_minus": -1.5}
CHAINS = {
    "mlp": si.ShapedMLP(**SLOPES),
    "feedforward, r = 4": si.ResidualFeedForward(0.9, **SLOPES, expansion=4),
    "transformer, H = 4": si.ShapedTransformer(0.7, 0.4, **SLOPES, heads=4, expansion=4),
    "transformer, H = 4, W_O": si.ShapedTransformer(0.7, 0.4, **SLOPES, heads=4, output_projection=True),
    "causal transformer, H = 4": si.ShapedTransformer(0.7, 0.4, **SLOPES, heads=4, pattern=si.CAUSAL),
}
MORE_CHAINS = {
    "feedforward": si.ResidualFeedForward(0.6, **SLOPES),
    "attention": si.ShapedAttention(0.9, 0.5),
    "attention, n_k = 2": si.ShapedAttention(0.9, 0.5, key_width=2),
    "transformer": si.ShapedTransformer(0.7, 0.5, **SLOPES),
    "causal transformer, H = 4, W_O": si.ShapedTransformer(
        0.7, 0.4, **SLOPES, heads=4, output_projection=True, pattern=si.CAUSAL
    ),
    "causal attention with gains": si.ShapedAttention(0.6, 0.4, pattern=si.CAUSAL, gamma1=0.7, gamma2=0.4),
    "stack, H = 2 and 4": si.Stack(
        (
            si.ShapedAttention(0.7, 0.4, heads=2),
            si.ShapedMLP(**SLOPES),
            si.ShapedAttention(0.7, 0.4, heads=4),
            si.ResidualFeedForward(0.5, **SLOPES),
        )
    ),
}


def last(layer, V0, *, networks, method, key, **sizes) -> np.ndarray:
    """V after the last layer, in single precision, whose rounding is far below the Monte Carlo errors here."""
    sizes |= {"observe_every": sizes["depth"]}
    data = si.sample_networks(layer, V0.astype(jnp.float32), networks=networks, method=method, **sizes, key=key)
    return data["covariance"].values[:, -1].astype(np.float64)


def assert_chain_has_the_law_of_the_weights(layer, *, networks, key, **sizes) -> None:
    V0, keys = random_covariance(3), jr.split(key)
    chain = last(layer, V0, networks=networks, method="chain", key=keys[0], **sizes)
    weights = last(layer, V0, networks=networks, method="weights", key=keys[1], **sizes)
    for a, b in ((0, 0), (0, 2), (1, 1)):
        assert_same_distribution(chain[:, a, b], weights[:, a, b])
    correlations = [V[:, 0, 1] / np.sqrt(V[:, 0, 0] * V[:, 1, 1]) for V in (chain, weights)]
    assert_same_distribution(*correlations)
    assert_same_distribution(np.linalg.slogdet(chain)[1], np.linalg.slogdet(weights)[1])


@pytest.mark.long
def test_chain_has_the_law_of_the_weights(key):
    # As narrow as four heads of three tokens allow: there the law is farthest from its limit.
    # A few layers: their weights are most of the time, and the slow test next to this one takes ten.
    layer = CHAINS["causal transformer, H = 4"]
    assert_chain_has_the_law_of_the_weights(layer, width=24, depth=4, networks=3_000, key=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", CHAINS | MORE_CHAINS)
def test_chain_has_the_law_of_the_weights_closely(name, key):
    layer = (CHAINS | MORE_CHAINS)[name]
    assert_chain_has_the_law_of_the_weights(layer, width=24, depth=10, networks=20_000, key=jr.fold_in(key, 1))


@eqx.filter_jit
def one_layer(layer, V, networks, width, key):
    keys = NetworkKeys.numbered(key, jnp.arange(networks, dtype=jnp.uint32))
    return covariance_chain(layer, V, width=width, layers=1, keys=keys)[:, 1]


@pytest.mark.parametrize(
    "layer",
    [
        si.ShapedAttention(0.8, NEVER, heads=3),
        si.ShapedAttention(0.8, NEVER, heads=3, output_projection=True),
        si.ResidualFeedForward(0.8, 0.0, 0.0, expansion=1.5),
    ],
    ids=["heads", "projection", "expansion"],
)
@pytest.mark.parametrize("method", ["chain", pytest.param("weights", marks=pytest.mark.long)])
def test_linear_layers_have_their_exact_moments(layer, method, key):
    width, V = 12, random_covariance(2)
    difference = packed(last(layer, V, width=width, depth=1, networks=20_000, method=method, key=key)) - packed(V)
    assert_mean(difference, 0)
    expected = references.packed_tensor(references.linear_layer_covariance(layer, V, width=width))
    assert_mean(difference[:, :, None] * difference[:, None, :], expected)


@pytest.mark.one_case("True")
@pytest.mark.parametrize("projection", [False, True])
def test_noise_of_heads_is_that_of_their_limit(projection, key):
    # A layer of attention costs nothing at a width where nothing is left of the corrections of order 1/n.
    width, V = 2**24, 4 * random_covariance(2)
    layer = si.ShapedAttention(0.8, 0.5, heads=4, output_projection=projection)
    step = math.sqrt(width) * (packed(one_layer(layer, V, 40_000, width, key)) - packed(V))
    assert_mean(step[:, :, None] * step[:, None, :], references.diffusion(layer, V))


def test_a_linear_network_has_the_wishart_law(key):
    # Bartlett: whitened by the layer before, the Cholesky factor of n V has independent entries.
    width, V0 = 8, random_covariance(3)
    data = si.sample_networks(si.ShapedMLP(0.0, 0.0), V0, width=width, depth=3, networks=2_000, key=key)
    V = data["covariance"].values
    L = np.linalg.inv(np.linalg.cholesky(V[:, :-1]))
    B = np.linalg.cholesky(width * L @ V[:, 1:] @ np.swapaxes(L, -1, -2))
    for token in range(3):
        assert_distribution(B[..., token, token] ** 2, stats.chi2(width - token).cdf)
    assert_distribution(B[..., *np.tril_indices(3, -1)], stats.norm.cdf)


@pytest.mark.one_case
@pytest.mark.parametrize(("name", "dtype"), [("mlp", jnp.float64), ("transformer, H = 4", jnp.float32)])
def test_equal_tokens_stay_equal_to_the_last_bit(name, dtype, key):
    V0 = random_covariance(2)[jnp.array([0, 1, 0])][:, jnp.array([0, 1, 0])].astype(dtype)
    V = si.sample_networks(CHAINS[name], V0, width=32, depth=16, networks=5, key=key)["covariance"].values
    np.testing.assert_array_equal(V[..., 2, :], V[..., 0, :])
    np.testing.assert_array_equal(V, np.swapaxes(V, -1, -2))
    assert (V[:, 1:, 0, 0].std(axis=0) > 0).all()
    assert (np.linalg.eigvalsh(V)[..., 1] > 0).all()  # the two that are left are as independent as ever


@pytest.mark.one_case("transformer")
@pytest.mark.parametrize("name", ["mlp", "transformer"])
def test_many_tokens_have_the_law_of_their_weights(name, key):
    """Beyond 16 tokens other code factorises and inverts."""
    width, V0, keys, layer = 40, random_covariance(20), jr.split(key), (CHAINS | MORE_CHAINS)[name]
    chain, weights = (
        last(layer, V0, width=width, depth=1, networks=400, method=method, key=k)
        for method, k in zip(("chain", "weights"), keys, strict=True)
    )
    assert_same_distribution(np.linalg.slogdet(chain)[1], np.linalg.slogdet(weights)[1])
    assert_same_distribution(chain[:, 3, 7], weights[:, 3, 7])


def test_keys_of_another_kind():
    one, again, other = (
        NetworkKeys.numbered(jr.key(seed, impl="rbg"), jnp.arange(3, dtype=jnp.uint32)) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(one.low, again.low)
    assert len({*np.asarray(one.low).tolist(), *np.asarray(other.low).tolist()}) == 6


def test_single_precision_draws_the_same_networks(key):
    V0, sizes = random_covariance(3), {"width": 12, "depth": 3, "networks": 20}
    single, double = (
        si.sample_networks(CHAINS["mlp"], V0.astype(dtype), **sizes, key=key)["covariance"].values
        for dtype in (jnp.float32, jnp.float64)
    )
    assert single.dtype == np.float32
    assert_agrees(single, double, rtol=1e-3)
    with jax.enable_x64(False):  # noqa: FBT003
        many = si.sample_networks(CHAINS["mlp"], V0, **sizes, key=key)["covariance"]
    assert many.dtype == np.float32
    assert_agrees(many, single, rtol=1e-4)


@pytest.mark.parametrize(("every", "place"), [(1, r"\d+"), (40, "40")])
def test_what_overflows_is_refused_with_the_place(every, place, key):
    V0, depth = 1e38 * jnp.eye(3, dtype=jnp.float32), 16 if every == 1 else 40
    with pytest.raises(ValueError, match=rf"covariance: network \d+, layer {place}: .* NaN or infinite"):
        si.sample_networks(si.ShapedMLP(0.0, 0.0), V0, width=12, depth=depth, networks=7, observe_every=every, key=key)


def test_huge_logits_leave_a_chain_finite(key):
    """Logits of 10¹⁰: rounded in two ways they differ by thousands, of which no softmax can be taken."""
    with jax.enable_x64(False):  # noqa: FBT003
        layer, V0 = si.ShapedAttention(0.5, tau0=1.0), si.equicorrelated(tokens=4, correlation=0.2, norm=1e5)
        V = si.sample_networks(layer, V0, width=200, depth=20, networks=50, key=key)["covariance"]
    assert V.dtype == np.float32
    assert (V.values.max((1, 2, 3)) > 1e10).all()


def network_keys(count: int, seed: int = 0) -> NetworkKeys:
    return NetworkKeys.numbered(jr.key(seed), jnp.arange(count, dtype=jnp.uint32))


def test_threefry_is_that_of_jax():
    keypair, counts = jr.bits(jr.key(1), (2,), jnp.uint32), jr.bits(jr.key(2), (10,), jnp.uint32)
    ours = np.concatenate(jax.jit(threefry)(*keypair, counts[:5], counts[5:]))
    np.testing.assert_array_equal(ours, threefry_2x32(keypair, counts))


@functools.partial(jax.jit, static_argnums=1)
def normals_and_uniforms(keys, dtype):
    return keys.normals((2, 3), dtype), *keys.normals_and_uniforms((3,), dtype, stream=1)


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_normals_and_uniforms_have_their_laws_and_are_independent(dtype):
    x, y, u = (np.asarray(z, np.float64) for z in normals_and_uniforms(network_keys(10_000), dtype))
    assert_distribution(x, stats.norm.cdf)
    x = x.reshape(6, -1)
    assert_mean((x[:, None] * x).T, np.eye(6))
    # Numbers 0 and 3, 1 and 4, 2 and 5 are Box and Muller's pairs, by quarter turns and angles of at most π/4.
    radius, angle = np.hypot(x[:3], x[3:]), np.arctan2(x[:3], x[3:])
    assert_distribution(radius**2 / 2, stats.expon.cdf)
    assert_distribution(angle, stats.uniform(-np.pi, 2 * np.pi).cdf)
    assert_distribution(angle % (np.pi / 2), stats.uniform(0, np.pi / 2).cdf)
    assert_distribution(y, stats.norm.cdf)
    assert (u > 0).all()
    assert (u < 1).all()
    assert_distribution(u, stats.uniform.cdf)


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_chi_variables_have_their_law(dtype):
    freedom = [1, 2, 5, 300]
    draw = jax.jit(lambda keys: keys.chi(jnp.array(freedom), blocks=1, dtype=dtype))
    chi = np.asarray(draw(network_keys(200_000)), np.float64)[:, 0]
    for found, nu in zip(chi, freedom, strict=True):
        assert_distribution(found, stats.chi(nu).cdf)
    # What a few of them are rejected for shows in the moments.
    assert_mean(chi.T**2, freedom)


@pytest.mark.one_case("float64")
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_streams_have_the_laws_of_keys(dtype):
    """NumPy's numbers, their sums over columns included; two layers, and two parts of one, are independent."""
    streams, freedom = NetworkStreams((0, 1), 0, range(20_000)), np.array([1, 2, 5, 300])
    parts = [streams.fold_in(3).fold_in(0), streams.fold_in(3).fold_in(1), streams.fold_in(4).fold_in(0)]
    x = np.stack([part.normals((2,), dtype) for part in parts]).astype(float).reshape(6, -1)
    assert_distribution(x, stats.norm.cdf)
    assert_mean((x[:, None] * x).T, np.eye(6))
    chi = streams.chi(freedom, blocks=1, dtype=dtype)[:, 0].astype(float)
    for found, nu in zip(chi, freedom, strict=True):
        assert_distribution(found, stats.chi(nu).cdf)
    assert_mean(chi.T**2, freedom)
    V = random_covariance(2)
    K = np.broadcast_to(np.linalg.cholesky(V)[:, :, None, None], (2, 2, 1, 20_000))
    S = streams.column_sum(K, lambda x: x, 300, tokens=2, blocks=1)  # in two parts
    assert_mean(packed(np.moveaxis(S[:, :, 0], -1, 0)), 300 * packed(V))


@pytest.mark.parametrize("layer", [CHAINS["mlp"], CHAINS["transformer, H = 4"]], ids=["mlp", "transformer"])
def test_networks_do_not_depend_on_the_others(layer, key):
    """The same bits alone, among few and among many, on both sides of a limit between groups."""
    V0, sizes = random_covariance(3), {"width": 24, "depth": 3, "key": key}
    every = si.sample_networks(layer, V0, networks=GROUP + 3, **sizes)["covariance"].values
    few = si.sample_networks(layer, V0, networks=5, first_network=GROUP - 3, **sizes)["covariance"]
    np.testing.assert_array_equal(few, every[GROUP - 3 : GROUP + 2])
    assert few["network"].values.tolist() == list(range(GROUP - 3, GROUP + 2))
    np.testing.assert_array_equal(si.sample_networks(layer, V0, networks=1, **sizes)["covariance"], every[:1])


@pytest.mark.long
def test_both_engines_have_one_law(key):
    """Transformers with heads, after three layers: NumPy's networks against JAX's."""
    layer, V0, sizes = CHAINS["transformer, H = 4"], random_covariance(3), {"width": 24, "depth": 3}
    host = last(layer, V0, networks=3_000, method="chain", key=key, **sizes)
    keys = NetworkKeys.numbered(jr.fold_in(key, 1), jnp.arange(3_000, dtype=jnp.uint32))
    chain = eqx.filter_jit(functools.partial(covariance_chain, width=24, layers=3))(layer, V0, keys=keys)[:, -1]
    for a, b in ((0, 0), (0, 2), (1, 1)):
        assert_same_distribution(host[:, a, b], np.asarray(chain[:, a, b]))


def test_wishart_factors_of_every_rank():
    """The mean and the covariance of a Wishart matrix, and the rank."""
    tokens, degrees = 3, (0, 2, 9)

    @jax.jit
    def factors(keys):
        drawn = wishart_draws(degrees, tokens=tokens, blocks=1, dtype=jnp.dtype(float), keys=keys)
        each = [wishart_factor(*given) for given in zip(degrees, drawn.normals, drawn.chi, strict=False)]
        return [(B, gram(B)) for B in each]

    for freedom, (B, found) in zip(degrees, factors(network_keys(20_000)), strict=True):
        np.testing.assert_array_equal(B[:, min(freedom, tokens) :], 0)
        W = packed(np.moveaxis(found[:, :, 0], -1, 0)) - freedom * packed(np.eye(tokens))
        assert_mean(W, 0)
        expected = freedom * references.packed_tensor(references.linear_tensor(np.eye(tokens)))
        assert_mean(W[:, :, None] * W[:, None, :], expected)
