"""The step of the joint covariance of tokens and a tangent: its generator, the cone, exact laws, and networks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import tangent_references
from helpers.budget import assert_distribution, assert_mean
from helpers.cases import LAYERS, PATTERNS, masked_layer_of, random_covariance
from helpers.given_normals import moments_of_a_step
from helpers.internals import Attention, AttentionStrength, ShapedReLU, gram, semidefinite_cholesky, splitting_step
from helpers.references import assert_agrees, packed
from scipy import stats

import sdeinfer as si


@jax.jit
def advance(limit, Z, h, G, odd=False):  # noqa: FBT002
    """One step of the joint factor, and whether the path explodes."""
    return splitting_step(limit, Z, h, G, jnp.asarray(odd), tangents=True)


def normals(limit, rows: int, *batch: int, key) -> jax.Array:
    return jr.normal(key, (*limit.normals(rows), *batch))


def layer_of(name: str, tokens: int) -> si.layers.AbstractLayer:
    return LAYERS[name]() if name in LAYERS else masked_layer_of(name, tokens)


@functools.partial(jax.jit, static_argnames=("steps", "paths"))
def end(layer, S0, h, *, steps: int, paths: int, key):
    """𝒱 of many paths after so many steps of h, and which of them do not explode; the batch is last."""
    limit = jax.tree.map(lambda c: jnp.asarray(c, S0.dtype), layer.limit())
    h = jnp.asarray(h, S0.dtype)
    Z = jnp.broadcast_to(semidefinite_cholesky(S0)[..., None], (*S0.shape, paths))

    def step(state, number_and_key):
        (Z, runs), (number, key) = state, number_and_key
        G = jnp.sqrt(h) * normals(limit, len(S0), paths, key=key).astype(S0.dtype)
        Z_next, explodes = advance(limit, Z, h, G, number % 2 == 1)
        # A path that explodes stays where it is, as in the solver.
        runs &= ~explodes
        return (jnp.where(runs, Z_next, Z), runs), None

    numbers = jnp.arange(steps), jr.split(key, steps)
    (Z, runs), _ = jax.lax.scan(step, (Z, jnp.ones(paths, bool)), numbers)
    return gram(Z), runs


def one_token_moves(V, token: int = 0):
    """𝒱 with C = 0 and D = e_βe_βᵀ."""
    zero = jnp.zeros_like(V)
    return jnp.block([[V, zero], [zero, zero.at[token, token].set(1.0)]])


@pytest.mark.parametrize(
    "name",
    [*(pytest.param(name, marks=pytest.mark.long) for name in ("transformer", "prompts", "mlp")), "causal transformer"],
)
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


@pytest.mark.parametrize(
    "name",
    [
        "mlp",
        "mask",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("attention", "transformer", "causal transformer")),
    ],
)
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


def starts(tokens: int, start: str):
    x = {
        "rank one": jnp.linspace(0.5, 1.5, tokens),
        "equal": jnp.ones(tokens),
        "opposite": (-1.0) ** jnp.arange(tokens),
    }
    V0 = 0.8 * jnp.eye(tokens) + 0.2 if start == "full rank" else jnp.outer(x[start], x[start])
    return one_token_moves(V0)


def assert_in_the_cone(layer, S0, *, h, steps, paths, key):
    S, runs = end(layer, S0, h, steps=steps, paths=paths, key=key)
    assert np.isfinite(S).all()
    assert np.mean(runs) >= 0.95
    values = np.linalg.eigvalsh(np.moveaxis(np.asarray(S, np.float64), -1, 0))
    assert (values[:, 0] >= -1e-5 * values[:, -1]).all()


@pytest.mark.parametrize(
    "name", ["transformer", *(pytest.param(name, marks=pytest.mark.long) for name in ("mlp", "causal transformer"))]
)
@pytest.mark.parametrize("start", ["full rank", "rank one", "equal", "opposite"])
def test_paths_stay_in_the_cone(name, start, key):
    layer, S0 = layer_of(name, 4), starts(4, start).astype(jnp.float32)
    assert_in_the_cone(layer, S0, h=0.02, steps=10, paths=200, key=key)


@pytest.mark.parametrize("name", [pytest.param("feedforward", marks=pytest.mark.long), "mlp"])
def test_one_token_without_attention_has_its_exact_law(name, key):
    """log D ~ N(log D₀ − at, 2at), like log V and not independent of it."""
    layer, T = LAYERS[name](), 0.4
    S, _ = end(layer, jnp.diag(jnp.array([1.5, 0.7])), T / 8, steps=8, paths=2**12, key=key)
    a = float(layer.limit().linear_noise)
    law = stats.norm(np.log(0.7) - a * T, np.sqrt(2 * a * T))
    assert_distribution(np.log(S[1, 1]), law.cdf)
