"""One step of a factor of the joint covariance 𝒱 = [[V, C], [Cᵀ, D]] of tokens X and a tangent Ẋ that stays PSD.

𝒱 is the limit ε → 0 of two prompts, X and X + εẊ, through one network. Each term of a step of X is linear in X, or adds
a kernel k(x_α, x_β) of two tokens to V. The first kind acts on Ẋ by its derivative along Ẋ, with the same normals. Of
the second kind, C takes the derivative in the second argument and D the mixed derivative in both, which is again a
positive semi-definite kernel: the covariance of a random function and of its derivative.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sdeinfer.covariance import (
    Pattern,
    centring,
    constant_like,
    diagonal,
    differences,
    gram,
    identity_like,
    matmul,
    safe_sqrt,
    semidefinite_cholesky,
    total,
    transpose,
)
from sdeinfer.layers import Limit, attention_drift_vectors, relu_drift
from sdeinfer.solve._attention import relative_change


class Kernel(NamedTuple):
    """A symmetric kernel between prompts X(ε) and X(ε′), X(ε) = X + εẊ, expanded about ε = ε′ = 0.

    Attributes:
        value: the kernel of α and β.
        along: its derivative by ε′, as β moves along Ẋ; by ε it is the transpose.
        mixed: its derivative by ε and ε′.
    """

    value: Float[Array, "m m ..."]
    along: Float[Array, "m m ..."]
    mixed: Float[Array, "m m ..."]

    @classmethod
    def of(cls, S: Float[Array, "rows rows ..."]) -> "Kernel":
        """The blocks of a joint matrix."""
        half = len(S) // 2
        return cls(S[:half, :half], S[:half, half:], S[half:, half:])

    def __mul__(self, other: "Kernel") -> "Kernel":  # type: ignore[override]
        """The entrywise product."""
        return Kernel(
            self.value * other.value,
            self.along * other.value + self.value * other.along,
            self.mixed * other.value
            + transpose(self.along) * other.along
            + self.along * transpose(other.along)
            + self.value * other.mixed,
        )

    @property
    def joint(self) -> Float[Array, "rows rows ..."]:
        """The joint matrix."""
        upper = jnp.concatenate([self.value, self.along], axis=1)
        return jnp.concatenate([upper, jnp.concatenate([transpose(self.along), self.mixed], axis=1)])


@jax.jit
def tangent_psd_step(
    limit: Limit,
    Z: Float[Array, "rows rows ..."],
    h: Float[Array, ""],
    G: Float[Array, "rows 2*rows ..."],
) -> tuple[Float[Array, "rows rows ..."], Float[Array, "..."]]:
    """Advance a factor Z = [X; Ẋ] of 𝒱 = ZZᵀ by h, for any attention pattern.

    - Noise: Z ← Z + √(a/2) Z G₁ + [N; Ṅ], with N = κ [N̂ ∘ (X G₂ Eᵀ)] E of `pattern_noise` and its derivative Ṅ along Ẋ.
      The division of Z by √(1 + h a m) cancels the drift that G₁ gives to 𝒱.
    - The attention drift's first term is the kernel θ₁ V ∘ T; the noise contributes κ² V ∘ T, and the joint matrix of
      (θ₁ − κ²) V ∘ T is added to 𝒱.
    - The attention drift's second term: X ← (I + hA) X, A = (θ₁/2) v s, and Ẋ ← (I + hA) Ẋ + hȦX.
    - The ReLU's drift: 𝒱 ← 𝒱 + 2w B with the joint matrix B of B₂ and w = 1 − e^{−hθ₂/2}. This is (1 − w) 𝒱 and the
      joint matrix of w κ₁, with the arc-cosine kernel κ₁ = V + 2B₂.

    Arguments:
        limit: coefficients of the SDE.
        Z: factor of 𝒱; the rows of X, then those of Ẋ.
        h: step in depth-time.
        G: the normals G₁ and G₂ of variance h, side by side.

    Returns:
        a factor of 𝒱 after the step; and the change of V by attention's drift at the start of the step, relative to V.
        Where this change exceeds 1 the factor is finite but invalid.
    """
    size = len(Z)
    noise, growth, turn, change = _attention(limit, Z, h, G[:, size:])
    Z = Z + jnp.sqrt(limit.linear_noise / 2) * matmul(Z, G[:, :size]) + noise
    Z = Z / jnp.sqrt(1 + h * limit.linear_noise * size / 2)
    Z = Z + _turned(turn, Z)
    w = -jnp.expm1(-h * limit.relu_drift / 2)
    return _add_kernels(Z, growth, w), change


def joint_drift(limit: Limit, S: Float[Array, "rows rows ..."]) -> Float[Array, "rows rows ..."]:
    """The drift of the joint covariance 𝒱 per unit of depth-time.

    Arguments:
        limit: coefficients of the SDE.
        S: 𝒱.
    """
    tokens = len(S) // 2
    between = _differences_of_both(limit.pattern, transpose(_differences_of_both(limit.pattern, S)))
    kernel = Kernel.of(S)
    grows = kernel * _overlap(limit.pattern, tokens, Kernel.of(between))
    turns = _turned(_turn(limit, kernel, kernel), S)
    return limit.attention_drift * grows.joint + turns + transpose(turns) + limit.relu_drift * joint_relu_drift(S)


def joint_relu_drift(S: Float[Array, "rows rows ..."]) -> Float[Array, "rows rows ..."]:
    """The joint matrix of B₂ = √(V_αα V_ββ) f(ρ), with f = (√(1−ρ²) − ρ arccos ρ)/(2π) (Theorem 3.2 for c₊ − c₋ = 1).

    With r_α = C_αα/√V_αα, the part of ẋ_α along x_α, and u_αβ = ẋ_α·x_β/√V_ββ − ρ r_α,

        C-block:  [−arccos ρ C_αβ + √(1−ρ²) √V_αα r_β]/(2π),
        D-block:  [−arccos ρ D_αβ + √(1−ρ²) r_α r_β + u_αβ u_βα/√(1−ρ²)]/(2π).

    Both vanish on the diagonal. Where tokens coincide u = O(√(1−ρ²)), so that the last term vanishes, too.
    """
    V, C, D = Kernel.of(S)
    norm = safe_sqrt(diagonal(V))
    scale = norm[:, None] * norm[None]
    present = norm > 0
    inverse = jnp.where(present, 1 / jnp.where(present, norm, 1.0), 0.0)
    off_diagonal = (scale > 0) & (identity_like(V) == 0)
    rho = jnp.clip(jnp.where(off_diagonal, V, 0.0) / jnp.where(off_diagonal, scale, 1.0), -1.0, 1.0)
    angle, sine = _angle(rho), safe_sqrt((1 - rho) * (1 + rho))
    apart = sine > 0
    r = diagonal(C) * inverse
    u = transpose(C) * inverse[None] - rho * r[:, None]
    bends = jnp.where(apart, u * transpose(u) / jnp.where(apart, sine, 1.0), 0.0)
    along = sine * norm[:, None] * r[None] - angle * C
    mixed = sine * r[:, None] * r[None] + bends - angle * D
    along, mixed = (jnp.where(off_diagonal, x, 0.0) / (2 * math.pi) for x in (along, mixed))
    return Kernel(relu_drift(V), along, mixed).joint


def _attention(limit: Limit, Z: Array, h: Array, G: Array) -> tuple[Array, Array, tuple[Array, Array], Array]:
    """Attention's part of a step: noise [N; Ṅ], growth of 𝒱, hA and hȦ, and the relative change of V."""
    attends = (limit.attention_drift > 0) | (limit.attention_noise > 0)

    def present(limit, Z, h, G):
        # Without attention these terms do not enter the step and must not overflow.
        return _attention_terms(limit, jnp.where(attends, Z, 0.0), h, G)

    def absent(*arguments):
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(present, *arguments))

    return jax.lax.cond(jnp.any(attends), present, absent, limit, Z, h, G)


