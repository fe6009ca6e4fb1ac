"""Corrections of first order in 1/n to the limit: functions of V only.

One layer has two drift terms besides B₁ and B₂ of the limit, and six further variance terms in the coordinates Q of
`covariance.Spectrum`. Each is a function here, of cost O(m³) to O(m⁴); `FiniteWidth` holds their coefficients. All
functions take stacks of V along leading axes. NumPy handles NumPy arrays, as the data of a fit are; JAX handles JAX
arrays, with derivatives in V.

Notation: V = QQᵀ, R = Q⁻¹, C = HVH with H = I − 11ᵀ/m, P = HQ so that C = PPᵀ and PᵀP = diag(δ), v = diag V and
c = diag C. Variances are those of Z_ij = (R dV Rᵀ)_ij, divided by their multiplicity 1 + [i = j].
"""

import math
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from sdeinfer.covariance._diffusion import Spectrum
from sdeinfer.covariance._factors import inverse_lower
from sdeinfer.covariance._matrix import safe_sqrt
from sdeinfer.layers._absolute_moments import excess_products
from sdeinfer.terms._relu import relu_alignment


class Frame(NamedTuple):
    """Covariances V in their spectral coordinates: Q, R = Q⁻¹ and δ."""

    V: Float[Any, "... m m"]
    Q: Float[Any, "... m m"]
    R: Float[Any, "... m m"]
    delta: Float[Any, "... m"]


def frame(V: Float[Any, "... m m"], coordinates: Spectrum) -> Frame:
    """Q, Q⁻¹ and δ of V from its spectrum."""
    cholesky, rotation = coordinates.cholesky, coordinates.rotation
    return Frame(V, cholesky @ rotation, rotation.mT @ inverse_lower(cholesky), coordinates.delta)


def attention_drift_next(V: Float[Any, "... m m"]) -> Float[Any, "... m m"]:
    """B₁′ with E[AVAᵀ] = V + B₁/(nτ0²) + B₁′/(nτ0²)² + O(n⁻³), from the softmax to fourth order in its logits."""
    xp, tokens = V.__array_namespace__(), V.shape[-1]
    rows = V - V.mean(axis=-2, keepdims=True)
    C = rows - rows.mean(axis=-1, keepdims=True)
    v, c = diagonals(V), diagonals(C)
    trace, square = c.sum(axis=-1, keepdims=True), C * C
    row = square.sum(axis=-1)
    Cc, sizes = xp.matvec(C, c), row.sum(axis=-1, keepdims=True)
    # Expectation of the fourth-order term of the softmax, v_α² s_ν/m.
    s = (
        c**2 / 8
        - (c * trace + 2 * row) / (4 * tokens)
        - Cc / (2 * tokens)
        + (trace**2 + 2 * sizes) / (4 * tokens**2)
        - (c**2).sum(axis=-1, keepdims=True) / (8 * tokens)
    )
    outer = outer_product(v**2, xp.matvec(V, s)) / tokens
    # Products of the orders 2 · 2 and 1 · 3 in P V Pᵀ, with P = softmax − 1/m.
    cCc, cubes, traces = xp.vecdot(c, Cc), (square * C).sum(axis=(-2, -1)), ((C @ C) * C).sum(axis=(-2, -1))
    second = outer_product(v, v) * cCc[..., None, None] + 2 * V**2 * cubes[..., None, None]
    third = (xp.vecdot(row, c) - (sizes[..., 0] * trace[..., 0] + 2 * traces) / tokens) / (2 * tokens**2)
    third = V * (v[..., :, None] + v[..., None, :]) * third[..., None, None]
    return outer + outer.mT + second / (4 * tokens**2) + third


