"""The solver of weak order 2: its flows against their generators, its steps against the order of the composition."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.cases import PATTERNS, random_covariance
from helpers.internals import (
    Limit,
    LinearNoise,
    attention_noise,
    attention_noise_flow,
    differences,
    flows_of,
    gram,
    overlap,
    transpose,
)
from helpers.references import arc_cosine_kernel
from numpy.polynomial.hermite_e import hermegauss

import sdeinfer as si


def pattern_of(name: str, tokens: int) -> si.Pattern:
    return si.Pattern() if name == "no mask" else PATTERNS[name](tokens)


def factor(tokens: int):
    return jnp.linalg.cholesky(random_covariance(tokens))[..., None]


def generator(fields):
    """f ↦ ½ Σ_k D²f(b_k, b_k) of the noises X ↦ [b_1, b_2, …], for a vector f of functions."""

    def of(f):
        def applied(X):
            hessian = jax.hessian(f)(X).reshape(-1, X.size, X.size)
            b = fields(X).reshape(-1, X.size)
            return jnp.einsum("ka,kb,sab->s", b, b, hessian) / 2

        return applied

    return of


OBSERVED = {
    "V₁₁": lambda V: V[0, 0],
    "V₁₂": lambda V: V[0, 1],
    "V₁₂²": lambda V: V[0, 1] ** 2,
    "V₁₁ V₂₂": lambda V: V[0, 0] * V[1, 1],
    "(tr V)²": lambda V: jnp.trace(V) ** 2,
}


def local_errors(step, generator, nodes: int, lengths=(0.2, 0.1, 0.05)):
    """E f(X_h) − f − h L f − h²/2 L² f for every observed f, over steps; Gauss–Hermite nodes in every normal."""
    x, w = hermegauss(nodes)
    normals = step.normals
    points = np.array(list(itertools.product(range(nodes), repeat=normals)))
    G, weight = x[points], (w[points] / w.sum()).prod(axis=1)
    X = factor(2)[..., 0]

    def of_factor(X):
        return jnp.stack([f(X @ X.T) for f in OBSERVED.values()])

    first = generator(of_factor)
    zeroth, first, second = jax.jit(lambda X: (of_factor(X), first(X), generator(first)(X) / 2))(X)
    mean = jax.jit(lambda h: jax.vmap(lambda V: jnp.stack([f(V) for f in OBSERVED.values()]), -1)(step(X, h, G)))
    return np.array([weight @ mean(h) - zeroth - h * first - h**2 * second for h in lengths]).T


class Step:
    """One step of a flow from X, for rows of normals."""

    def __init__(self, flow, normals, shape):
        self.flow, self.normals, self.shape = flow, normals, shape

    def __call__(self, X, h, G):
        increments = jnp.sqrt(h) * jnp.asarray(G).T.reshape(*self.shape, -1)
        X = jnp.broadcast_to(X[..., None], (*X.shape, increments.shape[-1]))
        return gram(self.flow(X, jnp.asarray(h), increments))


def assert_third_order(errors) -> None:
    """Halving the step divides a local error by about 8: by less than 4 if there were a term in h²."""
    errors = errors[np.abs(errors[:, -1]) > 1e-9]  # the others are exact
    assert len(errors) >= 3
    ratios = errors[:, :-1] / errors[:, 1:]
    np.testing.assert_array_less(6.5, ratios)
    np.testing.assert_array_less(ratios, 10)


@pytest.mark.one_case
@pytest.mark.parametrize("name", ["no mask", "causal"])
def test_the_flow_of_attentions_noise_has_local_errors_of_the_third_order(name):
    pattern, attention = pattern_of(name, 2), 0.8
    units = jnp.eye(4).reshape(-1, 2, 2, 1)

    def fields(X):
        one = jax.vmap(lambda unit: attention_noise(pattern, X[..., None], unit)[..., 0])
        return jnp.sqrt(attention) * one(units)

    step = Step(functools.partial(attention_noise_flow, pattern, jnp.asarray(attention)), 8, (2, 4))
    assert_third_order(local_errors(step, generator(fields), nodes=4))


def test_the_flow_of_the_linear_noise_has_local_errors_of_the_third_order():
    a, units = 1.5, jnp.eye(4).reshape(-1, 2, 2)

    def fields(X):
        return jnp.sqrt(a / 2) * X @ units

    def with_drift(f):
        noise = generator(fields)(f)
        return lambda X: noise(X) + jax.jvp(f, (X,), (-a * 2 / 4 * X,))[1]

    errors = local_errors(Step(functools.partial(LinearNoise().noise, jnp.asarray(a)), 4, (2, 2)), with_drift, nodes=10)
    # The mean is exact.
    np.testing.assert_allclose(errors[:2], 0, atol=1e-9)
    assert_third_order(errors[2:])


@pytest.mark.parametrize("name", ["no mask", "causal prompts", "mask"])
def test_the_drifts_flows_are_of_the_second_order(name):
    """Together they are b(V) less the noise's κ² V ∘ T; two half steps differ from one step by terms in h³."""
    pattern, X = pattern_of(name, 3), factor(3)
    limit = Limit(*map(jnp.asarray, (0.9, 2.0, 0.0, 0.4)), pattern=pattern)
    V, velocity = gram(X)[..., 0], 0.0
    for number in range(2):
        flow = jax.jit(lambda X, h, number=number: flows_of(limit, h, jnp.zeros((3, 9, 1)), tangents=False)[number](X))
        velocity += (gram(flow(X, 1e-5)) - V[..., None])[..., 0] / 1e-5
        errors = []
        for h in (0.04, 0.02):
            errors.append(jnp.abs(gram(flow(X, h)) - gram(flow(flow(X, h / 2), h / 2))).max())
        exact = max(errors) < 1e-15
        assert exact or 6.5 < errors[0] / errors[1] < 10
    T = overlap(pattern, 3, differences(pattern, transpose(differences(pattern, V[..., None]))))[..., 0]
    np.testing.assert_allclose(velocity, limit.drift(V) - 0.4 * V * T, atol=1e-4)


NEARLY_WITHOUT_NOISE = si.ResidualFeedForward(0.6e-4, 3e4, -3e4)
"""A ReLU of the gap that layers of γ = .6 have with slopes of ±3, and 10⁻⁸ of their noise."""


def test_a_long_step_of_a_relu_is_of_the_exponential_heun_scheme(key):
    """dV/dt = r (κ − V) with the kernel κ of arc cosines, in one step."""
    V, h = np.asarray(random_covariance(2)), 0.08
    rate = (NEARLY_WITHOUT_NOISE.gamma * 6e4) ** 2 / 2
    s = float(h * rate)
    first, second = -np.expm1(-s) / s, (np.expm1(-s) + s) / s**2
    N = arc_cosine_kernel(V)
    middle = np.exp(-s) * V + s * first * N
    expected = np.exp(-s) * V + s * (first - second) * N + s * second * arc_cosine_kernel(middle)
    found = si.simulate(NEARLY_WITHOUT_NOISE, V, [h], paths=4, step=h, key=key)[:, 0]
    np.testing.assert_allclose(found, np.broadcast_to(expected, (4, 2, 2)), atol=1e-4)
