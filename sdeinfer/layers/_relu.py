"""The shaped ReLU σ_s(x) = s₊ max(x, 0) + s₋ min(x, 0), s± = 1 + c±/√n, and its drift in the limit."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from sdeinfer.covariance import diagonal, identity_like, reciprocal, safe_sqrt


def shaped_relu(x: Array, c_plus: Float[Array, ""], c_minus: Float[Array, ""], width: ArrayLike) -> Array:
    """√c σ_s(x): the shaped ReLU of Eq. 4 with its He constant c, E[(√c σ_s(g))²] = 1 for g ~ N(0, 1).

    Arguments:
        x: pre-activations, any shape.
        c_plus: c₊ of the slope s₊ = 1 + c₊/√n for x > 0.
        c_minus: c₋ of the slope s₋ = 1 + c₋/√n for x < 0.
        width: n.
    """
    root = jnp.sqrt(jnp.asarray(width, x.dtype))
    s_plus, s_minus = 1 + c_plus / root, 1 + c_minus / root
    he = 2 / (s_plus**2 + s_minus**2)
    return jnp.sqrt(he) * (s_plus * jnp.maximum(x, 0) + s_minus * jnp.minimum(x, 0))


def relu_kink(c_plus: Float[Array, ""], c_minus: Float[Array, ""], width: ArrayLike) -> Float[Array, ""]:
    """Squared weight q = δ²/(s̄² + δ²) of |x| in √c σ_s(x) = √(1 − q) x ± √q |x|.

    s̄ and δ are half the sum and half the difference of s₊ and s₋. At one width the law of a layer depends on c₊ and c₋
    only through q; 4nq = c (c₊ − c₋)² with the He constant c.
    """
    scale = jax.lax.rsqrt(jnp.asarray(width, jnp.result_type(float))) / 2
    half, mean = (c_plus - c_minus) * scale, 1 + (c_plus + c_minus) * scale
    return half**2 * reciprocal(mean**2 + half**2)


_MOST_TERMS = 60
_SERIES = [
    math.sqrt(2) * math.comb(2 * k, k) / 8**k / ((2 * k + 1) * (k + 1.5)) for k in range(_MOST_TERMS)
]  # g(u) = Σ_k _SERIES[k] u^k, by integrating the series of arccos(1 − u)
_CHEBYSHEV = [
    (2 - (j == 0)) * sum(_SERIES[k] * (math.comb(2 * k, k - j) / 4**k) for k in range(j, _MOST_TERMS))
    for j in range(19)
]  # the same g on 0 ≤ u ≤ 1: for u = (1 + cos θ)/2, u^k = cos^{2k}(θ/2) is a sum of cos(jθ)
_TERMS = {4: 9, 8: 19}
"""Number of Chebyshev terms that reach rounding, by the item size in bytes."""


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
    # Clenshaw's recurrence.
    last, before = xp.zeros_like(u), xp.zeros_like(u)
    for coefficient in _CHEBYSHEV[_TERMS.get(rho.dtype.itemsize, 9) - 1 : 0 : -1]:
        last, before = coefficient + 2 * z * last - before, last
    g = _CHEBYSHEV[0] + z * last - before
    return u * xp.sqrt(u) * g + math.pi * xp.maximum(-rho, 0.0)


_differentiable_alignment = jax.custom_jvp(_alignment)


@_differentiable_alignment.defjvp
def _alignment_jvp(primals: tuple[Any], tangents: tuple[Any]) -> tuple[Array, Array]:
    (rho,), (rho_dot,) = primals, tangents
    return _differentiable_alignment(rho), -jnp.arccos(jnp.clip(rho, -1.0, 1.0)) * rho_dot


def relu_drift[T: (Array, np.ndarray)](V: Float[T, "m m ..."]) -> Float[T, "m m ..."]:
    """B₂(V), with b_ReLU = (c₊ − c₋)² B₂: ν(ρ_αβ) √(V_αα V_ββ) of Theorem 3.2 for c₊ − c₋ = 1; zero on the diagonal."""
    xp, norm = V.__array_namespace__(), safe_sqrt(diagonal(V))
    scale = norm[:, None] * norm[None, :]
    # The diagonal, ρ = 1, is masked: ν has no second derivative there.
    off_diagonal = (scale > 0) & (identity_like(V) == 0)
    rho = xp.where(off_diagonal, V, 0.0) / xp.where(off_diagonal, scale, 1.0)
    return xp.where(off_diagonal, relu_alignment(rho) * scale, 0.0) / (2 * math.pi)
