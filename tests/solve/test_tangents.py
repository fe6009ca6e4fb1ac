"""The step of the joint covariance of tokens and a tangent: its generator, the cone, exact laws, and networks."""

import dataclasses

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import tangent_references
from helpers.budget import assert_mean
from helpers.cases import LAYERS, PATTERNS, masked_layer_of, random_covariance
from helpers.given_normals import moments_of_a_step
from helpers.internals import Attention, AttentionStrength, ShapedReLU, gram, splitting_step
from helpers.references import assert_agrees, packed

import sdeinfer as si


@jax.jit
def advance(limit, Z, h, G, odd=False):  # noqa: FBT002
    """One step of the joint factor, and whether the path explodes."""
    return splitting_step(limit, Z, h, G, jnp.asarray(odd), tangents=True)


def normals(limit, rows: int, *batch: int, key) -> jax.Array:
    return jr.normal(key, (*limit.normals(rows), *batch))


def layer_of(name: str, tokens: int) -> si.layers.AbstractLayer:
    return LAYERS[name]() if name in LAYERS else masked_layer_of(name, tokens)


@pytest.mark.long
@pytest.mark.parametrize("name", ["transformer", "prompts", "mlp", "causal transformer"])
def test_one_small_step_has_the_generators_mean_and_covariance(name, key):
    tokens, samples, h = 2 if name == "transformer" else 3, 20_000, 1e-2
    layer, S = layer_of(name, tokens), random_covariance(2 * tokens)
    limit, Z = layer.limit(), jnp.linalg.cholesky(S)
    rows, columns = np.triu_indices(2 * tokens)

    def increment(G, h):
        stepped, _ = advance(limit, jnp.broadcast_to(Z[..., None], (*Z.shape, samples)), h, jnp.sqrt(h) * G)
        return (gram(stepped) - S[..., None])[rows, columns].T

    G = normals(limit, 2 * tokens, samples, key=key)
    drift, covariance = jax.jit(lambda G: moments_of_a_step(increment, G, h))(G)
    assert_mean(drift, packed(tangent_references.joint_drift(layer, S)))
    assert_mean(covariance, tangent_references.joint_diffusion(layer, S))


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["mlp", "mask", "attention", "transformer", "causal transformer"])
def test_a_step_is_that_of_two_prompts_that_draw_near(name, key):
    """Prompts X and X + εẊ take one step with the same normals: exact at every h as ε → 0."""
    tokens, h, epsilon = 3, jnp.asarray(0.05), 1e-4
    layer = layer_of(name, tokens)
    limit, mask = layer.limit(), layer.limit().pattern.mask(tokens)
    two = si.Pattern.of_mask(np.kron(np.eye(2, dtype=bool), mask))
    of_two = dataclasses.replace(layer, pattern=two).limit() if name != "mlp" else limit
    Z, G = jnp.linalg.cholesky(random_covariance(2 * tokens)), jnp.sqrt(h) * normals(limit, 2 * tokens, key=key)
    identity, zero = jnp.eye(tokens), jnp.zeros((tokens, tokens))

    @jax.jit
    def difference(epsilon):
        X, X_dot = Z[:tokens], Z[tokens:]
        both = jnp.concatenate([X, X + epsilon * X_dot])
        stepped, explodes = splitting_step(of_two, both, h, G, h > 0, tangents=False)
        J = jnp.block([[identity, zero], [-identity / epsilon, identity / epsilon]])
        return J @ gram(stepped) @ J.T, explodes

    # In odd steps the factorisation, whose factor has the sign of ε, comes last.
    stepped, explodes = advance(limit, Z, h, G, odd=True)
    assert not explodes
    # Errors of order ε cancel, except for the ReLU's |ε|, which comes from its ν(ρ) ~ (1 − ρ)^{3/2}.
    (there, ended), (back, _) = difference(epsilon), difference(-epsilon)
    assert not ended
    assert_agrees(gram(stepped), (there + back) / 2, rtol=1e-6 if name == "attention" else 1e-3)


@pytest.mark.parametrize("name", ["ReLU", "causal", "causal prompts", "mask"])
def test_kernels_of_tangents_are_those_of_two_prompts_that_draw_near(name):
    """Alone: in a step they are multiplied by h, beside which a coefficient that is wrong by 5 % is small."""
    tokens, epsilon, one, zero = 3, 1e-4, np.eye(3), np.zeros((3, 3))
    S = np.asarray(random_covariance(2 * tokens))
    pattern = si.Pattern() if name == "ReLU" else PATTERNS[name](tokens)
    two = si.Pattern.of_mask(np.kron(np.eye(2, dtype=bool), pattern.mask(tokens)))

    def kernel(pattern):
        return ShapedReLU().kernel(2.0) if name == "ReLU" else Attention(pattern).kernel(AttentionStrength(2.0, 0.5))

    def difference(epsilon):
        to_two, back = (
            np.block([[one, zero], [one, epsilon * one]]),
            np.block([[one, zero], [-one / epsilon, one / epsilon]]),
        )
        return back @ kernel(two).of_tokens(to_two @ S @ to_two.T) @ back.T

    # Errors of order ε cancel, except for the ReLU's |ε|, which comes from its ν(ρ) ~ (1 − ρ)^{3/2}.
    expected = (difference(epsilon) + difference(-epsilon)) / 2
    assert_agrees(kernel(pattern).of_tangents(jnp.asarray(S)), expected, rtol=1e-3 if name == "ReLU" else 1e-6)


@pytest.mark.long
@pytest.mark.parametrize("name", ["transformer", "mlp", "causal transformer"])
def test_paths_stay_in_the_cone(name, key):
    """From V0 of rank four and one in single precision, where one token moves."""
    one = np.diag([1.0, 0.0, 0.0, 0.0]).astype(np.float32)
    vectors = np.linspace(0.5, 1.5, 4), np.ones(4), (-1.0) ** np.arange(4)
    for V0 in (0.8 * np.eye(4) + 0.2, *(np.outer(x, x) for x in vectors)):
        found = si.tangents(layer_of(name, 4), V0.astype(np.float32), [0.2], one, paths=200, step=0.02, key=key)
        V, C, D = (np.asarray(x[:, 0], float) for x in (found.covariance, found.cross, found.tangent))
        S = np.block([[V, C], [C.mT, D]])
        S = S[np.isfinite(S).all(axis=(1, 2))]
        assert len(S) >= 0.95 * 200
        values = np.linalg.eigvalsh(S)
        assert (values[:, 0] >= -1e-5 * values[:, -1]).all()
