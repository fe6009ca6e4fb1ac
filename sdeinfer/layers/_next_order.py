"""What a layer of width n adds to its limit, to first order in 1/n: functions of V alone.

Beside the limit's B₁ and B₂ the drift of one layer has two more terms, and the variances in the coordinates Q of
`covariance.Spectrum` six. Each is one function here, in O(m³) to O(m⁴); `FiniteWidth` says with which coefficients an
architecture puts them together.

Notation: V = QQᵀ, R = Q⁻¹, C = HVH with H = I − 11ᵀ/m, P = HQ so that C = PPᵀ and PᵀP = diag(δ), v = diag V and
c = diag C. Variances are those of Z_ij = (R dV Rᵀ)_ij, divided by their multiplicity 1 + [i = j].
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float

from sdeinfer.covariance import Spectrum, centre, safe_sqrt
from sdeinfer.layers._relu import relu_alignment


class Frame(NamedTuple):
    """A covariance in its spectral coordinates.

    Attributes:
        V: the covariance.
        Q: its factor, V = QQᵀ, in the basis in which the noise is diagonal.
        R: Q⁻¹.
        delta: δ.
    """

    V: Float[Array, "m m"]
    Q: Float[Array, "m m"]
    R: Float[Array, "m m"]
    delta: Float[Array, " m"]


def frame(V: Float[Array, "m m"], coordinates: Spectrum) -> Frame:
    """Both factors of V, from its spectrum."""
    Q = coordinates.cholesky @ coordinates.rotation
    R = solve_triangular(coordinates.cholesky, jnp.eye(len(V), dtype=V.dtype), lower=True)
    return Frame(V, Q, coordinates.rotation.T @ R, coordinates.delta)


def attention_drift_next(V: Float[Array, "m m"]) -> Float[Array, "m m"]:
    """B₁′, with E[AVAᵀ] = V + B₁/(nτ0²) + B₁′/(nτ0²)² + O(n⁻³): the softmax expanded to fourth order in its logits."""
    tokens = V.shape[0]
    C = centre(V)
    v, c = jnp.diagonal(V), jnp.diagonal(C)
    trace, square = jnp.sum(c), C * C
    row = jnp.sum(square, axis=1)
    # E of the fourth order of the softmax itself, v_α² s_ν/m.
    s = (
        c**2 / 8
        - (c * trace + 2 * row) / (4 * tokens)
        - C @ c / (2 * tokens)
        + (trace**2 + 2 * jnp.sum(row)) / (4 * tokens**2)
        - jnp.sum(c**2) / (8 * tokens)
    )
    outer = jnp.outer(v**2, V @ s) / tokens
    # Second order times second order, and first times third, of P V Pᵀ with P = softmax − 1/m.
    second = (jnp.outer(v, v) * (c @ C @ c) + 2 * V**2 * jnp.sum(square * C)) / (4 * tokens**2)
    third = (row @ c - (jnp.sum(row) * trace + 2 * jnp.sum((C @ C) * C)) / tokens) / (2 * tokens**2)
    return outer + outer.T + second + V * (v[:, None] + v[None, :]) * third


def attention_noise_next(at: Frame) -> Float[Array, "m m"]:
    """G, with n var S_ij = 𝒜_ij/τ0² + G_ij/(nτ0⁴) + O(n⁻²) for S = AVAᵀ of one head.

    With RAQ = I + N, S is (I + N)(I + N)ᵀ in these coordinates. Let ε = 1/(τ0√n), N = εN₁ + ε²N₂ + ε³N₃ and
    T₁ = N₁ + N₁ᵀ, T₂ = N₂ + N₂ᵀ + N₁N₁ᵀ, T₃ = N₃ + N₃ᵀ + N₁N₂ᵀ + N₂N₁ᵀ; then G = var T₂ + 2 cov(T₁, T₃). The logits are
    those of Y = QGQᵀ, G iid normal, so that N₁ = G diag(δ)/m: cov(T₁, T₃) follows by Stein's lemma and var T₂ by
    Isserlis' theorem.
    """
    V, Q, R, delta = at
    tokens = V.shape[0]
    P = Q - jnp.mean(Q, axis=0)
    v, c = jnp.diagonal(V), jnp.sum(P * P, axis=1)
    trace = jnp.sum(delta)

    E = (R * v) @ Q
    Gamma = P.T @ (c[:, None] * P) - jnp.diag(delta * (trace + 2 * delta) / tokens)
    XA = (R * Q.T) @ Q  # Σ_α R_iα Q_αi Q_αj
    XB = R @ (Q * Q)  # Σ_α R_iα Q_αj²
    y1, y2, y3 = (P.T @ ((P * P) @ delta**power) for power in (0, 1, 2))  # Pᵀ diag(C), Pᵀ diag(C²), Pᵀ diag(C³)
    equal = jnp.eye(tokens, dtype=V.dtype)

    # D_ij = E ∂T₃_ij/∂G_ij; that in G_ji is its transpose.
    D = (
        (jnp.diagonal(E)[:, None] * jnp.diagonal(Gamma)[None, :] + E.T * Gamma.T) / (2 * tokens)
        + ((R @ v) * y1 * delta)[None, :] * (1 + equal) / (2 * tokens**2)
        + (XB.T + XA) * y2[None, :] / tokens**2
    )
    first_third = (D * delta[None, :] + (D * delta[None, :]).T) / tokens

    Phi = R @ (V * V) @ R.T
    Psi = P.T @ ((P @ P.T) ** 2 @ P)
    mixed = jnp.outer(jnp.diagonal(Phi), jnp.diagonal(Psi))
    cross = XA * y3[None, :]
    second = (
        (mixed + mixed.T + 2 * Phi * Psi) / (2 * tokens**2)
        + (1 + equal) * jnp.sum(delta**4) / tokens**4
        + 2 * (cross + cross.T) / tokens**3
    )
    return (second + 2 * first_third) / (1 + equal)


def relu_drift_along(V: Float[Array, "m m"], S: Float[Array, "*s m m"]) -> Float[Array, "*s m m"]:
    """DB₂(V)[S], the derivative of B₂ along symmetric matrices S.

    There is no second-order term to go with it: Σ_lin : ∇²B₂ = 𝒜 : ∇²B₂ = 0, so the noise of the layers before it does
    not change the mean drift of a ReLU to this order.
    """
    norm = jnp.sqrt(jnp.diagonal(V))
    rho = jnp.clip(V / jnp.outer(norm, norm), -1.0, 1.0)
    off_diagonal = 1 - jnp.eye(len(V), dtype=V.dtype)
    sine = safe_sqrt((1 - rho) * (1 + rho))
    scale = off_diagonal * sine * norm[None, :] / norm[:, None] / 2
    along = jnp.diagonal(S, axis1=-2, axis2=-1)[..., :, None] * scale
    turn = jnp.where(off_diagonal == 1, jnp.arccos(jnp.where(off_diagonal == 1, rho, 0.0)), 0.0)
    return (along + jnp.swapaxes(along, -1, -2) - turn * S) / (2 * math.pi)


class ReluNoise(NamedTuple):
    """The variances that the kink of a shaped ReLU adds; each a matrix over (i, j).

    With h ~ N(0, V), g = Rh and u = R|h|, in powers of q = c (c₊ − c₋)²/(4n):

    Attributes:
        hidden: F, with rn var S_ij/(1 + [i = j]) = 1 + qF + q²F₂ for the hidden covariance S of a feed-forward
            layer.
        hidden_square: F₂.
        tokens: the same for the MLP, whose tokens have no other randomness than their directions: qF.
    """

    hidden: Float[Array, "m m"]
    hidden_square: Float[Array, "m m"]
    tokens: Float[Array, "m m"]


def relu_noise(at: Frame, drift: Float[Array, "m m"]) -> ReluNoise:
    """F, from E[g_i² u_j²] and E[g_i g_j u_i u_j], by Stein's lemma in g; F₂, from E[u_i² u_j²].

    Arguments:
        at: V in its coordinates.
        drift: R B₂ Rᵀ.
    """
    V, Q, R, _ = at
    norm = jnp.sqrt(jnp.diagonal(V))
    rho = jnp.clip(V / jnp.outer(norm, norm), -1.0, 1.0)
    equal = jnp.eye(len(V), dtype=V.dtype)
    signs = (2 / math.pi) * jnp.arcsin(jnp.where(equal == 1, 1.0, rho))
    kinks = (1 - equal) * (2 / math.pi) * safe_sqrt((1 - rho) * (1 + rho)) * norm[None, :] / norm[:, None]
    absolute = jnp.outer(norm, norm) * (2 / math.pi) * relu_alignment(rho) + V
    U = R @ jnp.where(equal == 1, V, absolute) @ R.T

    RQ = R[:, None, :] * Q.T[None, :, :]  # R_ic Q_cj over (i, j, c)
    straight = jnp.einsum("iic->ic", RQ)
    # E[g_i² u_j²] = U_jj + 2 Σ_cd R_jc Q_ci (signs_cd R_jd Q_di + kinks_cd Q_ci R_jd).
    squares = jnp.einsum("jic,cd,jid->ij", RQ, signs, RQ) + jnp.einsum("jic,ci,cd,jd->ij", RQ, Q, kinks, R)
    squares = jnp.diagonal(U)[None, :] + 2 * squares
    # E[g_i g_j u_i u_j].
    products = (
        equal * U + jnp.einsum("ic,cd,jd->ij", straight, signs, straight) + jnp.einsum("ijc,cd,jid->ij", RQ, signs, RQ)
    )
    kinked = jnp.einsum("ijc,ic,cd,jd->ij", RQ, Q.T, kinks, R)
    products = products + kinked + kinked.T
    tokens = squares + squares.T + 2 * products
    mixed = tokens + 2 * products
    hidden = mixed - 2 * (1 + 2 * equal) - 8 * equal * drift
    fourth = jnp.einsum("jc,jd,icd->ij", R, R, jnp.einsum("ia,ib,abcd->icd", R, R, absolute_moments(rho, norm)))
    square = 1 + 2 * equal - mixed + fourth - 16 * drift**2
    return ReluNoise(hidden / (1 + equal), square / (1 + equal), tokens / (1 + equal))


def absolute_moments(rho: Float[Array, "m m"], norm: Float[Array, " m"]) -> Float[Array, "m m m m"]:
    """E|h_a h_b h_c h_d| for h ~ N(0, V), exact where two of the four are one token.

    E[g_a² |g_c g_d|] has a closed form, four different absolute values have none: for those, the moments of a normal
    with the same mean and covariance as |h|. They matter with q² only, and from four tokens on.
    """
    tokens = len(rho)
    sine = safe_sqrt((1 - rho) * (1 + rho))
    turn = jnp.arcsin(rho)
    pair = (2 / math.pi) * (sine + rho * turn)
    # E[g_a² |g_c g_d|] over (a, c, d).
    along, across = rho[:, :, None] * rho[:, None, :], rho[:, :, None] ** 2 + rho[:, None, :] ** 2
    one = pair + (2 / math.pi) * (2 * along * turn + across * sine)
    closure = (
        pair[:, :, None, None] * pair[None, None]
        + pair[:, None, :, None] * pair[None, :, None, :]
        + pair[:, None, None, :] * pair[None, :, :, None]
        - 2 * (2 / math.pi) ** 2
    )
    a, b, c, d = jnp.ix_(*[jnp.arange(tokens)] * 4)
    moments = closure
    for same, of in (
        (a == b, one[a, c, d]),
        (c == d, one[c, a, b]),
        (a == c, one[a, b, d]),
        (a == d, one[a, b, c]),
        (b == c, one[b, a, d]),
        (b == d, one[b, a, c]),
    ):
        moments = jnp.where(same, of, moments)
    return moments * jnp.einsum("a,b,c,d->abcd", norm, norm, norm, norm)


def relu_drift_response(at: Frame) -> Float[Array, "m m"]:
    """D_ij = ∂(R B₂ Rᵀ)_ij/∂Z_ij: how a ReLU passes on the noise of the layer before it."""
    Q, R = at.Q, at.R
    tokens = len(Q)
    rows = jnp.einsum("ai,bj->ijab", Q, Q)
    directions = rows + jnp.swapaxes(rows, -1, -2)
    directions = directions / (1 + jnp.eye(tokens, dtype=Q.dtype))[:, :, None, None]
    return jnp.einsum("ia,ijab,jb->ij", R, relu_drift_along(at.V, directions), R)