def attention_noise_next(basis: Frame) -> Float[Any, "... m m"]:
    """G with n var S_ij = 𝒜_ij/τ0² + G_ij/(nτ0⁴) + O(n⁻²) for S = AVAᵀ of one head.

    With RAQ = I + N, S is (I + N)(I + N)ᵀ in these coordinates. Let ε = 1/(τ0√n), N = εN₁ + ε²N₂ + ε³N₃ and
    T₁ = N₁ + N₁ᵀ, T₂ = N₂ + N₂ᵀ + N₁N₁ᵀ, T₃ = N₃ + N₃ᵀ + N₁N₂ᵀ + N₂N₁ᵀ; then G = var T₂ + 2 cov(T₁, T₃). The logits are
    Y = QΩQᵀ with Ω iid normal, so N₁ = Ω diag(δ)/m. Stein's lemma gives cov(T₁, T₃), Isserlis' theorem var T₂.
    """
    V, Q, R, delta = basis
    xp, tokens = V.__array_namespace__(), V.shape[-1]
    P = Q - Q.mean(axis=-2, keepdims=True)
    v, c = diagonals(V), (P * P).sum(axis=-1)
    trace = delta.sum(axis=-1, keepdims=True)
    equal, across = np.eye(tokens, dtype=V.dtype), delta[..., None, :]

    E = (R * v[..., None, :]) @ Q
    Gamma = P.mT @ (c[..., None] * P) - equal * (delta * (trace + 2 * delta) / tokens)[..., None, :]
    XA = (R * Q.mT) @ Q  # Σ_α R_iα Q_αi Q_αj
    XB = R @ (Q * Q)  # Σ_α R_iα Q_αj²
    # Pᵀ diag(C), Pᵀ diag(C²), Pᵀ diag(C³)
    y1, y2, y3 = (xp.matvec(P.mT, xp.matvec(P * P, delta**power))[..., None, :] for power in (0, 1, 2))

    # D_ij = E ∂T₃_ij/∂Ω_ij; the transpose has the derivatives in Ω_ji.
    D = (
        (outer_product(diagonals(E), diagonals(Gamma)) + E.mT * Gamma.mT) / (2 * tokens)
        + xp.matvec(R, v)[..., None, :] * y1 * across * (1 + equal) / (2 * tokens**2)
        + (XB.mT + XA) * y2 / tokens**2
    )
    first_third = (D * across + (D * across).mT) / tokens

    Phi = R @ (V * V) @ R.mT
    Psi = P.mT @ ((P @ P.mT) ** 2 @ P)
    mixed = outer_product(diagonals(Phi), diagonals(Psi))
    cross = XA * y3
    second = (
        (mixed + mixed.mT + 2 * Phi * Psi) / (2 * tokens**2)
        + (1 + equal) * (delta**4).sum(axis=-1)[..., None, None] / tokens**4
        + 2 * (cross + cross.mT) / tokens**3
    )
    return (second + 2 * first_third) / (1 + equal)


class Angles(NamedTuple):
    """√V_αα, the correlations ρ of tokens, √(1 − ρ²) and arcsin ρ, for expectations of |h| with h ~ N(0, V)."""

    norm: Float[Any, "... m"]
    rho: Float[Any, "... m m"]
    sine: Float[Any, "... m m"]
    turn: Float[Any, "... m m"]

    @property
    def ratio(self) -> Float[Any, "... m m"]:
        """√(V_ββ/V_αα)."""
        return self.norm[..., None, :] / self.norm[..., :, None]


def angles(V: Float[Any, "... m m"]) -> Angles:
    """The angles of V's tokens; ρ is 1 on the diagonal."""
    xp, equal = V.__array_namespace__(), np.eye(V.shape[-1], dtype=V.dtype) == 1
    norm = xp.sqrt(diagonals(V))
    # The diagonal is masked: arcsin has no derivative at 1.
    rho = xp.where(equal, 0.0, xp.clip(V / outer_product(norm, norm), -1.0, 1.0))
    sine, turn = xp.where(equal, 0.0, safe_sqrt((1 - rho) * (1 + rho))), xp.where(equal, math.pi / 2, xp.arcsin(rho))
    return Angles(norm, xp.where(equal, 1.0, rho), sine, turn)


