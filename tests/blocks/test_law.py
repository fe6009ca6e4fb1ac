"""The law of one block: moments of S, increments and V′, the density of a covariance, tables and nodes."""

import dataclasses
import itertools

import block_references as naive
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from budget import assert_estimate, mean_and_error
from conftest import random_covariance
from references import assert_agrees, packed, packed_tensor
from scipy import special, stats

import sdeinfer as si
from sdeinfer import blocks
from sdeinfer.blocks._nodes import normal_nodes, uniform_nodes
from sdeinfer.covariance import square_of, unvech

TOKENS, WIDTH = 3, 8
V = np.asarray(random_covariance(TOKENS, seed=5))
MASK = [[1, 0, 1], [1, 1, 0], [0, 1, 1]]

SMALL = {
    "gelu": blocks.MLP(gain=3.0, expansion=0.5, bias=0.2),
    "swiglu": blocks.MLP(gain=3.0, expansion=0.5, activation="silu", gated=True),
    "mask": blocks.SelfAttention(heads=2, pattern=si.Pattern.of_mask(MASK), temperature=0.4, bias=0.3),
    "GQA": blocks.SelfAttention(heads=4, key_value_heads=2, pattern=si.CAUSAL, gain=4.0, head_size=2),
    "MQA with RoPE": blocks.SelfAttention(
        heads=2, key_value_heads=1, rope=10.0, gain=3.0, pattern=si.Pattern(prompts=(2, 1), causal=True)
    ),
}


def drawn(branch, count: int) -> np.ndarray:
    """S of networks, naively."""
    rng, G = np.random.default_rng(20230630), float(branch.gain) * V + branch.bias
    if isinstance(branch, blocks.MLP):
        gelu = lambda z: z * stats.norm.cdf(z)  # noqa: E731
        phi = {"gelu": gelu, "silu": lambda z: z * special.expit(z)}[branch.activation]
        return naive.hidden_of_mlp(G, phi, units=4, gated=branch.gated, count=count, rng=rng)
    return naive.hidden_of_attention(
        G,
        np.asarray(branch.pattern.mask(TOKENS)),
        heads=branch.heads,
        groups=branch.groups,
        size=branch.head_size or WIDTH // branch.heads,
        temperature=float(branch.temperature),
        rope=branch.rope,
        positions=[0, 1, 0] if branch.pattern.prompts else range(TOKENS),
        count=count,
        rng=rng,
    )


def moments(branch, V=V, *, width=WIDTH, log2=12, seed=0):
    return _moments(branch, jnp.asarray(V), branch.nodes(len(V), width, log2=log2, seed=seed), width)


@eqx.filter_jit
def _moments(branch, V, nodes, width):
    return branch.moments(V, nodes, width=width)


@pytest.mark.parametrize("name", SMALL)
def test_hidden_features_have_the_moments_of_naive_sums(name):
    branch = SMALL[name]
    S = packed(drawn(branch, 20_000))
    each = [moments(branch, seed=seed) for seed in range(8)]
    (mean, mean_error), (covariance, error) = (
        mean_and_error(np.stack(x)) for x in (packed([h.mean for h in each]), [h.covariance for h in each])
    )
    found, of_networks = mean_and_error(S)
    assert_estimate(mean, found, np.hypot(mean_error, of_networks))
    differences = S - mean
    found, of_networks = mean_and_error(differences[:, :, None] * differences[:, None, :])
    assert_estimate(covariance, found, np.hypot(error, of_networks))


def test_a_full_covariance_has_an_axis_for_each_index():
    hidden = moments(SMALL["gelu"])
    assert_agrees(packed_tensor(np.asarray(hidden.full_covariance)), hidden.covariance, rtol=1e-14)
    assert_agrees(np.swapaxes(hidden.full_covariance, 0, 1), hidden.full_covariance, rtol=1e-14)


