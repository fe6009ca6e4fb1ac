"""The self-attention flow against index sums, its symmetries, its energy, and its solver."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from sdeinfer import meanfield

TOKENS, DIMENSION, HEADS = 6, 3, 2
TIMES, EXACT = np.linspace(0.05, 1, 20), {"rtol": 1e-10, "atol": 1e-12}


def naive_velocity(flow, x):
    """Loops over tokens and heads of the field's definition."""
    n, D = x.shape
    identity = np.eye(D)
    found = np.zeros((n, D))
    for i in range(n):
        change = np.zeros(D)
        for h in range(flow.heads):
            Q, K, V = (identity if M is None else np.asarray(M[h % len(M)]) for M in (flow.Q, flow.K, flow.V))
            kernel = [np.exp(float(flow.beta) * (Q @ x[i]) @ (K @ x[j])) for j in range(n)]
            scale = sum(kernel) if flow.normalised else n
            change += V @ sum(kernel[j] * x[j] for j in range(n)) / scale / flow.heads
        if flow.mlp is not None:
            change += np.asarray(flow.mlp(x[i]))
        found[i] = change - (x[i] @ change) * x[i]
    return found


def matrices(key):
    return jr.normal(key, (3, HEADS, DIMENSION, DIMENSION))


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("heads", [1, HEADS])
def test_velocity_is_the_sum_over_tokens_and_heads(heads, normalised, key):
    x = meanfield.random_tokens(TOKENS, DIMENSION, key=key)
    Q, K, V = matrices(jr.key(1))
    flow = meanfield.SelfAttentionFlow(
        1.3, Q[:heads], K[:heads], V[:1], heads=heads, normalised=normalised, mlp=jnp.tanh
    )
    np.testing.assert_allclose(flow(x), naive_velocity(flow, np.asarray(x)), rtol=1e-12, atol=1e-13)
    plain = meanfield.SelfAttentionFlow(1.3, normalised=normalised)
    np.testing.assert_allclose(plain(x), naive_velocity(plain, np.asarray(x)), rtol=1e-12, atol=1e-13)


def test_masses_count_like_copies_of_a_token(key):
    x = meanfield.random_tokens(4, DIMENSION, key=key)
    flow = meanfield.SelfAttentionFlow(2.0)
    copies = jnp.concatenate([x, x[:2]])
    np.testing.assert_allclose(flow(x, jnp.array([2, 2, 1, 1]) / 6), flow(copies)[:4], rtol=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("normalised", [True, False])
def test_rotations_and_permutations_commute_with_the_flow(normalised, key):
    x = meanfield.random_tokens(TOKENS, DIMENSION, key=key)
    R = jnp.linalg.qr(jr.normal(jr.key(2), (DIMENSION, DIMENSION)))[0]
    order = jr.permutation(jr.key(3), TOKENS)
    flow = meanfield.SelfAttentionFlow(4.0, normalised=normalised)
    moved, rotated, permuted = (meanfield.solve(flow, x, TIMES / 2, **EXACT) for x in (x, x @ R, x[order]))
    np.testing.assert_allclose(rotated, moved @ R, atol=1e-8)
    np.testing.assert_allclose(permuted, moved[:, order], atol=1e-8)


@pytest.mark.long
@pytest.mark.parametrize(("beta", "normalised"), [(0.5, True), (16.0, False)])
def test_energy_rises(beta, normalised, key):
    x = meanfield.random_tokens(TOKENS, DIMENSION, key=key)
    flow = meanfield.SelfAttentionFlow(beta, normalised=normalised)
    # The unnormalised flow is faster by up to e^β.
    found = meanfield.solve(flow, x, 20 * TIMES / (1 if normalised else np.exp(beta)), **EXACT)
    energy = np.asarray(jax.jit(jax.vmap(flow.energy))(jnp.concatenate([x[None], found])))
    assert np.diff(energy).min() > -1e-9 * energy.max()
    assert energy[-1] > 1.01 * energy[0]


def test_the_unnormalised_flow_ascends_the_gradient_of_its_energy(key):
    x = meanfield.random_tokens(TOKENS, DIMENSION, key=key)
    flow = meanfield.SelfAttentionFlow(2.5, normalised=False)
    gradient = TOKENS * jax.grad(flow.energy)(x)
    np.testing.assert_allclose(flow(x), meanfield.tangent(x, gradient), rtol=1e-11, atol=1e-13)


def test_layers_are_steps_of_eulers_method(key):
    x = meanfield.random_tokens(TOKENS, DIMENSION, key=key)
    flow, time = meanfield.SelfAttentionFlow(3.0), 1.0
    layer, exact = eqx.filter_jit(flow.layer), meanfield.solve(flow, x, [time], **EXACT)[0]
    errors = []
    for layers in (32, 64, 128):
        tokens = x
        for _ in range(layers):
            tokens = layer(tokens, time / layers)
        errors.append(float(jnp.abs(tokens - exact).max()))
    np.testing.assert_allclose(np.divide(errors[:-1], errors[1:]), 2.0, rtol=0.1)
    np.testing.assert_allclose(flow.layer(x, 0.1, normalise=False), x + 0.1 * flow.residual(x, x))


@pytest.mark.long
def test_the_end_has_a_gradient(key):
    x = meanfield.random_tokens(TOKENS, DIMENSION, key=key)

    def end(beta):
        return meanfield.solve(meanfield.SelfAttentionFlow(beta), x, [1.0], **EXACT)[0, 0, 0]

    h, backwards = 1e-4, jax.jit(jax.value_and_grad(end))
    (_, slope), (up, _), (down, _) = (backwards(2.0 + step) for step in (0.0, h, -h))
    np.testing.assert_allclose(slope, (up - down) / (2 * h), rtol=1e-5)


@pytest.mark.long
def test_single_precision(key):
    x = meanfield.random_tokens(TOKENS, DIMENSION, key=key)
    double = meanfield.solve(meanfield.SelfAttentionFlow(2.0), x, [1.0])
    single = meanfield.solve(meanfield.SelfAttentionFlow(jnp.float32(2.0)), x.astype(jnp.float32), [1.0])
    assert single.dtype == jnp.float32
    np.testing.assert_allclose(single, double, atol=2e-4)
    in_that_of_the_flow = meanfield.solve(meanfield.SelfAttentionFlow(2.0), x.astype(jnp.float32), [1.0])
    assert in_that_of_the_flow.dtype == x.dtype
    np.testing.assert_allclose(in_that_of_the_flow, double, atol=1e-5)


@pytest.mark.long
def test_a_second_solve_compiles_nothing(key):
    x, traced = meanfield.random_tokens(4, DIMENSION, key=key), []

    def counted(token):
        traced.append(1)
        return jnp.tanh(token)

    meanfield.solve(meanfield.SelfAttentionFlow(1.0, mlp=counted), x, [0.1])
    before = len(traced)
    meanfield.solve(meanfield.SelfAttentionFlow(2.0, mlp=counted), x, [0.2])
    assert len(traced) == before


@pytest.mark.long
def test_flows_with_an_mlp_are_arguments_of_compiled_functions(key):
    """Functions, and modules with functions inside."""
    x = meanfield.random_tokens(TOKENS, DIMENSION, key=key)
    for mlp in (jnp.tanh, eqx.nn.MLP(DIMENSION, DIMENSION, 4, 1, key=key)):
        flow = meanfield.SelfAttentionFlow(1.3, mlp=mlp)
        found = jax.jit(lambda flow, x: flow(x))(flow, x)
        np.testing.assert_allclose(found, naive_velocity(flow, x), rtol=1e-12, atol=1e-13)