def relu_drift_along(V: Float[Any, "... m m"], S: Float[Any, "... m m"]) -> Float[Any, "... m m"]:
    """DB₂(V)[S], the derivative of B₂ along symmetric matrices S.

    Without an attention pattern no second-order term is needed: Σ_lin : ∇²B₂ = 𝒜 : ∇²B₂ = 0, so the noise of the
    preceding layer does not change the mean drift of a ReLU to this order. See `relu_drift_curvature` for others.
    """
    between = angles(V)
    along = diagonals(S)[..., :, None] * between.sine * between.ratio / 2
    return (along + along.mT - (math.pi / 2 - between.turn) * S) / (2 * math.pi)


class ReluNoise(NamedTuple):
    """Contributions of the kink of a shaped ReLU to variances; each is a matrix over (i, j).

    With h ~ N(0, V), g = Rh and u = R|h|, in powers of q = c (c₊ − c₋)²/(4n):

    Attributes:
        hidden: F with rn var S_ij/(1 + [i = j]) = 1 + qF + q²F₂ for the hidden covariance S of a feed-forward
            layer.
        hidden_square: F₂.
        tokens: F of the MLP; given V, only the directions of its tokens are random, and the variance is qF.
        response: D_ij = ∂(R B₂ Rᵀ)_ij/∂Z_ij, the response of the ReLU to the noise of the preceding layer.
    """

    hidden: Float[Any, "... m m"]
    hidden_square: Float[Any, "... m m"]
    tokens: Float[Any, "... m m"]
    response: Float[Any, "... m m"]


def relu_noise(basis: Frame, drift: Float[Any, "... m m"]) -> ReluNoise:
    """F from E[g_i² u_j²] and E[g_i g_j u_i u_j], by Stein's lemma in g; F₂ from E[u_i² u_j²].

    D needs no further expectation: since B₂ = E[|h||h|ᵀ − hhᵀ]/4, Stein's lemma gives
    4 (1 + [i = j]) (D_ij + ¼) = E[g_i g_j u_i u_j] − [i = j] E[u_i²].
    """
    V, Q, R, _ = basis
    between, equal = angles(V), np.eye(V.shape[-1], dtype=V.dtype)
    norm, rho, sine, turn = between
    signs = (2 / math.pi) * turn
    kinks = (2 / math.pi) * sine * between.ratio
    absolute = outer_product(norm, norm) * (2 / math.pi) * relu_alignment(rho) + V  # E|h||h|ᵀ
    U = R @ absolute @ R.mT

    RQ = R[..., :, None, :] * Q.mT[..., None, :, :]  # R_ic Q_cj over (i, j, c)
    signed = (RQ.reshape(*V.shape[:-2], -1, V.shape[-1]) @ signs).reshape(RQ.shape)
    straight, kinked = R * Q.mT, kinks @ R.mT
    # E[g_i² u_j²] = U_jj + 2 Σ_cd R_jc Q_ci (signs_cd R_jd Q_di + kinks_cd Q_ci R_jd).
    squares = ((signed * RQ).sum(axis=-1) + (R * kinked.mT) @ (Q * Q)).mT
    squares = diagonals(U)[..., None, :] + 2 * squares
    # E[g_i g_j u_i u_j] − [i = j] E[u_i²].
    turned = straight @ (Q * kinked)
    products = straight @ signs @ straight.mT + (signed * RQ.swapaxes(-3, -2)).sum(axis=-1) + turned + turned.mT
    response = products / (4 * (1 + equal)) - 1 / 4
    products = products + equal * U
    tokens = squares + squares.mT + 2 * products
    mixed = tokens + 2 * products
    hidden = mixed - 2 * (1 + 2 * equal) - 8 * equal * drift
    closed = (absolute_squares(R, between, U) - 2 * products + 1 + 2 * equal) / (1 + equal)
    square = (1 + equal) * excess_products(Q, R, closed)
    square = square - squares - squares.mT - 2 * products - 16 * drift**2
    return ReluNoise(hidden / (1 + equal), square / (1 + equal), tokens / (1 + equal), response)