def test_the_mean_of_relu_units_is_the_arc_cosine_kernel():
    branch = blocks.MLP(activation="relu", gain=1.7, bias=0.4)
    each = np.stack([packed(moments(branch, seed=seed).mean) for seed in range(8)])
    assert_estimate(*((mean_and_error(each)[0], packed(naive.relu_kernel(1.7 * V + 0.4)), mean_and_error(each)[1])))


@pytest.mark.parametrize("gated", [False, True])
def test_linear_units_have_the_moments_of_normals(gated):
    """Without a gate K = G and C is Isserlis's; with one h_a = z_a z′_a and K = G ⊙ G."""
    branch = blocks.MLP(activation="identity", gain=1.7, expansion=2.0, gated=gated)
    G = 1.7 * V
    square, pairs = naive.isserlis(G) + np.einsum("ab,cd->abcd", G, G), np.einsum("ab,cd->abcd", G, G)
    K, C = (G * G, square * square - pairs * pairs) if gated else (G, square - pairs)
    each = [moments(branch, seed=seed, log2=13) for seed in range(8)]
    mean, error = mean_and_error(packed([h.mean for h in each]))
    assert_estimate(mean, packed(K), error)
    covariance, error = mean_and_error(np.stack([h.covariance for h in each]))
    assert_estimate(covariance, packed_tensor(C) / (2 * WIDTH), error)


@pytest.mark.parametrize(
    ("given", "rope"), [({"temperature": 1e9}, None), ({"gain": 1e-12}, None), ({"temperature": 1e9}, 10.0)]
)
def test_flat_attention_takes_means_of_values(given, rope):
    """K = A G Aᵀ of the uniform A, and C is that of a Wishart matrix of all the values' columns."""
    branch = blocks.SelfAttention(heads=2, pattern=si.CAUSAL, rope=rope, head_size=4, **given)
    A = np.tril(np.ones((TOKENS, TOKENS))) / np.arange(1, TOKENS + 1)[:, None]
    G = float(branch.gain) * A @ V @ A.T
    hidden = moments(branch, log2=6)
    assert_agrees(hidden.mean, G, rtol=1e-5)
    # Two groups of heads, of four columns each.
    assert_agrees(hidden.covariance, packed_tensor(naive.isserlis(G)) / 8, rtol=1e-5)


@pytest.mark.parametrize("name", ["gelu", "swiglu", "GQA", "MQA with RoPE"])
def test_derivatives_of_moments_are_those_of_differences(name):
    """In V, and in the gain or the temperature."""
    branch = SMALL[name]
    nodes, direction = branch.nodes(TOKENS, WIDTH, log2=6), np.asarray(random_covariance(TOKENS, seed=8))

    @jax.jit
    def at(step):
        return branch.reshaped(1 + step).moments(jnp.asarray(V + step * direction), nodes, width=WIDTH)

    _, derivatives = jax.jvp(at, (0.0,), (1.0,))
    h = 1e-5
    for ahead, behind, derivative in zip(at(h), at(-h), derivatives, strict=True):
        assert_agrees(derivative, (ahead - behind) / (2 * h), rtol=1e-7)


def test_increments_and_outputs_have_their_moments_by_sums():
    """The law of total covariance, index by index."""
    hidden, n, g, alpha = moments(SMALL["swiglu"]), 20, 0.6, 0.8
    K, C = np.asarray(hidden.mean), np.asarray(hidden.full_covariance)
    increment, output, cross = np.empty(C.shape), np.empty(C.shape), np.empty(C.shape)
    for a, b, c, d in itertools.product(range(TOKENS), repeat=4):
        of_S = C[a, c, b, d] + C[a, d, b, c] + K[a, c] * K[b, d] + K[a, d] * K[b, c]
        increment[a, b, c, d] = C[a, b, c, d] + of_S / n
        cross[a, b, c, d] = V[a, c] * K[b, d] + V[a, d] * K[b, c] + V[b, c] * K[a, d] + V[b, d] * K[a, c]
        output[a, b, c, d] = alpha**2 * g**2 / n * cross[a, b, c, d] + g**4 * increment[a, b, c, d]
    found = blocks.increment_moments(hidden, width=n)
    assert_agrees(found.mean, K)
    assert_agrees(found.covariance, packed_tensor(increment))
    after = blocks.output_moments(jnp.asarray(V), found, strength=g, skip=alpha, width=n)
    assert_agrees(after.mean, alpha**2 * V + g**2 * K)
    assert_agrees(after.covariance, packed_tensor(output))