def _attention_terms(limit: Limit, Z: Array, h: Array, G: Array) -> tuple[Array, Array, tuple[Array, Array], Array]:
    tokens = len(Z) // 2
    theta, kappa2 = limit.attention_drift, limit.attention_noise
    E = _differences_of_both(limit.pattern, Z)
    kernel, T = Kernel.of(gram(Z)), _overlap(limit.pattern, tokens, Kernel.of(gram(E)))
    # s does not depend on a common shift of all tokens; removing the shift avoids its rounding.
    centred = jnp.concatenate([half - total(half) / tokens for half in (Z[:tokens], Z[tokens:])])
    A, A_dot = (h * x for x in _turn(limit, kernel, Kernel.of(gram(centred))))

    X = Z[:tokens]
    change = relative_change(h * theta * jnp.max(diagonal(T.value), axis=0), matmul(A, X), X)
    explodes = ~(change <= 1)  # NaN, where V overflows, counts as more than 1
    noise = safe_sqrt(kappa2) * _noise(limit.pattern, Z, E, G)
    growth = h * (theta - kappa2) * (kernel * T).joint
    noise, growth, A, A_dot = (jnp.where(explodes, 0.0, x) for x in (noise, growth, A, A_dot))
    return noise, growth, (A, A_dot), change