def absolute_squares(R: Float[Any, "... m m"], between: Angles, U: Float[Any, "... m m"]) -> Float[Any, "... m m"]:
    """E[u_i² u_j²] of u = R|h|, from E|h_a h_b h_c h_d|; exact for up to three tokens, see `_absolute_moments`.

    The sum starts from Isserlis' theorem for all indices and adds the exact corrections for each pattern of equal
    indices.
    """
    mean = math.sqrt(2 / math.pi) * R.__array_namespace__().matvec(R, between.norm)
    normal = outer_product(diagonals(U), diagonals(U)) + 2 * U**2 - 2 * outer_product(mean**2, mean**2)
    four, three, two, one = excess_of_equal(between)
    squares, one = R * R, R[..., None, :, :] @ one @ R.mT[..., None, :, :]  # the second over (a, i, j)
    both = R.mT[..., :, :, None] * R.mT[..., :, None, :]  # R_ia R_ja over (a, i, j)
    of_one, of_three = squares @ diagonals(one), squares @ (R.mT * (three @ R.mT))
    of_two = (both * (two @ both.reshape(*two.shape[:-1], -1)).reshape(both.shape)).sum(axis=-3)
    return (
        normal
        + of_one
        + of_one.mT
        + 4 * (both * one).sum(axis=-3)
        + squares @ two @ squares.mT
        + 2 * of_two
        + 2 * (of_three + of_three.mT)
        + squares @ (four[..., None] * squares.mT)
    )


class Excess(NamedTuple):
    """E|h_a h_b h_c h_d| less that of a normal with the mean and the covariance of |h|, where tokens are equal.

    Attributes:
        four: of (a, a, a, a).
        three: of (a, a, a, d) over (a, d); 0 for d = a, as are the next two where further tokens are equal.
        two: of (a, a, c, c) over (a, c).
        one: of (a, a, c, d) over (a, c, d).
    """

    four: Float[Any, "... m"]
    three: Float[Any, "... m m"]
    two: Float[Any, "... m m"]
    one: Float[Any, "... m m m"]


def excess_of_equal(between: Angles) -> Excess:
    """Excess of E[|h_a|² |h_c| |h_d|] over that of a normal, see `Excess`."""
    xp, token = between.norm.__array_namespace__(), np.arange(between.norm.shape[-1])
    norm, rho, sine, turn = between
    pair = (2 / math.pi) * (sine + rho * turn)
    along = rho[..., :, :, None] * rho[..., :, None, :]
    across = rho[..., :, :, None] ** 2 + rho[..., :, None, :] ** 2
    excess = (2 / math.pi) * (2 * along * turn[..., None, :, :] + across * sine[..., None, :, :] + 4 / math.pi)
    excess -= 2 * pair[..., :, :, None] * pair[..., :, None, :]
    excess *= norm[..., :, None, None] ** 2 * outer_product(norm, norm)[..., None, :, :]
    different = token[:, None] != token
    all_different = different[:, :, None] & different[:, None, :] & different
    return Excess(
        four=excess[..., token, token, token],
        three=xp.where(different, excess[..., token, token, :], 0.0),
        two=xp.where(different, xp.diagonal(excess, axis1=-2, axis2=-1), 0.0),
        one=xp.where(all_different, excess, 0.0),
    )


def diagonals(A: Float[Any, "... m m"]) -> Float[Any, "... m"]:
    """The diagonal of each matrix."""
    return A.__array_namespace__().diagonal(A, axis1=-2, axis2=-1)


def outer_product(x: Float[Any, "... m"], y: Float[Any, "... m"]) -> Float[Any, "... m m"]:
    """The matrix x yᵀ of each pair of vectors."""
    return x[..., :, None] * y[..., None, :]
