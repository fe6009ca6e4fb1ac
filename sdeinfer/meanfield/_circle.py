"""The continuum of tokens on the circle, by Fourier modes."""

import diffrax
import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from numpy.typing import ArrayLike

from sdeinfer._files import InputError

RESOLVED = 1e-6
"""Largest amplitude, over that of mode 0, of the highest third of the modes."""


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
        return jnp.fft.irfft(_without_highest(-1j * jnp.arange(len(flux)) * flux), len(density))


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
    times = jnp.asarray(ts, rho.dtype)
    if not np.isclose(float(rho.mean()) * 2 * np.pi, 1, rtol=1e-4) or not bool((rho >= 0).all()):
        raise InputError("density: must be positive with integral 1 over the circle")
    solution = diffrax.diffeqsolve(
        diffrax.ODETerm(_field),
        diffrax.Tsit5(),
        t0=0.0,
        t1=times[-1],
        dt0=None,
        y0=rho,
        args=continuum,
        saveat=diffrax.SaveAt(ts=times),
        stepsize_controller=diffrax.PIDController(rtol=rtol, atol=rtol),
        max_steps=MOST_STEPS,
        throw=False,  # steps vanish where the clusters are too narrow
    )
    assert solution.ys is not None
    modes = jnp.abs(jnp.fft.rfft(solution.ys))
    highest = modes[:, _highest(modes.shape[-1]) * 3 // 4 : _highest(modes.shape[-1])].max()
    return eqx.error_if(
        solution.ys,
        ~(highest <= RESOLVED * modes[:, 0].min()) | (solution.result != diffrax.RESULTS.successful),
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


def _without_highest(modes: Array) -> Array:
    """Zero the highest third: products of two densities then alias into these modes only."""
    return jnp.where(jnp.arange(len(modes)) < _highest(len(modes)), modes, 0)


def _highest(modes: int) -> int:
    return 2 * modes // 3
