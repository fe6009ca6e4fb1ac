"""Shaped attention, Eq. 1, 9 and Theorem 4.2. Tests: `tests/layers/test_limits.py`."""

import functools
import math
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from sdeinfer._arguments import at_least_one, given
from sdeinfer._files import InputError
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._batched import gram, matmul, total, transpose
from sdeinfer.covariance._matrix import is_concrete, reciprocal
from sdeinfer.covariance._pattern import EVERY_TOKEN, centring, require_pattern
from sdeinfer.layers._base import AbstractLayer, shortcut, size
from sdeinfer.layers._finite_width import FiniteWidth, weights
from sdeinfer.layers._wishart import (
    Keys,
    factor,
    residual_covariance,
    whole,
    wishart_draws,
    wishart_factor,
    with_tangents,
)
from sdeinfer.parameters import GAMMA, TAU0, Parameter
from sdeinfer.terms._limit import Limit


class ShapedAttention(AbstractLayer):
    """X′ = λX + γ A X W_V/√n with A = I + softmax(Y/τ) − 11ᵀ/m (Eq. 1, 9), and the SDE of Theorem 4.2.

    With H > 1 heads, each head has its own queries, keys and A, and computes n/H columns of A X W_V; this divides the
    noise κ² by H. An output projection multiplies the concatenated heads by W_O/√n; the noise a is then 2γ² instead of
    γ²(2 − γ²). The paper has one head and no projection.

    The gains γ₁ and γ₂ multiply the identity and the centring, A = γ₁I + softmax(Y/τ) − γ₂11ᵀ/m (Eq. 33); training
    starts from 1. The limit exists for γ₁ = γ₂ = 1 only: otherwise A does not tend to I, and one layer changes V by
    more than O(1/n).

    With a pattern other than `EVERY_TOKEN`, row α attends to a set of m_α tokens and is centred by 1/m_α: with a causal
    mask, to itself and earlier tokens; of several prompts, to the tokens of its own.

    Attributes:
        gamma: strength γ of the residual branch, in (0, 1]; λ² + γ² = 1.
        tau0: constant τ0 > 0 of the softmax temperature τ = τ0 √(n n_k).
        key_width: width n_k of the queries and keys of one head; n/H if None. The limit does not depend on it.
        heads: number H of heads; must divide n.
        output_projection: whether W_O follows the heads.
        pattern: which tokens each token attends to.
        gamma1: gain γ₁ of the identity; if None, 1 and not a parameter.
        gamma2: gain γ₂ of the centring; if None, 1 and not a parameter.
    """

    architecture: ClassVar[str | None] = "attention"
    on_host: ClassVar[bool] = True
    has_tangents: ClassVar[bool] = True

    gamma: Float[Any, ""] = GAMMA.field()
    tau0: Float[Any, ""] = TAU0.field()
    key_width: int | None = eqx.field(default=None, static=True)
    heads: int = size(1)
    output_projection: bool = size(False)  # noqa: FBT003
    pattern: Pattern = size(EVERY_TOKEN)  # pyright: ignore[reportIncompatibleMethodOverride]
    gamma1: Float[Any, ""] | None = Parameter("gamma1", "γ₁", "gain of the identity (Eq. 33)").field(default=None)
    gamma2: Float[Any, ""] | None = Parameter("gamma2", "γ₂", "gain of the centring (Eq. 33)").field(default=None)

    def __check_init__(self):
        at_least_one(heads=self.heads, **given(key_width=self.key_width))
        require_pattern(self.pattern)

    def forward(self, X: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m n"]:
        """Eq. 1 with the attention matrix of Eq. 9, or Eq. 33."""
        tokens, width = X.shape
        key_width = self._key_width(width)
        key_queries, key_keys, key_values, *key_output = jr.split(key, 4 if self.output_projection else 3)

        def project(key, columns):
            """X W/√n, split into heads."""
            projected = X @ jr.normal(key, (width, columns), X.dtype) / math.sqrt(width)
            return jnp.swapaxes(projected.reshape(tokens, self.heads, -1), 0, 1)

        queries, keys = (project(k, self.heads * key_width) for k in (key_queries, key_keys))
        tau = self.tau0 * math.sqrt(width * key_width)
        flat = self._flat(tokens, X.dtype)
        # The barrier is that of `_softmax`.
        scores = jax.lax.optimization_barrier(jnp.where(flat > 0, queries @ jnp.swapaxes(keys, 1, 2) / tau, -jnp.inf))
        identity = jnp.eye(tokens, dtype=X.dtype)
        A = _times(self.gamma1, identity) + jax.nn.softmax(scores, axis=-1) - _times(self.gamma2, flat)
        Z = jnp.swapaxes(A @ project(key_values, width), 0, 1).reshape(tokens, width)
        if self.output_projection:
            Z = Z @ jr.normal(key_output[0], (width, width), X.dtype) / math.sqrt(width)
        return shortcut(self.gamma) * X + self.gamma * Z

    @property
    def column_blocks(self) -> int:
        """Number of heads; 1 if an output projection mixes their columns."""
        return 1 if self.output_projection else self.heads

    def check_width(self, width: int) -> None:
        """Raise an InputError for a width that is not a multiple of the number of heads."""
        self._key_width(width)

    def forward_covariance(
        self,
        V: Float[Any, "m m blocks networks"],
        *,
        width: Int[Any, ""] | int,
        keys: Keys,
        tangents: bool = False,
    ) -> Float[Any, "m m blocks networks"]:
        """Noncentral Wishart given A: the branch has S = A V Aᵀ in each head's columns, or after the projection."""
        rows, _, blocks, _ = V.shape
        xp, dtype, heads = V.__array_namespace__(), V.dtype, self.heads
        n = xp.asarray(width, dtype=dtype)
        key_width = width // heads if self.key_width is None else self.key_width
        freedom = [key_width, width // blocks - rows, *([width // heads] if self.output_projection else [])]
        # Two further normal matrices: the keys, and the branch in the directions of X.
        sizes = {"tokens": rows, "blocks": max(heads, blocks), "normals": 2, "dtype": dtype}
        drawn = wishart_draws(freedom, **sizes, keys=keys)
        B, far, *projection = (wishart_factor(*draw) for draw in zip(freedom, drawn.normals, drawn.chi, strict=False))
        right, near = drawn.normals[-2:]
        V_whole = whole(V)
        L = factor(V_whole)
        # Queries are L G_Q, keys L G_K. Since G_Q = B · (orthonormal rows), G_Q G_Kᵀ has the law of B · normals.
        products = matmul(B[:, :, :heads], right[:, :, :heads])
        flat = self._flat(rows // 2 if tangents else rows, dtype)[:, :, None, None]
        tau = self.tau0 * xp.sqrt(n * xp.asarray(key_width, dtype=dtype))

        def attended(L: Float[Any, "m rows blocks networks"]) -> Float[Any, "m rows heads networks"]:
            """A L, in a form that keeps equal tokens equal bit for bit."""
            Y = matmul(matmul(L, products), transpose(L))
            A_less_I = _softmax(L.__array_namespace__().where(flat > 0, Y / tau, -np.inf)) - _times(self.gamma2, flat)
            return _times(self.gamma1, L) + matmul(A_less_I, L)

        F = with_tangents(attended, L) if tangents else attended(L)
        if self.output_projection:
            # Given the concatenated heads Z, the columns of Z W_O/√n are N(0, Z Zᵀ/n).
            F = factor(whole(gram(matmul(F, projection[0][:, :, :heads]) / xp.sqrt(n))))
        else:
            F = xp.repeat(F, blocks // heads, axis=2)
        return residual_covariance(
            L if V_whole is V else factor(V),
            F,
            shortcut=shortcut(self.gamma),
            gamma=self.gamma,
            width=width,
            near=near[:, :, :blocks],
            far=far[:, :, :blocks],
        )

    def _flat(self, tokens: int, dtype: jnp.dtype) -> Float[np.ndarray, "m m"]:
        """Softmax of equal logits: 1/m_α for the tokens to which row α attends, 0 for the others."""
        return np.asarray(centring(self.pattern, tokens).mean, dtype)

    def _key_width(self, width: int) -> int:
        if width % self.heads != 0:
            raise InputError(f"heads: the width {width} is not a multiple of {self.heads}")
        return width // self.heads if self.key_width is None else self.key_width

    def limit(self) -> Limit:
        """Theorem 4.2; the sums in row α run over its m_α tokens.

        Raises:
            InputError: for a gain that is not 1.
        """
        layer = self._untrained()
        variance, coldness = layer.gamma**2, reciprocal(layer.tau0)
        return Limit(
            attention_drift=variance * coldness**2,
            linear_noise=variance * (2 if self.output_projection else 2 - variance),
            attention_noise=(variance * coldness) ** 2 * (1 / self.heads),
            pattern=self.pattern,
        )

    def finite_width(self, width: ArrayLike) -> FiniteWidth:
        """The limit and the next order, from the softmax expanded to fourth order in its logits.

        The logits have variances x V² with x = 1/(n τ0²). Terms of order 1/(n n_k) are left out; they are of higher
        order if n_k grows with n.
        """
        variance, limit = self.gamma**2, self.limit()
        h = reciprocal(width)
        x = h * reciprocal(self.tau0) ** 2
        projected = float(self.output_projection)
        repeat = variance**2 * x * (1 + projected / self.heads)
        return FiniteWidth(
            limit=limit,
            drift_along=x * 0,
            attention_drift_next=limit.attention_drift * x,
            drift_curvature=x * 0,
            variance=weights(
                attention_growth=variance * x * (1 + projected * variance),
                attention_growth_next=variance * x**2 * (1 + projected * variance),
                attention_next=limit.attention_noise * x,
                linear_repeat=projected * variance**2 * h,
                attention_repeat_rest=repeat,
            ),
            variance_mixing=weights(attention_repeat=repeat),
        )

    def _untrained(self) -> "ShapedAttention":
        """The layer, checked to have gains 1: concrete gains at once, traced ones at run time."""
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


def _times(gain: Float[Any, ""] | None, A: Any) -> Any:
    return A if gain is None else gain * A


def _softmax(Y: Float[Any, "m m ..."]) -> Float[Any, "m m ..."]:
    """Softmax of each row."""
    if not isinstance(Y, np.ndarray):
        # Without the barrier XLA recomputes Y at each use with different rounding; huge logits would then give 0/0.
        Y = jax.lax.optimization_barrier(Y)
    xp = Y.__array_namespace__()
    largest = functools.reduce(xp.maximum, [Y[:, k] for k in range(Y.shape[1])])
    weights = xp.exp(Y - largest[:, None])
    return weights / total(weights, axis=1)[:, None]
