"""Corrections of first order in 1/n for attention of any pattern, the counterpart of `_next_order`: functions of V.

Token α attends to the m_α tokens of S_α and is centred over them by H_α. In a general pattern the noise of one layer is
independent in coordinates z_q = ⟨W_q, dV⟩, q = 1..p, with dV = Σ_q z_q U_q. The symmetric matrices W_q depend on V and
are scaled such that Σ_lin contributes 1 to var z_q, that is 2 tr(W_q V W_q V) = 1. Every variance below is a quadratic
form in W_q, in which q enters only by products with the same matrices for all q.

With ε = 1/(τ0 √n), the logits εY = ε XGXᵀ are normal, and centred in each row, ỹ_α = H_α Y_α, they have covariances

    Cov(ỹ_αν, ỹ_βκ) = K^{αβ}_νκ = V_αβ C^{αβ}_νκ,    C^{αβ} = H_α V H_β.

The softmax is A = I + εP₁ + ε²P₂ + …; with the means μ_k of ỹ^k over S_α, row by row,

    m_α P₁ = ỹ,   m_α P₂ = (ỹ² − μ₂)/2,   m_α P₃ = (ỹ³ − μ₃)/6 − ỹμ₂/2,
    m_α P₄ = (ỹ⁴ − μ₄)/24 − ỹμ₃/6 − ỹ²μ₂/4 + μ₂²/4,

and AVAᵀ = V + εT₁ + ε²T₂ + … with T₁ = P₁V + VP₁ᵀ, T₂ = P₂V + VP₂ᵀ + P₁VP₁ᵀ and so on. Each row of every P_k sums to
zero, so that V between two of them may be replaced by C^{αβ}. Means and variances are those of products of normals.

All functions take stacks of V along leading axes. NumPy handles NumPy arrays; JAX handles JAX arrays, with derivatives
in V.
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from sdeinfer.covariance import Pattern
from sdeinfer.covariance._matrix import safe_sqrt
from sdeinfer.layers._absolute_moments import excess_forms
from sdeinfer.layers._next_order import (
    Angles,
    ReluNoise,
    angles,
    diagonals,
    excess_of_equal,
    outer_product,
    relu_drift_along,
)


class LogitTerms(NamedTuple):
    """H_α, 1/m_α, C^{αβ}_νκ and K^{αβ}_νκ over (α, ν, β, κ), and K^{αα}_νν less its mean over the ν in S_α."""

    H: Float[Any, "m m m"]
    scale: Float[Any, " m"]
    C: Float[Any, "... m m m m"]
    K: Float[Any, "... m m m m"]
    spread: Float[Any, "... m m"]


def logits(V: Float[Any, "... m m"], pattern: Pattern) -> LogitTerms:
    """The covariances of the centred logits of V."""
    tokens = V.shape[-1]
    H, scale = (constant.astype(V.dtype) for constant in _projections(pattern, tokens))
    stacked, token = H.reshape(-1, tokens), np.arange(tokens)
    C = (stacked @ V @ stacked.T).reshape(*V.shape[:-2], *(tokens,) * 4)
    K = C * V[..., :, None, :, None]
    return LogitTerms(H, scale, C, K, _centre(H, K[..., token[:, None], token, token[:, None], token]))


def pattern_drift_next(V: Float[Any, "... m m"], pattern: Pattern) -> Float[Any, "... m m"]:
    """B₁′ with E[AVAᵀ] = V + B₁/(nτ0²) + B₁′/(nτ0²)² + O(n⁻³), the mean of T₄."""
    xp = V.__array_namespace__()
    H, scale, C, K, spread = logits(V, pattern)
    sizes = outer_product(scale, scale)
    # E P₄, from the covariances of one row; centring adds the terms that all tokens of a row share.
    row = xp.moveaxis(xp.diagonal(K, axis1=-4, axis2=-2), -1, -3)  # K^{αα} over (α, ν, κ)
    k = diagonals(row)
    means = xp.matvec(row, k) / 2 + k * k.sum(axis=-1, keepdims=True) / 4 + (row * row).sum(axis=-1) / 2
    fourth = scale[:, None] * _centre(H, k**2 / 8 - means * scale[:, None]) @ V
    # E P₂VP₂ᵀ
    g = spread * scale[:, None]
    second = g @ V @ g.mT / 4 + (K * K * C).sum(axis=(-3, -1)) * sizes / 2
    # E P₁VP₃ᵀ; tr(C^{αβ} K^{ββ} C^{βα}) is that of V H_α V with K^{ββ}.
    centred = H @ V[..., None, :, :]
    squares = (centred.mT @ centred).reshape(*V.shape[:-1], -1)
    traces = squares @ row.reshape(squares.shape).mT
    spreads = ((C * K).sum(axis=-3) * spread[..., None, :, :]).sum(axis=-1)
    third = sizes * (spreads / 2 - V * traces * scale)
    return fourth + fourth.mT + second + third + third.mT


def attention_noise_tensor(V: Float[Any, "... m m"], pattern: Pattern) -> Float[Any, "... m m m m"]:
    """𝒜(αβ, δω) over (α, β, δ, ω): the covariance of M + Mᵀ with M = P₁V."""
    xp, centred = V.__array_namespace__(), logits(V, pattern)
    rows = _around(centred.K.swapaxes(-3, -2), V) * outer_product(centred.scale, centred.scale)[..., None, None]
    # Cov(M_αω, M_βκ) over (α, β, κ, ω), then Cov(M_αβ, M_δω + M_ωδ).
    first = xp.moveaxis(rows, -1, -3)
    half = first + first.swapaxes(-2, -1)
    return half + half.swapaxes(-4, -3)


def relu_drift_curvature(V: Float[Any, "... m m"], noise: Float[Any, "... m m m m"]) -> Float[Any, "... m m"]:
    """½ 𝒜(V) : ∇²B₂(V), the change of the mean drift B₂ of a ReLU by noise of its input of covariance 𝒜.

    It is zero for Σ_lin, and for 𝒜 if every token attends to all tokens, but not in general.
    """
    xp, token, equal = V.__array_namespace__(), np.arange(V.shape[-1]), np.eye(V.shape[-1], dtype=V.dtype) == 1
    # B₂,αβ depends on x = V_αα, y = V_αβ and z = V_ββ; with s² = xz − y² it has the second derivatives, times 2π,
    # xx: (y² − s²)/(4sx²), xy: −y/(2sx), xz: 1/(4s), yy: 1/s, and those with z for x.
    v = diagonals(V)
    xz, ends = outer_product(v, v), noise[..., token[:, None], token[:, None], token, token]
    one = (diagonals(ends) / v**2)[..., :, None]
    two = noise[..., token[:, None], token[:, None], token[:, None], token] / v[..., :, None]
    middle = noise[..., token[:, None], token, token[:, None], token]
    change = (2 * V**2 - xz) / 4 * (one + one.mT) - V * (two + two.mT) + middle + ends / 2
    s = safe_sqrt(xp.where(equal, 0.0, xz - V**2))
    singular = s == 0
    return xp.where(singular, 0.0, change / (4 * math.pi * xp.where(singular, 1.0, s)))


def pattern_features(
    V: Float[Any, "... m m"],
    pattern: Pattern,
    W: Float[Any, "... p m m"],
    U: Float[Any, "... p m m"],
    attention: Float[Any, "... m m"],
    relu: Float[Any, "... m m"],
    attention_next: Float[Any, "... m m"],
) -> Float[Any, "11 ... p"]:
    """The features of `VARIANCE_FEATURES` of var z_q, of which the last is 𝒜(αδ, βω) + 𝒜(αω, βδ) itself."""
    xp, WV, WB = V.__array_namespace__(), _times(W, V), _times(W, relu)
    growth, growth_next = (4 * _inner(_times(W, drift), WV.mT) for drift in (attention, attention_next))
    relu_growth, relu_square = 4 * _inner(WB, WV.mT), 2 * _inner(WB, WB.mT)
    noise_next, attention_repeat = pattern_attention_noise(V, pattern, W, WV)
    size, noise = _inner(W, V[..., None, :, :]), pattern_relu_noise(V, W, WV, U, relu, relu_growth, relu_square)
    return xp.stack(
        [
            growth,
            relu_growth,
            growth_next,
            noise_next,
            noise.hidden,
            noise.tokens,
            noise.response,
            relu_square,
            noise.hidden_square,
            2 * size**2 + 1,
            attention_repeat,
        ]
    )


def pattern_attention_noise(
    V: Float[Any, "... m m"], pattern: Pattern, W: Float[Any, "... p m m"], WV: Float[Any, "... p m m"]
) -> tuple[Float[Any, "... p"], Float[Any, "... p"]]:
    """G with n var ⟨W, S⟩ = e/τ0² + G/(nτ0⁴) + O(n⁻²) for S = AVAᵀ, and 𝒜(αδ, βω) + 𝒜(αω, βδ) along W.

    With t_k = ⟨W, T_k⟩, G = var t₂ + 2 cov(t₁, t₃). Let b_α = 2 H_α (WV)_α/m_α and Ŵ_αβ = W_αβ/(m_α m_β). Then
    t₁ = Σ b_αν ỹ_αν, and t₂ = ½ Σ b_αν ỹ_αν² + Σ Ŵ_αβ ỹ_αᵀVỹ_β. By Stein's lemma, cov(t₁, t₃) is the mean derivative of
    t₃ along D_βκ = Cov(t₁, ỹ_βκ).
    """
    H, scale, C, K, spread = logits(V, pattern)
    Y, weight = WV * scale[:, None], W * outer_product(scale, scale)
    b = 2 * _centre(H, Y)
    # cov(t₁, t₃): the derivatives of 2⟨W, P₃V⟩, and of 2⟨W, P₁VP₂ᵀ⟩ by P₂ and by P₁.
    D = _centre(H, V[..., None, :, :] @ _times(b, V))
    third = _inner(b, spread[..., None, :, :] * D / 2 - (diagonals(V) * scale)[..., None, :, None] * _times(D, V))
    overlap = (C * K).sum(axis=-3).swapaxes(-3, -2)  # V_αβ (C^{βα}C^{αβ})_κκ over (β, α, κ)
    along = 2 * (weight.swapaxes(-3, -2) @ overlap).swapaxes(-3, -2) + _times(weight, spread @ V)
    # var t₂: of each of its two parts, and their covariance.
    shared = _times(K, V) @ K.mT  # Σ_ij K^{αδ}_νi V_ij K^{αω}_νj over (α, ν, δ, ω)
    by_pair = K.swapaxes(-3, -2)
    around = _around(by_pair, V)
    cycles = (_matrix(around) @ _matrix(by_pair).mT).reshape(K.shape)  # tr(V K^{αβ} V K^{δω}) over (α, β, δ, ω)
    variance = (
        _quadratic(b, _matrix(K * K), b) / 2
        + 2 * _quadratic(b, _matrix(shared), weight)
        + 2 * _quadratic(weight, _matrix(cycles.swapaxes(-3, -1)), weight)
    )
    repeat = _quadratic(weight, _matrix(around), W) + _quadratic(Y, _matrix(K.swapaxes(-3, -1)), Y)
    return variance + 2 * (third + _inner(along, D)), 4 * repeat


def pattern_relu_noise(
    V: Float[Any, "... m m"],
    W: Float[Any, "... p m m"],
    WV: Float[Any, "... p m m"],
    U: Float[Any, "... p m m"],
    relu: Float[Any, "... m m"],
    growth: Float[Any, "... p"],
    square: Float[Any, "... p"],
) -> ReluNoise:
    """Contributions of the kink of a shaped ReLU to var z_q.

    F and F₂ are of products of h and |h| for h ~ N(0, V), of which two or four are absolute values.
    With A = E|h||h|ᵀ, E[h_a h_b |h_c||h_d|] = V_ab A_cd + (V_ac V_bd + V_ad V_bc) signs_cd + V_ac V_bc kinks_cd
    + V_ad V_bd kinks_dc.
    """
    xp, between = V.__array_namespace__(), angles(V)
    signs, kinks = (2 / math.pi) * between.turn, (2 / math.pi) * between.sine * between.ratio
    size, drift = _inner(W, V[..., None, :, :]), _inner(W, relu[..., None, :, :])
    both = size * (size + 4 * drift)
    # The two absolute values are of one token of each W, or of both tokens of one W.
    u, VW = diagonals(WV), WV.mT
    crossed = WV * signs[..., None, :, :] + 2 * u[..., :, None] * kinks[..., None, :, :]
    mixed = 1 / 2 + growth + xp.vecdot(u @ signs, u) + _inner(VW, crossed)
    VWV = _times(VW, V)
    same = VWV * signs[..., None, :, :] + diagonals(VWV)[..., :, None] * kinks[..., None, :, :]
    pairs = 2 * (both + 2 * _inner(W, same)) + 4 * mixed
    normal = size**2 + 1
    hidden = pairs - 2 * normal - 8 * size * drift
    mean = (2 / math.pi) * outer_product(between.norm, between.norm)
    absolute = (size + 4 * drift) ** 2 + 1 + 4 * growth + 16 * square - 2 * _inner(W, mean[..., None, :, :]) ** 2
    closed = absolute + excess_of_repeated(between, W) - 2 * (both + 2 * _inner(W, same)) + normal
    square = excess_forms(V, W, closed) - 4 * mixed - 16 * drift**2
    return ReluNoise(hidden, square, 4 * mixed, _inner(W, relu_drift_along(V[..., None, :, :], U)))


def excess_of_repeated(between: Angles, W: Float[Any, "... p m m"]) -> Float[Any, "... p"]:
    """Excess of Σ W_ab W_cd E|h_a h_b h_c h_d| over that of a normal with the mean and the covariance of |h|.

    That is known where two of the four tokens are equal, and is left out for four others, see `_absolute_moments`.
    """
    (four, three, two, one), w, rows = excess_of_equal(between), diagonals(W), W.swapaxes(-3, -2)
    paired = (w @ one.reshape(*two.shape[:-1], -1)).reshape(W.shape) + 2 * (rows @ one).swapaxes(-3, -2)
    repeated = 2 * W * two[..., None, :, :] + 4 * w[..., :, None] * three[..., None, :, :]
    return _inner(W, 2 * paired + repeated) + W.__array_namespace__().vecdot(w @ two + w * four[..., None, :], w)


@functools.lru_cache(maxsize=64)
def _projections(pattern: Pattern, tokens: int) -> tuple[Float[np.ndarray, "m m m"], Float[np.ndarray, " m"]]:
    """H_α over (α, ν, κ), and 1/m_α."""
    mask = pattern.mask(tokens).astype(float)
    scale = 1 / mask.sum(axis=1)
    return mask[:, :, None] * np.eye(tokens) - outer_product(mask, mask) * scale[:, None, None], scale


def _centre(H: Float[Any, "m m m"], X: Float[Any, "... m m"]) -> Float[Any, "... m m"]:
    """Row α centred over S_α; 0 outside S_α."""
    return X.__array_namespace__().matvec(H, X)


def _times(X: Float[Any, "... m"], A: Float[Any, "... m m"]) -> Float[Any, "... m"]:
    """The product of every matrix of X with the one matrix A of their V, as one product."""
    return (X.reshape(*A.shape[:-2], -1, A.shape[-1]) @ A).reshape(X.shape)


def _around(K: Float[Any, "... m m m m"], V: Float[Any, "... m m"]) -> Float[Any, "... m m m m"]:
    """(V K V)ᵀ of all matrices K."""
    return _times(_times(K, V).mT, V)


def _matrix(A: Float[Any, "... m m m m"]) -> Float[Any, "... m*m m*m"]:
    """The matrix whose rows are the first two indices and whose columns are the last two."""
    return A.reshape(*A.shape[:-4], A.shape[-1] ** 2, -1)


def _inner(X: Float[Any, "... p m m"], Y: Float[Any, "... #p m m"]) -> Float[Any, "... p"]:
    """⟨X, Y⟩ of each pair of matrices."""
    x, y = (Z.reshape(*Z.shape[:-2], -1) for Z in (X, Y))
    return X.__array_namespace__().vecdot(x, y)


def _quadratic(
    X: Float[Any, "... p m m"], A: Float[Any, "... m*m m*m"], Y: Float[Any, "... p m m"]
) -> Float[Any, "... p"]:
    """Σ X_ab A_abcd Y_cd of each pair of matrices."""
    x, y = (Z.reshape(*Z.shape[:-2], -1) for Z in (X, Y))
    return X.__array_namespace__().vecdot(x @ A, y)