def _noise(pattern: Pattern, Z: Array, E: Array, G: Array) -> Array:
    """N = [N̂ ∘ (X G Eᵀ)] E and its derivative along Ẋ, Ṅ = [N̂ ∘ (Ẋ G Eᵀ + X G Ėᵀ)] E + [N̂ ∘ (X G Eᵀ)] Ė."""
    tokens, count = len(Z) // 2, len(E) // 2
    (E, E_dot), ZG = (E[:count], E[count:]), matmul(Z, G)
    selected = constant_like(centring(pattern, tokens).selected, Z)
    with_E = matmul(ZG, transpose(E))
    attended = selected * with_E[:tokens]
    moved = selected * (with_E[tokens:] + matmul(ZG[:tokens], transpose(E_dot)))
    of_both = matmul(jnp.concatenate([attended, moved]), E)
    return jnp.concatenate([of_both[:tokens], of_both[tokens:] + matmul(attended, E_dot)])


def _turn(limit: Limit, kernel: Kernel, shifted: Kernel) -> tuple[Array, Array]:
    """A = (θ₁/2) v s, which gives X the attention drift's second term, and its derivative Ȧ along Ẋ.

    v and s are linear in V, which changes by C + Cᵀ along Ẋ.

    Arguments:
        limit: coefficients of the SDE.
        kernel: 𝒱, from which v is taken.
        shifted: 𝒱 of tokens and tangents shifted by any common vectors, from which s is taken.
    """
    v, _ = attention_drift_vectors(kernel.value, limit.pattern)
    _, s = attention_drift_vectors(shifted.value, limit.pattern)
    v_dot, _ = attention_drift_vectors(kernel.along + transpose(kernel.along), limit.pattern)
    _, s_dot = attention_drift_vectors(shifted.along + transpose(shifted.along), limit.pattern)
    half = limit.attention_drift / 2
    return half * v[:, None] * s, half * (v_dot[:, None] * s + v[:, None] * s_dot)


def _turned(turn: tuple[Array, Array], Z: Array) -> Array:
    """A X and A Ẋ + Ȧ X."""
    (A, A_dot), tokens = turn, len(Z) // 2
    of_X = matmul(jnp.concatenate([A, A_dot]), Z[:tokens])
    return jnp.concatenate([of_X[:tokens], of_X[tokens:] + matmul(A, Z[tokens:])])


def _overlap(pattern: Pattern, tokens: int, F: Kernel) -> Kernel:
    """The kernel T_αβ = tr(V H_α V H_β)/(m_α m_β) = N̂ (F ∘ F) N̂ᵀ, from F = R V Rᵀ."""
    selected = constant_like(centring(pattern, tokens).selected, F.value)
    return Kernel(*(matmul(matmul(selected, part), transpose(selected)) for part in F * F))


def _differences_of_both(pattern: Pattern, Z: Array) -> Array:
    """[R X; R Ẋ] of [X; Ẋ]."""
    tokens = len(Z) // 2
    return jnp.concatenate([differences(pattern, Z[:tokens]), differences(pattern, Z[tokens:])])


def _add_kernels(Z: Array, growth: Array, w: Array) -> Array:
    """A factor of 𝒱 + growth, aligned by the ReLU with weight w; Z itself without attention and ReLU."""

    def factorise(Z, growth, w):
        S = gram(Z) + growth
        return semidefinite_cholesky(S + 2 * w * joint_relu_drift(S))

    changes = jnp.any(growth != 0) | jnp.any(w > 0)
    return jax.lax.cond(changes, factorise, lambda Z, growth, w: Z, Z, growth, w)


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
