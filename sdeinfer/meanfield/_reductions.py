"""Exact reductions for Q = K = V = I: infinitely many tokens on the circle, and tokens of one inner product.

Tests: `tests/meanfield/test_modes.py`.
"""

import diffrax
import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.meanfield._solve import integrate


class CircleContinuum(eqx.Module):
    """The density ρ of infinitely many tokens on the circle.

        ∂ρ/∂t = −∂(ρ u)/∂θ,    u = (1/β) ∂(W ∗ ρ)/∂θ  [/(W ∗ ρ) if normalised],    W(θ) = exp(β cos θ),

    on N points, with derivatives and convolutions by Fourier modes. The convolution multiplies mode k by 2π I_k(β),
    which the transform of W on the points gives to rounding.

    Attributes:
        beta: inverse temperature β > 0.
        normalised: whether attention is normalised (softmax).
    """

    beta: Float[Array, ""] = eqx.field(converter=jnp.asarray)
    normalised: bool = eqx.field(default=True, static=True)

    def velocity(self, density: Float[Array, " points"]) -> Float[Array, " points"]:
        """The angular velocity u at the points."""
        points = len(density)
        # Divided by e^β: the velocity of the softmax does not depend on it, the other is multiplied by it again.
        kernel = jnp.exp(self.beta * (jnp.cos(angles(points, density.dtype)) - 1))
        modes = jnp.fft.rfft(kernel) * jnp.fft.rfft(density) * (2 * jnp.pi / points)
        k = jnp.arange(len(modes))
        slope = jnp.fft.irfft(1j * k * modes, points) / self.beta
        return slope / jnp.fft.irfft(modes, points) if self.normalised else slope * jnp.exp(self.beta)

    def __call__(self, density: Float[Array, " points"]) -> Float[Array, " points"]:
        """∂ρ/∂t at the points."""
        flux = jnp.fft.rfft(density * self.velocity(density))
        k = jnp.arange(len(flux))
        return jnp.fft.irfft(jnp.where(k < _kept(len(k)), -1j * k * flux, 0), len(density))


def solve_circle(
    continuum: CircleContinuum,
    density: ArrayLike,
    ts: ArrayLike,
    *,
    rtol: float = 1e-8,
) -> Float[Array, "times points"]:
    """Densities of the continuum at times.

    Arguments:
        continuum: the continuum.
        density: density at time 0 at `angles(N)`, with integral 1.
        ts: times ≥ 0, increasing.
        rtol: relative tolerance of a step; absolute too.

    Raises:
        RuntimeError: if clusters become too narrow for N points: use more points, or earlier times.
    """
    rho = jnp.asarray(density)
    if not np.isclose(float(rho.mean()) * 2 * np.pi, 1, rtol=1e-4) or not bool((rho >= 0).all()):
        raise InputError("density: must be positive with integral 1 over the circle")
    # Steps vanish where the clusters are too narrow; a density that the points resolve takes some hundred.
    limits = {"max_steps": 4096, "throw": False}
    densities, successful = integrate(
        _density_field, rho, ts, continuum, solver=diffrax.Tsit5(), rtol=rtol, atol=rtol, **limits
    )
    modes = jnp.abs(jnp.fft.rfft(densities))
    count = _kept(modes.shape[-1])
    highest = modes[:, count * 3 // 4 : count].max()
    return eqx.error_if(
        densities,
        ~(highest <= 1e-6 * modes[:, 0].min()) | ~successful,
        "the clusters are too narrow for this number of points: use more points, or earlier times",
    )


def angles(points: int, dtype=None) -> Float[Array, " points"]:
    """N angles of the circle, evenly spaced from 0."""
    return jnp.arange(points, dtype=dtype) * (2 * jnp.pi / points)


def fourier_modes(density: Float[Array, "*times points"]) -> Float[Array, "*times modes"]:
    """|c_k| of the density (1/2π) Σ_k c_k e^{ikθ}, for k = 0, 1, …; c_0 = 1."""
    return jnp.abs(jnp.fft.rfft(density)) * (2 * jnp.pi / density.shape[-1])


def equiangular_tokens(number: int, inner: float, *, dimension: int | None = None) -> Float[Array, "n D"]:
    """N unit vectors with ⟨x_i, x_j⟩ = `inner`, −1/(n − 1) to 1, for all i ≠ j, in D ≥ n dimensions (None for n)."""
    dimension = number if dimension is None else dimension
    if dimension < number:
        raise InputError(f"dimension: at least {number} is needed for {number} tokens, got {dimension}")
    if not -1 <= inner * (number - 1) or inner > 1:
        raise InputError(f"inner: between {-1 / (number - 1):.3g} and 1 is needed for {number} tokens, got {inner:g}")
    # The square root of (1 − g) I + g 1 1ᵀ.
    low, high = (1 - inner) ** 0.5, (1 + (number - 1) * inner) ** 0.5
    root = low * jnp.eye(number) + (high - low) / number * jnp.ones((number, number))
    return jnp.pad(root, ((0, 0), (0, dimension - number)))


def equiangular(
    beta: ArrayLike,
    number: int,
    ts: ArrayLike,
    *,
    inner: float = 0.0,
    normalised: bool = True,
    rtol: float = 1e-10,
) -> Float[Array, " times"]:
    """The common inner product g(t) of n tokens, whose growth from 0 to 1 is the collapse of the rank.

        ġ = 2 (1 − g)(1 + (n − 1) g) / (e^{β(1 − g)} + n − 1),    or 2 e^{βg} (1 − g)(1 + (n − 1) g)/n unnormalised.

    Arguments:
        beta: inverse temperature β ≥ 0.
        number: number of tokens n ≥ 2.
        ts: times ≥ 0, increasing.
        inner: inner product at time 0.
        normalised: whether attention is normalised (softmax).
        rtol: relative tolerance of a step; absolute too.
    """
    if number < 2:
        raise InputError(f"number: at least 2 tokens are needed, got {number}")
    g0 = jnp.asarray(inner, jnp.result_type(float))
    rtol = max(rtol, 10 * float(jnp.finfo(g0.dtype).eps))
    args = jnp.asarray(beta), jnp.asarray(number), normalised
    return integrate(_angle_field, g0, ts, args, solver=diffrax.Dopri8(), rtol=rtol, atol=rtol)[0]


def _density_field(t, rho, continuum):
    return continuum(rho)


def _angle_field(t, g, args):
    beta, number, normalised = args
    numerator = 2 * (1 - g) * (1 + (number - 1) * g)
    return numerator / (jnp.exp(beta * (1 - g)) + number - 1) if normalised else numerator * jnp.exp(beta * g) / number


def _kept(modes: int) -> int:
    """Number of modes below the highest third, into which alone the products of two other modes alias."""
    return 2 * modes // 3
