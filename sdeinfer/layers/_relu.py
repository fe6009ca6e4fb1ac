"""The shaped ReLU σ_s(x) = s₊ max(x, 0) + s₋ min(x, 0), s± = 1 + c±/√n."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from sdeinfer.covariance import reciprocal


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