def wishart_moments(scale, freedom: int) -> blocks.Moments:
    return blocks.Moments(jnp.asarray(scale), jnp.asarray(packed_tensor(naive.isserlis(scale)) / freedom))


@jax.jit
def law_of(D, moments):
    law = blocks.LogMatrixNormal.of(D, moments)
    return law, law.log_density(), law.in_factor()


def test_the_logarithm_of_a_wishart_matrix_has_its_moments():
    """Of its trace, log det, by digamma and trigamma functions: errors fall with the square of the freedom."""
    on_diagonal = np.array([1.0, 0, 0, 1, 0, 1])
    errors = []
    for freedom in (100, 200, 400):
        law, *_ = law_of(jnp.asarray(V), wishart_moments(V, freedom))
        mean, variance = naive.log_det_of_wishart(TOKENS, freedom)
        errors.append([on_diagonal @ law.expected - mean, on_diagonal @ law.covariance @ on_diagonal - variance])
    ratios = np.divide(errors[:-1], errors[1:])
    np.testing.assert_allclose(ratios, 4, rtol=0.1)
    np.testing.assert_allclose(errors[-1], 0, atol=1e-2 * abs(naive.log_det_of_wishart(TOKENS, 400)[0]))


def test_the_density_is_that_of_a_wishart_matrix():
    """Mean differences of logarithms of densities fall as 1/n, and their spread as 1/√n."""
    rng, found = np.random.default_rng(3), []
    for freedom in (200, 800, 3_200):
        exact = stats.wishart(df=freedom, scale=V / freedom)
        D = exact.rvs(400, random_state=rng)
        ours = np.array([law_of(jnp.asarray(each), wishart_moments(V, freedom))[1] for each in D])
        found.append(ours - exact.logpdf(np.moveaxis(D, 0, -1)))
    sizes = np.array([(each.mean(), each.std()) for each in found])
    assert (np.abs(sizes[:, 0]) < 6 / np.array([200, 800, 3_200])).all(), sizes
    assert (sizes[:, 1] < 3 / np.sqrt([200, 800, 3_200])).all(), sizes


def test_a_factor_shifts_the_logarithm():
    D, moments_of = jnp.asarray(1.1 * V + 0.05 * np.eye(TOKENS)), wishart_moments(V, 50)
    law, density, _ = law_of(D, moments_of)
    scaled, of_scaled, _ = law_of(2.5 * D, moments_of)
    assert_agrees(unvech(scaled.logarithm - law.logarithm), np.log(2.5) * np.eye(TOKENS), rtol=1e-12)
    # Its volume: each of the m(m + 1)/2 entries of D has the factor.
    of_volume = TOKENS * (TOKENS + 1) / 2 * np.log(2.5)
    np.testing.assert_allclose(scaled.log_density(np.log(2.5)), density - of_volume, rtol=1e-12)
    assert of_scaled < density - of_volume


@pytest.mark.parametrize("log_factor", [-2.0, 0.0, 0.7])
def test_the_density_is_a_polynomial_in_the_logarithm_of_a_factor(log_factor):
    D, moments_of = jnp.asarray(1.1 * V + 0.05 * np.eye(TOKENS)), wishart_moments(V, 50)
    law, _, c = law_of(D, moments_of)
    chi_square = -2 * (c[0] + c[1] * log_factor + c[2] * log_factor**2)
    np.testing.assert_allclose(law.log_density(log_factor), -chi_square / 2 + c[3], rtol=1e-10)
    np.testing.assert_allclose(np.sum(np.square(law.standardised(log_factor))), chi_square, rtol=1e-9, atol=1e-9)


