"""The shaped ReLU in the limit, Theorem 3.2: the drift θ₂ B₂ by the arc-cosine kernel.

Tests: `tests/layers/test_relu.py`.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sdeinfer.covariance._batched import diagonal, identity_like, transpose
from sdeinfer.covariance._matrix import safe_sqrt
from sdeinfer.terms._base import AbstractTerm, AddedKernel, Kernel


@dataclasses.dataclass(frozen=True)
class ShapedReLU(AbstractTerm):
    """The drift θ₂ B₂; its coefficient is θ₂.

    With λ = θ₂/2 and the arc-cosine kernel κ₁ = V + 2B₂ it is λ (κ₁(V) − V).
    """

    def drift(self, c, V):
        """θ₂ B₂(V)."""
        return c * relu_drift(V)

    def kernel(self, c) -> AddedKernel:
        """λ κ₁, with decay λ."""
        rate = c / 2
        return AddedKernel(
            present=rate > 0,
            decay=rate,
            of_tokens=lambda V: rate * (V + 2 * relu_drift(V)),
            of_tangents=lambda S: rate * (S + 2 * joint_relu_drift(S)),
        )


@functools.cache
def _chebyshev(terms: int) -> list[float]:
    """Chebyshev coefficients of the g(u) of `relu_alignment` on 0 ≤ u ≤ 1."""
    # g(u) = Σ_k series[k] u^k, by integrating the series of arccos(1 − u).
    series = [math.sqrt(2) * math.comb(2 * k, k) / 8**k / ((2 * k + 1) * (k + 1.5)) for k in range(60)]
    # For u = (1 + cos θ)/2, u^k = cos^{2k}(θ/2) is a sum of cos(jθ).
    return [
        (2 - (j == 0)) * sum(series[k] * (math.comb(2 * k, k - j) / 4**k) for k in range(j, len(series)))
        for j in range(terms)
    ]


def relu_alignment(rho: Any) -> Any:
    """√(1 − ρ²) − ρ arccos ρ, as in ν of Eq. 6: 0 at ρ = 1, 1 at ρ = 0, π at ρ = −1. NumPy arrays stay in NumPy.

    Computed as u^{3/2} g(u) with u = 1 − |ρ| and g smooth, plus π|ρ| for ρ < 0. This has full *relative* precision as
    ρ → 1, where the two terms cancel, and avoids arccos, which took most of the solver's time. The derivative is
    −arccos ρ, finite at ρ = ±1, where the derivatives of the two terms would give ∞ − ∞.
    """
    return _differentiable_alignment(rho) if isinstance(rho, Array) else _alignment(np.asarray(rho))


def _alignment(rho: Any) -> Any:
    xp = np if isinstance(rho, np.ndarray) else jnp
    rho = xp.clip(rho, -1.0, 1.0)
    u = 1 - xp.abs(rho)
    z = 2 * u - 1
    # Clenshaw's recurrence, with as many terms as reach rounding.
    first, *others = _chebyshev(19 if rho.dtype.itemsize == 8 else 9)
    last, before = xp.zeros_like(u), xp.zeros_like(u)
    for coefficient in reversed(others):
        last, before = coefficient + 2 * z * last - before, last
    g = first + z * last - before
    return u * xp.sqrt(u) * g + math.pi * xp.maximum(-rho, 0.0)


_differentiable_alignment = jax.custom_jvp(_alignment)


@_differentiable_alignment.defjvp
def _alignment_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Array, Array]:
    (rho,), (rho_dot,) = primals, tangents
    return _differentiable_alignment(rho), -jnp.arccos(jnp.clip(rho, -1.0, 1.0)) * rho_dot


def relu_drift[T: (Array, np.ndarray)](V: Float[T, "m m ..."]) -> Float[T, "m m ..."]:
    """B₂(V), with b_ReLU = (c₊ − c₋)² B₂: ν(ρ_αβ) √(V_αα V_ββ) of Theorem 3.2 for c₊ − c₋ = 1; zero on the diagonal."""
    scale, off_diagonal, rho = _correlations(V)
    return V.__array_namespace__().where(off_diagonal, relu_alignment(rho) * scale, 0.0) / (2 * math.pi)


def _correlations[T: (Array, np.ndarray)](V: Float[T, "m m ..."]) -> tuple[Any, Any, Any]:
    """√(V_αα V_ββ); whether two tokens differ and neither is 0; and their correlation ρ, or 0."""
    xp, norm = V.__array_namespace__(), safe_sqrt(diagonal(V))
    scale = norm[:, None] * norm[None, :]
    # The diagonal, ρ = 1, is masked: ν has no second derivative there.
    off_diagonal = (scale > 0) & (identity_like(V) == 0)
    return scale, off_diagonal, xp.where(off_diagonal, V, 0.0) / xp.where(off_diagonal, scale, 1.0)


def joint_relu_drift(S: Float[Array, "rows rows ..."]) -> Float[Array, "rows rows ..."]:
    """The joint matrix of B₂ = √(V_αα V_ββ) f(ρ), with f = (√(1−ρ²) − ρ arccos ρ)/(2π) (Theorem 3.2 for c₊ − c₋ = 1).

    With r_α = Γ_αα/√V_αα, the part of ẋ_α along x_α, and u_αβ = ẋ_α·x_β/√V_ββ − ρ r_α,

        Γ-block:  [−arccos ρ Γ_αβ + √(1−ρ²) √V_αα r_β]/(2π),
        D-block:  [−arccos ρ D_αβ + √(1−ρ²) r_α r_β + u_αβ u_βα/√(1−ρ²)]/(2π).

    Both vanish on the diagonal. Where tokens coincide u = O(√(1−ρ²)), so that the last term vanishes, too.
    """
    V, C, D = Kernel.of(S)
    norm = safe_sqrt(diagonal(V))
    present = norm > 0
    inverse = jnp.where(present, 1 / jnp.where(present, norm, 1.0), 0.0)
    _, off_diagonal, rho = _correlations(V)
    rho = jnp.clip(rho, -1.0, 1.0)
    angle, sine = _angle(rho), safe_sqrt((1 - rho) * (1 + rho))
    apart = sine > 0
    r = diagonal(C) * inverse
    u = transpose(C) * inverse[None] - rho * r[:, None]
    bends = jnp.where(apart, u * transpose(u) / jnp.where(apart, sine, 1.0), 0.0)
    along = sine * norm[:, None] * r[None] - angle * C
    mixed = sine * r[:, None] * r[None] + bends - angle * D
    along, mixed = (jnp.where(off_diagonal, x, 0.0) / (2 * math.pi) for x in (along, mixed))
    return Kernel(relu_drift(V), along, mixed).joint


@jax.custom_jvp
def _angle(rho: Array) -> Array:
    """The arccosine, whose derivative, infinite at ρ = ±1, counts as zero there."""
    return jnp.arccos(rho)


@_angle.defjvp
def _angle_jvp(primals, tangents):
    (rho,), (rho_dot,) = primals, tangents
    sine = jnp.sqrt((1 - rho) * (1 + rho))
    apart = sine > 0
    return _angle(rho), jnp.where(apart, -rho_dot / jnp.where(apart, sine, 1.0), 0.0)
