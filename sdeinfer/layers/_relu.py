"""The shaped ReLU σ_s(x) = s₊ max(x, 0) + s₋ min(x, 0), s± = 1 + c±/√n, and the drift that it leaves in the limit."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sdeinfer.covariance import correlation


def shaped_relu(x: Array, c_plus: Float[Array, ""], c_minus: Float[Array, ""], width: int) -> Array:
    """√c σ_s(x): the shaped ReLU of Eq. 4 times the root of its He constant, so that E[(√c σ_s(g))²] = 1.

    Arguments:
        x: pre-activations, any shape.
        c_plus: c₊ of the slope s₊ = 1 + c₊/√n for x > 0.
        c_minus: c₋ of the slope s₋ = 1 + c₋/√n for x < 0.
        width: n.
    """
    s_plus = 1 + c_plus / math.sqrt(width)
    s_minus = 1 + c_minus / math.sqrt(width)
    he = 2 / (s_plus**2 + s_minus**2)
    return jnp.sqrt(he) * (s_plus * jnp.maximum(x, 0) + s_minus * jnp.minimum(x, 0))


@jax.custom_jvp
def relu_alignment(rho: Array) -> Array:
    """√(1 − ρ²) − ρ arccos ρ, the shape of ν in Eq. 6: 0 at ρ = 1, 1 at ρ = 0, π at ρ = −1.

    Its derivative is −arccos ρ exactly, finite up to ρ = ±1, where differentiating the two terms would give ∞ − ∞.
    """
    rho = jnp.clip(rho, -1.0, 1.0)
    return jnp.sqrt((1 - rho) * (1 + rho)) - rho * jnp.arccos(rho)


@relu_alignment.defjvp
def _relu_alignment_jvp(primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    (rho,), (rho_dot,) = primals, tangents
    return relu_alignment(rho), -jnp.arccos(jnp.clip(rho, -1.0, 1.0)) * rho_dot


def relu_drift(V: Float[Array, "m m"]) -> Float[Array, "m m"]:
    """B₂(V), with b_ReLU = (c₊ − c₋)² B₂: ν(ρ_αβ) √(V_αα V_ββ) of Theorem 3.2 for c₊ − c₋ = 1; zero on the diagonal."""
    scale = jnp.sqrt(jnp.diagonal(V))
    return relu_alignment(correlation(V)) * (scale[:, None] * scale[None, :]) / (2 * math.pi)
