"""Laws of observed tokens: densities, samples and exact paths against loops."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from budget import assert_mean
from meanfield.test_projected_normal import log_integral

from sdeinfer import InputError, meanfield
from sdeinfer.meanfield import NoisyLayers, ObservedFlow, ObservedLayers, SelfAttentionFlow, TokenPath, on_sphere
from sdeinfer.meanfield import _laws as laws

NETWORKS, TOKENS, DIMENSION = 3, 4, 3


@eqx.filter_jit
def sample(law, key, shape=()):
    return law.sample(key, shape)


@eqx.filter_jit
def log_prob(law, tokens):
    return law.log_prob(tokens)


def path_of(layers, key, networks=NETWORKS):
    x = meanfield.random_tokens(networks * TOKENS, DIMENSION, key=key)
    start = x.reshape(networks, TOKENS, DIMENSION)
    return TokenPath(start, None, SelfAttentionFlow(1.0), layers)


def naive_mean(beta, step, x):
    """The mean of a layer with Q = K = V = I by loops."""
    found = np.zeros_like(x)
    for i, own in enumerate(x):
        kernel = [np.exp(beta * own @ other) for other in x]
        found[i] = own + step * sum(k * other for k, other in zip(kernel, x, strict=True)) / sum(kernel)
    return found


def test_density_of_noisy_layers_is_the_product_over_transitions(key, monkeypatch):
    path = path_of((1, 2), key)
    law = NoisyLayers(SelfAttentionFlow(2.0), 0.3, 0.2, path)
    tokens = np.asarray(law.sample(jr.fold_in(key, 1)))
    found, slope = eqx.filter_jit(jax.value_and_grad(lambda step: with_step(path, tokens, step).sum()))(0.3)
    before = np.concatenate([np.asarray(path.initial)[:, None], tokens[:, :-1]], axis=1)
    expected = sum(
        log_integral(x, mean, 0.2)
        for start, end in zip(before.reshape(-1, TOKENS, DIMENSION), tokens.reshape(-1, TOKENS, DIMENSION), strict=True)
        for x, mean in zip(end, naive_mean(2.0, 0.3, start), strict=True)
    )
    assert found == pytest.approx(expected, rel=1e-10)
    # Networks one at a time, as where their attention is large.
    monkeypatch.setattr(laws, "ENTRIES", 1)
    in_blocks = eqx.filter_jit(jax.value_and_grad(lambda step: with_step(path, tokens, step).sum()))(0.3)
    np.testing.assert_allclose(in_blocks, (found, slope), rtol=1e-12)


def with_step(path, tokens, step):
    return NoisyLayers(SelfAttentionFlow(2.0), step, 0.2, path).log_prob(tokens)


def test_samples_of_noisy_layers(key):
    """The score of the next layer has mean zero, over 20,000 networks."""
    many = path_of((1, 2), key, networks=20_000)
    tokens = NoisyLayers(SelfAttentionFlow(2.0), 0.3, 0.5, many).sample(key)

    @jax.jit
    def scores(changes):
        def log_prob(change):
            changed = SelfAttentionFlow(2.0 * (1 + change[0]))
            return NoisyLayers(changed, 0.3 * (1 + change[1]), 0.5 * (1 + change[2]), many).log_prob(tokens)

        return jax.jacfwd(log_prob)(changes)

    assert_mean(scores(jnp.zeros(3)), np.zeros(3))


@pytest.mark.parametrize(("beta", "step", "error"), [(4.0, 0.2, 4e-9), (9.0, 0.5, 2e-6)])
def test_one_step_of_the_solver_for_each_layer(beta, step, error, key):
    """Against `solve` with a tolerance of 1e-12: the error that the docstring states; layers are left out."""
    path, flow = path_of((1, 4, 6), key), SelfAttentionFlow(beta)
    law = ObservedFlow(flow, step, 0.1, path, path.initial)
    times = step * np.array(path.layers)
    exact = jnp.stack([meanfield.solve(flow, x, times, rtol=1e-12, atol=1e-13) for x in path.initial])
    found = law.exact()
    assert abs(found - exact).max() < error
    # The solver's own estimate, by half the step.
    assert float(law.solver_error()) == pytest.approx(float(jnp.linalg.norm(found - exact)) / 0.1, rel=0.1)


def test_exact_layers(key):
    """And noisy ones without noise."""
    path, every = path_of((2, 3), key), path_of((1, 2, 3), key)
    exact = ObservedLayers(SelfAttentionFlow(2.0), 0.3, 0.1, path, path.initial).exact()
    noisy = NoisyLayers(SelfAttentionFlow(2.0), 0.3, 1e-12, every).sample(key)
    x = np.asarray(path.initial)
    for layer in range(3):
        x = np.stack([on_sphere(naive_mean(2.0, 0.3, each)) for each in x])
        np.testing.assert_allclose(noisy[:, layer], x, atol=1e-10)
        if layer:
            np.testing.assert_allclose(exact[:, layer - 1], x, rtol=1e-12)


def test_observations_of_exact_tokens(key):
    path = path_of((1, 2), key)
    law = ObservedLayers(SelfAttentionFlow(2.0), 0.3, 0.4, path, path.initial)
    tokens = np.asarray(sample(law, key, (2,)))
    assert tokens.shape == (2, NETWORKS, 2, TOKENS, DIMENSION)
    exact = np.asarray(jax.jit(law.exact)())
    expected = [
        sum(log_integral(tokens[0, k, layer, i], exact[k, layer, i], 0.4) for layer in range(2) for i in range(TOKENS))
        for k in range(NETWORKS)
    ]
    np.testing.assert_allclose(log_prob(law, tokens[0]), expected, rtol=1e-10)


@pytest.mark.parametrize("kind", [NoisyLayers, ObservedLayers])
def test_noise_of_each_layer(kind, key):
    """None in the first layer, and its density is the sum over layers with a noise each."""
    path, noise = path_of((1, 2), key), jnp.array([[1e-12], [0.3]])

    def law(noise):
        start = (path.initial,) if kind is ObservedLayers else ()
        return kind(SelfAttentionFlow(2.0), 0.3, noise, path, *start)

    tokens = sample(law(noise), key)
    exact = np.stack([on_sphere(naive_mean(2.0, 0.3, x)) for x in np.asarray(path.initial)])
    np.testing.assert_allclose(tokens[:, 0], exact, atol=1e-10)
    np.testing.assert_allclose(sample(law(noise[1:]), key), sample(law(jnp.array(0.3)), key), rtol=1e-12)
    both = [log_prob(law(jnp.array(each)), tokens) for each in (0.2, 0.4)]
    swapped = [log_prob(law(jnp.array([[a], [b]])), tokens) for a, b in ((0.2, 0.4), (0.4, 0.2))]
    np.testing.assert_allclose(sum(both), sum(swapped), rtol=1e-12)


def test_noisy_layers_need_every_layer(key):
    with pytest.raises(InputError, match="need every layer, got those after the first at \\(1, 3\\)"):
        NoisyLayers(SelfAttentionFlow(1.0), 0.1, 0.1, path_of((1, 3), key))
