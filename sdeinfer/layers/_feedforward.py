"""Layers of the shaped ReLU σ_s(x) = s₊ max(x, 0) + s₋ min(x, 0), s± = 1 + c±/√n: the MLP and the residual layer.

Tests: `tests/layers/test_limits.py`.
"""

import functools
import math
from typing import Any, ClassVar

import jax.random as jr
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from sdeinfer._files import InputError
from sdeinfer.covariance._batched import gram, matmul
from sdeinfer.covariance._matrix import engine, reciprocal
from sdeinfer.layers._base import AbstractLayer, shortcut, size
from sdeinfer.layers._finite_width import FiniteWidth
from sdeinfer.layers._wishart import (
    Keys,
    column_sum,
    factor,
    residual_covariance,
    whole,
    wishart_draws,
    wishart_factor,
    with_gram,
    with_tangents,
)
from sdeinfer.parameters import C_MINUS, C_PLUS, GAMMA
from sdeinfer.terms._limit import Limit


def shaped_relu[T: (Array, np.ndarray)](
    x: T, c_plus: Float[Any, "..."], c_minus: Float[Any, "..."], width: ArrayLike
) -> T:
    """√c σ_s(x): the shaped ReLU of Eq. 4 with its He constant c, E[(√c σ_s(g))²] = 1 for g ~ N(0, 1).

    Arguments:
        x: pre-activations, any shape.
        c_plus: c₊ of the slope s₊ = 1 + c₊/√n for x > 0.
        c_minus: c₋ of the slope s₋ = 1 + c₋/√n for x < 0.
        width: n.
    """
    xp = x.__array_namespace__()
    root = xp.sqrt(xp.asarray(width, dtype=x.dtype))
    s_plus, s_minus = 1 + c_plus / root, 1 + c_minus / root
    scale = 1 / xp.sqrt(2 * (s_plus**2 + s_minus**2))
    # A sum takes half the time of a choice between two slopes, in NumPy.
    return scale * (s_plus + s_minus) * x + scale * (s_plus - s_minus) * xp.abs(x)


def relu_kink(c_plus: Float[Any, "..."], c_minus: Float[Any, "..."], width: ArrayLike) -> Float[Any, "..."]:
    """Squared weight q = δ²/(s̄² + δ²) of |x| in √c σ_s(x) = √(1 − q) x ± √q |x|.

    s̄ and δ are half the sum and half the difference of s₊ and s₋. At one width the law of a layer depends on c₊ and c₋
    only through q; 4nq = c (c₊ − c₋)² with the He constant c.
    """
    scale = 0.5 / engine(width).sqrt(width)
    half, mean = (c_plus - c_minus) * scale, 1 + (c_plus + c_minus) * scale
    return half**2 * reciprocal(mean**2 + half**2)


