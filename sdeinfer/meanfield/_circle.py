"""The continuum of tokens on the circle, by Fourier modes."""

import diffrax
import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.meanfield._solve import integrate

RESOLVED = 1e-6
"""Largest amplitude, over that of mode 0, of the highest quarter of the modes that are kept."""

MOST_STEPS = 4096
"""Largest number of steps; a density that the points resolve takes some hundred."""


class CircleContinuum(eqx.Module):
    """The density ρ of infinitely many tokens on the circle, for Q = K = V = I.

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
        # Without the highest third, into which alone the products of two other modes alias.
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
        InputError: for a density that is not positive with integral 1.
        RuntimeError: if clusters become too narrow for N points: use more points, or earlier times.
    """
    rho = jnp.asarray(density)
    if not np.isclose(float(rho.mean()) * 2 * np.pi, 1, rtol=1e-4) or not bool((rho >= 0).all()):
        raise InputError("density: must be positive with integral 1 over the circle")
    found, successful = integrate(
        _field,
        rho,
        ts,
        continuum,
        solver=diffrax.Tsit5(),
        rtol=rtol,
        atol=rtol,
        max_steps=MOST_STEPS,
        throw=False,  # steps vanish where the clusters are too narrow
    )
    modes = jnp.abs(jnp.fft.rfft(found))
    kept = _kept(modes.shape[-1])
    return eqx.error_if(
        found,
        ~(modes[:, kept * 3 // 4 : kept].max() <= RESOLVED * modes[:, 0].min()) | ~successful,
        "the clusters are too narrow for this number of points: use more points, or earlier times",
    )


def _field(t, rho, continuum):
    return continuum(rho)


def angles(points: int, dtype=None) -> Float[Array, " points"]:
    """N angles of the circle, evenly spaced from 0."""
    return jnp.arange(points, dtype=dtype) * (2 * jnp.pi / points)


def fourier_modes(density: Float[Array, "*times points"]) -> Float[Array, "*times modes"]:
    """|c_k| of the density (1/2π) Σ_k c_k e^{ikθ}, for k = 0, 1, …; c_0 = 1."""
    return jnp.abs(jnp.fft.rfft(density)) * (2 * jnp.pi / density.shape[-1])


def _kept(modes: int) -> int:
    """Number of modes below the highest third."""
    return 2 * modes // 3
