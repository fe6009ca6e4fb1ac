"""Shaped attention, Eq. 1, 9 and Theorem 4.2."""

import functools
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from sdeinfer._files import InputError
from sdeinfer.covariance import gram, is_concrete, matmul, reciprocal, total, transpose
from sdeinfer.layers._base import AbstractLayer, shortcut
from sdeinfer.layers._finite_width import FiniteWidth, weights
from sdeinfer.layers._keys import NetworkKeys
from sdeinfer.layers._limit import Limit
from sdeinfer.layers._wishart import factor, residual_covariance, whole, wishart_draws, wishart_factor
from sdeinfer.parameters import GAMMA, TAU0, Parameter

GAMMA1 = Parameter("gamma1", "γ₁", "gain of the identity (Eq. 33)")
GAMMA2 = Parameter("gamma2", "γ₂", "gain of the centring (Eq. 33)")


class ShapedAttention(AbstractLayer):
    """X′ = λX + γ A X W_V/√n with A = I + softmax(Y/τ) − 11ᵀ/m (Eq. 1, 9), and the SDE of Theorem 4.2.

    With H > 1 heads, each has an A of its own, of its own queries and keys, and makes n/H columns of A X W_V; that
    divides the noise κ² by H. An output projection multiplies the heads' columns by W_O/√n; that makes the noise a
    2γ² instead of γ²(2 − γ²). The paper has one head and no projection.

    Gains are multipliers of the identity and of the centring, A = γ₁I + softmax(Y/τ) − γ₂11ᵀ/m (Eq. 33), which start at
    1 and are trained. There is a limit at 1 alone: elsewhere A tends to another matrix than I, and one layer moves V by
    more than 1/n.

    With a causal mask, row α attends to the m_α = α tokens up to itself, counted from 1, and is centred by 1/m_α.

    Attributes:
        gamma: strength γ of the residual branch, in (0, 1]; λ² + γ² = 1.
        tau0: constant τ0 > 0 of the softmax temperature τ = τ0 √(n n_k).
        key_width: width n_k of the queries and keys of one head; n/H where None. The limit does not depend on it.
        heads: how many heads H; n must be a multiple.
        output_projection: whether W_O follows the heads.
        causal: whether a token attends to itself and those before it only.
        gamma1: gain γ₁ of the identity; 1, and no parameter, where None.
        gamma2: gain γ₂ of the centring; 1, and no parameter, where None.
    """

    gamma: Float[Array, ""] = GAMMA.field()
    tau0: Float[Array, ""] = TAU0.field()
    key_width: int | None = eqx.field(default=None, static=True)
    heads: int = eqx.field(default=1, static=True)
    output_projection: bool = eqx.field(default=False, static=True)
    causal: bool = eqx.field(default=False, static=True)
    gamma1: Float[Array, ""] | None = GAMMA1.field(default=None)
    gamma2: Float[Array, ""] | None = GAMMA2.field(default=None)

    def __check_init__(self):
        check_heads(self.key_width, self.heads)

    def forward(self, X: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m n"]:
        """Eq. 1 with the attention matrix of Eq. 9, or Eq. 33."""
        tokens, width = X.shape
        key_width = self._key_width(width)
        key_queries, key_keys, key_values, *key_output = jr.split(key, 4 if self.output_projection else 3)

        def project(key, columns):
            """X W/√n, with the heads' columns apart."""
            projected = X @ jr.normal(key, (width, columns), X.dtype) / math.sqrt(width)
            return jnp.swapaxes(projected.reshape(tokens, self.heads, -1), 0, 1)

        queries, keys = (project(k, self.heads * key_width) for k in (key_queries, key_keys))
        tau = self.tau0 * math.sqrt(width * key_width)
        flat = self._flat(tokens, X.dtype)
        scores = jnp.where(flat > 0, queries @ jnp.swapaxes(keys, 1, 2) / tau, -jnp.inf)
        identity = jnp.eye(tokens, dtype=X.dtype)
        A = _times(self.gamma1, identity) + jax.nn.softmax(scores, axis=-1) - _times(self.gamma2, flat)
        Z = jnp.swapaxes(A @ project(key_values, width), 0, 1).reshape(tokens, width)
        if self.output_projection:
            Z = Z @ jr.normal(key_output[0], (width, width), X.dtype) / math.sqrt(width)
        return shortcut(self.gamma) * X + self.gamma * Z

    @property
    def column_blocks(self) -> int:
        """One for each head, where no output projection mixes their columns."""
        return 1 if self.output_projection else self.heads

    def check_width(self, width: int) -> None:
        """Refuse a width that is not a multiple of the number of heads."""
        self._key_width(width)

    def forward_covariance(
        self, V: Float[Array, "m m blocks networks"], *, width: Int[Array, ""] | int, keys: NetworkKeys
    ) -> Float[Array, "m m blocks networks"]:
        """Noncentral Wishart given the heads' A: S = A V Aᵀ in a head's own columns, or that of the projection."""
        tokens, _, blocks, _ = V.shape
        dtype, heads, n = V.dtype, self.heads, jnp.asarray(width, V.dtype)
        key_width = width // heads if self.key_width is None else self.key_width
        freedom = [key_width, width // blocks - tokens, *([width // heads] if self.output_projection else [])]
        # Two normal matrices more: the keys, and the branch in the directions of X.
        sizes = {"tokens": tokens, "blocks": max(heads, blocks), "normals": 2, "dtype": dtype}
        drawn = wishart_draws(freedom, **sizes, keys=keys)
        B, own, *projection = (wishart_factor(*each) for each in zip(freedom, drawn.normals, drawn.chi, strict=False))
        right, near = drawn.normals[-2:]
        V_whole = whole(V)
        L = factor(V_whole)
        # Queries are L G_Q, keys L G_K: with G_Q = B times orthonormal rows, G_Q G_Kᵀ has the law of B times normals.
        Y = matmul(matmul(L, matmul(B[:, :, :heads], right[:, :, :heads])), transpose(L))
        flat = self._flat(tokens, dtype)[:, :, None, None]
        scores = jnp.where(flat > 0, Y / (self.tau0 * jnp.sqrt(n * jnp.asarray(key_width, dtype))), -jnp.inf)
        A_less_I = _softmax(scores) - _times(self.gamma2, flat)
        # A L: in this form equal tokens stay equal to the last bit.
        F = _times(self.gamma1, L) + matmul(A_less_I, L)
        if self.output_projection:
            # Given the heads' columns Z, those of Z W_O/√n are N(0, Z Zᵀ/n).
            F = factor(whole(gram(matmul(F, projection[0][:, :, :heads]) / jnp.sqrt(n))))
        else:
            F = jnp.repeat(F, blocks // heads, axis=2)
        return residual_covariance(
            L if V_whole is V else factor(V),
            F,
            shortcut=shortcut(self.gamma),
            gamma=self.gamma,
            width=width,
            near=near[:, :, :blocks],
            far=own[:, :, :blocks],
        )

    def _flat(self, tokens: int, dtype: jnp.dtype) -> Float[Array, "m m"]:
        """The softmax of equal logits: 1/m_α for the tokens to which row α attends, 0 for the others."""
        mask = jnp.ones((tokens, tokens), dtype)
        mask = jnp.tril(mask) if self.causal else mask
        return mask / jnp.sum(mask, axis=1, keepdims=True)

    def _key_width(self, width: int) -> int:
        if width % self.heads != 0:
            raise InputError(f"heads: the width {width} is not a multiple of {self.heads}")
        return width // self.heads if self.key_width is None else self.key_width

    def limit(self) -> Limit:
        """Theorem 4.2; with a causal mask, its sums are over the tokens so far.

        Raises:
            InputError: where gains are not 1.
        """
        layer = self._untrained()
        variance, coldness = layer.gamma**2, reciprocal(layer.tau0)
        return Limit(
            attention_drift=variance * coldness**2,
            relu_drift=jnp.zeros_like(variance),
            linear_noise=variance * (2 if self.output_projection else 2 - variance),
            attention_noise=(variance * coldness) ** 2 * (1 / self.heads),
            causal=self.causal,
        )

    def finite_width(self, width: ArrayLike) -> FiniteWidth:
        """The limit, and the fourth order of the softmax in its logits, whose variance is x = 1/(n τ0²) times V².

        The queries' and keys' own width n_k would add terms of order 1/(n n_k), which are left out: they are of the
        next order where n_k grows with n.

        Raises:
            InputError: with a causal mask, for which it has not been derived.
        """
        if self.causal:
            raise InputError("law: with a causal mask there is the limit's law only, law='limit'")
        variance, limit = self.gamma**2, self.limit()
        h = reciprocal(width)
        x = h * reciprocal(self.tau0) ** 2
        projected = float(self.output_projection)
        return FiniteWidth(
            limit=limit,
            drift_along=jnp.zeros_like(x),
            attention_drift_next=limit.attention_drift * x,
            linear_repeat=projected * variance**2 * h,
            attention_repeat=variance**2 * x * (1 + projected / self.heads),
            variance=weights(
                attention_growth=variance * x * (1 + projected * variance),
                attention_next=limit.attention_noise * x,
            ),
            variance_mixing=weights(attention_next=jnp.zeros_like(x)),
        )

    def _untrained(self) -> "ShapedAttention":
        """The layer, with the gains that have no limit refused: traced ones when they are known."""
        layer = self
        for name, gain in (("gamma1", self.gamma1), ("gamma2", self.gamma2)):
            if gain is None:
                continue
            message = f"{name}: there is a limit for 1 only, where A tends to I as n grows"
            if is_concrete(gain) and gain != 1:
                raise InputError(f"{message}; got {float(gain):g}")
            if not is_concrete(gain):
                layer = eqx.error_if(layer, gain != 1, message)
        return layer


def check_heads(key_width: int | None, heads: int) -> None:
    """Refuse a width of queries and keys, or a number of heads, that is not positive."""
    if key_width is not None and key_width < 1:
        raise InputError(f"key_width: at least 1 is needed, got {key_width}")
    if heads < 1:
        raise InputError(f"heads: at least 1 is needed, got {heads}")


def _times(gain: Float[Array, ""] | None, A: Array) -> Array:
    return A if gain is None else gain * A


def _softmax(Y: Float[Array, "m m ..."]) -> Float[Array, "m m ..."]:
    """Softmax of each row."""
    # Without the barrier XLA computes Y anew, and rounds it otherwise, where it is used: huge logits would give 0/0.
    Y = jax.lax.optimization_barrier(Y)
    largest = functools.reduce(jnp.maximum, [Y[:, k] for k in range(Y.shape[1])])
    weights = jnp.exp(Y - largest[:, None])
    return weights / total(weights, axis=1)[:, None]