class ShapedMLP(AbstractLayer):
    """X′ = σ_s(X) √(c/n) W (Eq. 19); dV = b_ReLU dt + Σ_lin^{1/2} dB (Eq. 20).

    Attributes:
        c_plus: c₊ of the slope 1 + c₊/√n.
        c_minus: c₋ of the slope 1 + c₋/√n.
    """

    architecture: ClassVar[str | None] = "mlp"
    on_host: ClassVar[bool] = True
    has_tangents: ClassVar[bool] = True

    c_plus: Float[Any, ""] = C_PLUS.field()
    c_minus: Float[Any, ""] = C_MINUS.field()

    def forward(self, X: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m n"]:
        """Eq. 19."""
        width = X.shape[1]
        W = jr.normal(key, (width, width), X.dtype)
        return shaped_relu(X, self.c_plus, self.c_minus, width) @ W / math.sqrt(width)

    @property
    def skewness(self) -> float:
        """Skewness of the sample covariance of n units."""
        return 2.0

    def forward_covariance(
        self,
        V: Float[Any, "m m blocks networks"],
        *,
        width: Int[Any, ""] | int,
        keys: Keys,
        tangents: bool = False,
    ) -> Float[Any, "m m blocks networks"]:
        """V′ ~ Wishart(n, S/n), S = (c/n) σ_s(X) σ_s(X)ᵀ; given V = XXᵀ/n, X has uniformly random directions."""
        tokens, _, blocks, _ = V.shape
        xp, freedom = V.__array_namespace__(), width // blocks
        n = xp.asarray(width, dtype=V.dtype)
        sizes = {"tokens": tokens, "blocks": blocks, "dtype": V.dtype, "keys": keys}
        # The same columns are drawn twice: first for their Gram matrix, then for their images.
        K = with_gram(V, column_sum(None, lambda G: G, freedom, **sizes) / n)
        relu = functools.partial(shaped_relu, c_plus=self.c_plus, c_minus=self.c_minus, width=width)
        relu = functools.partial(with_tangents, relu) if tangents else relu
        F = factor(whole(column_sum(K, relu, freedom, **sizes)) / n)
        drawn = wishart_draws([freedom], **sizes)
        return gram(matmul(F, wishart_factor(freedom, drawn.normals[0], drawn.chi[0])) / xp.sqrt(n))

    def limit(self) -> Limit:
        """Eq. 20."""
        return Limit(relu_drift=(self.c_plus - self.c_minus) ** 2, linear_noise=0 * self.c_plus + 1)

    def finite_width(self, width: ArrayLike) -> FiniteWidth:
        """The exact mean of the layer, and its variance up to q²; both depend on c₊ and c₋ only through q."""
        q = relu_kink(self.c_plus, self.c_minus, width)
        return FiniteWidth.without_attention(
            4 * width * q, relu_growth=4 * q, relu_tokens=q, relu_growth_square=16 * q**2
        )


class ResidualFeedForward(AbstractLayer):
    """X′ = λX + γ σ_s(X W_pre/√n) √(c/(rn)) W_post (Eq. 4 for r = 1), and the SDE of Theorem 3.2.

    dV = γ² b_ReLU dt + (a Σ_lin)^{1/2} dB with a = γ²(2 − γ²(1 − 1/r)); r = 1 gives the theorem's 2γ².

    Attributes:
        gamma: strength γ of the residual branch, in (0, 1]; λ² + γ² = 1.
        c_plus: c₊ of the slope 1 + c₊/√n.
        c_minus: c₋ of the slope 1 + c₋/√n.
        expansion: r, the hidden width divided by n; r n must be a whole number.
    """

    architecture: ClassVar[str | None] = "feedforward"
    on_host: ClassVar[bool] = True
    has_tangents: ClassVar[bool] = True

    gamma: Float[Any, ""] = GAMMA.field()
    c_plus: Float[Any, ""] = C_PLUS.field()
    c_minus: Float[Any, ""] = C_MINUS.field()
    expansion: float = size(1)

    def __check_init__(self):
        check_expansion(self.expansion)

    def forward(self, X: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m n"]:
        """Eq. 4."""
        width = X.shape[1]
        units = hidden_units(self.expansion, width)
        key_pre, key_post = jr.split(key)
        W_pre = jr.normal(key_pre, (width, units), X.dtype)
        W_post = jr.normal(key_post, (units, width), X.dtype)
        hidden = shaped_relu(X @ W_pre / math.sqrt(width), self.c_plus, self.c_minus, width)
        return shortcut(self.gamma) * X + self.gamma * (hidden @ W_post / math.sqrt(units))

    @property
    def skewness(self) -> float:
        """Skewness, increased by the randomness of the r n hidden units."""
        return 3 / 2 * (1 + 1 / self.expansion)

    def check_width(self, width: int) -> None:
        """Raise an InputError unless the hidden width r n is a whole number."""
        hidden_units(self.expansion, width)

    def forward_covariance(
        self,
        V: Float[Any, "m m blocks networks"],
        *,
        width: Int[Any, ""] | int,
        keys: Keys,
        tangents: bool = False,
    ) -> Float[Any, "m m blocks networks"]:
        """Noncentral Wishart given S = (c/(rn)) σ_s(h) σ_s(h)ᵀ; the rn columns of h = X W_pre/√n are N(0, V)."""
        tokens, _, blocks, _ = V.shape
        xp = V.__array_namespace__()
        units = xp.round(self.expansion * xp.asarray(width)).astype(int)
        V_whole = whole(V)
        L = factor(V_whole)

        relu = functools.partial(shaped_relu, c_plus=self.c_plus, c_minus=self.c_minus, width=width)
        relu = functools.partial(with_tangents, relu) if tangents else relu
        S = column_sum(L, relu, units, tokens=tokens, blocks=1, dtype=V.dtype, keys=keys) / units.astype(V.dtype)
        freedom = width // blocks - tokens
        drawn = wishart_draws([freedom], tokens=tokens, blocks=blocks, normals=1, dtype=V.dtype, keys=keys)
        return residual_covariance(
            L if V_whole is V else factor(V),
            factor(S),
            shortcut=shortcut(self.gamma),
            gamma=self.gamma,
            width=width,
            near=drawn.normals[1],
            far=wishart_factor(freedom, drawn.normals[0], drawn.chi[0]),
        )

    def limit(self) -> Limit:
        """Theorem 3.2."""
        variance = self.gamma**2
        noise = variance * (2 - variance * (1 - 1 / self.expansion))
        return Limit(relu_drift=variance * (self.c_plus - self.c_minus) ** 2, linear_noise=noise)

    def finite_width(self, width: ArrayLike) -> FiniteWidth:
        """The exact mean of the layer, and its variance; both depend on c₊ and c₋ only through q.

        Products of q and 1/n are of higher order; the largest is kept, since q is as large as 1/√n for n of some tens.
        """
        variance, q = self.gamma**2, relu_kink(self.c_plus, self.c_minus, width)
        h, ratio = reciprocal(width), 1 / self.expansion
        return FiniteWidth.without_attention(
            4 * width * q * variance,
            linear_noise=self.limit().linear_noise,
            linear_repeat=variance**2 * (ratio * h),
            relu_growth=4 * q * variance,
            relu_hidden=q * variance**2 * ratio * (1 + 2 * h),
            relu_growth_square=16 * (q * variance) ** 2,
            relu_hidden_square=(q * variance) ** 2 * ratio,
        )


def check_expansion(expansion: float) -> None:
    """Raise an InputError unless the ratio of widths is positive and finite."""
    if not 0 < expansion < math.inf:
        raise InputError(f"expansion: must be positive and finite, got {expansion}")


def hidden_units(expansion: float, width: int) -> int:
    """The hidden width r n."""
    units = round(expansion * width)
    if units < 1 or not math.isclose(units, expansion * width, rel_tol=1e-12):
        raise InputError(f"expansion: times the width {width} must be a whole number, got {expansion}")
    return units