def test_tables_are_interpolated():
    x, rng = np.asarray(blocks.LOG_FACTORS), np.random.default_rng(1)
    assert np.exp(x[-1]) == pytest.approx(blocks.WIDEST)
    assert x[len(x) // 2] == 0
    table = rng.standard_normal((2, len(x), 4))
    for place in (0, 7, len(x) // 2, len(x) - 1):
        assert_agrees(blocks.interpolated(table, x[place]), table[:, place], rtol=1e-14)
    functions = [lambda x: np.exp(x / 3), np.tanh, lambda x: x**5, np.ones_like]
    table, at = np.stack([f(x) for f in functions], axis=-1), np.linspace(x[0], x[-1], 14)
    found = np.stack([blocks.interpolated(table, each) for each in at])
    expected = np.stack([f(at) for f in functions], axis=-1)
    # tanh has poles at ±iπ/2, as far from the interval as Bernstein's ellipse of 33 points allows this error.
    np.testing.assert_allclose(found[:, [0, 2, 3]], expected[:, [0, 2, 3]], rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(found[:, 1], expected[:, 1], atol=1e-5)


@pytest.mark.parametrize("name", ["gelu", "GQA"])
def test_the_table_of_a_block_is_its_law(name):
    """`branch_coefficients` at and between the factors against the law of a block with the changed parameter."""
    block = blocks.Block(SMALL[name], strength=0.5, norm="rms", bias=0.1)
    data = si.sample_branches(block, V, width=32, depth=1, key=jax.random.key(4))
    order = blocks.BlockOrder.of_data(block, data)
    table = blocks.branch_coefficients(data, order)[0, 0]
    read, D = (jnp.asarray(data[what].values[0, 0]) for what in ("input", "increment"))
    nodes = blocks.nodes_of(block, TOKENS, 32)
    for log_factor in (0.0, 0.3, -1.4):
        changed = dataclasses.replace(block, branch=block.branch.reshaped(np.exp(log_factor)))
        exact = blocks.increment_law(changed, read, D, nodes, width=32).in_factor()
        np.testing.assert_allclose(blocks.interpolated(table, log_factor), exact, rtol=1e-4, atol=1e-4)


def test_nodes_are_uniform_and_normal():
    u, z = uniform_nodes(5, 12), normal_nodes(5, 12)
    assert 0 < u.min() < u.max() < 1
    np.testing.assert_allclose(u.mean(0), 0.5, atol=1e-4)
    np.testing.assert_allclose(z.mean(0), 0, atol=2e-3)
    np.testing.assert_allclose(z.T @ z / len(z), np.eye(5), atol=1e-2)
    np.testing.assert_array_equal(z, normal_nodes(5, 12))
    assert (normal_nodes(5, 12, seed=1) != z).all()
    with pytest.raises(ValueError, match="read-only"):
        u[0] = 0.5


def test_errors_of_nodes_fall_faster_than_those_of_independent_draws():
    """Of a smooth mean, by scramblings; independent draws would gain a factor of 4 from 16 times the nodes."""
    branch = blocks.MLP(gain=1.0)
    spread = [np.std([moments(branch, log2=k, seed=s).mean for s in range(16)], axis=0).mean() for k in (6, 10)]
    assert spread[0] / spread[1] > 8


@pytest.mark.parametrize("size", [2, 5])
def test_keys_of_heads_narrower_than_the_tokens(size):
    """Wishart matrices of a rank below m, by the second moments of their factor."""
    branch = blocks.SelfAttention(head_size=size)
    B = branch.nodes(4, 16, log2=14).keys
    assert (B[:, :, size:] == 0).all()
    np.testing.assert_allclose(np.einsum("rij,rkj->ik", B, B) / len(B), size * np.eye(4), atol=0.02 * size)


def test_places_of_packed_entries():
    np.testing.assert_array_equal(packed(square_of(TOKENS)), np.arange(TOKENS * (TOKENS + 1) // 2))
