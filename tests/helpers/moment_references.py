"""Mean and covariance of one layer of width n to the next order in 1/n, as tensors of sums over tokens.

Nothing here imports sdeinfer: a layer is known by the name of its class and its parameters, a pattern by its mask.
Written from the noncentral Wishart law of a layer (`docs/theory/finite_width.md`): given the covariance S of a branch,
with λ² = 1 − γ²,

    E[V′] = λ²V + γ²E[S],
    n Cov(V′) = λ²γ² E[V_αδ S_βω + …] + γ⁴ {n Cov(S) + E[S_αδ S_βω + S_αω S_βδ]}.

Tensors are indexed by (α, β, δ, ω).
"""

import math
from typing import Any, NamedTuple

import numpy as np
from helpers import references
from helpers.pattern_references import all_absolute, covariance, expanded, isserlis, signed_and_absolute
from helpers.references import packed, packed_tensor
from scipy.stats import multivariate_normal

FIRST = np.array([-1, 9, -45, 0, 45, -9, 1]) / 60
SECOND = np.array([2, -27, 270, -490, 270, -27, 2]) / 180
"""Central differences of the sixth order, over −3, …, 3 steps."""

STEP = 0.01


class LayerMoments(NamedTuple):
    """E[V′ − V] and n Cov(V′), and the leading terms of both with h = 1/n: the a and κ² of n Cov, the θ₁ of E/h."""

    increment: np.ndarray
    covariance: np.ndarray
    linear_noise: float
    attention_noise: float
    attention_drift: float


class AttentionSeries(NamedTuple):
    """Moments of S = A V Aᵀ of one head in powers of ε² = x = 1/(nτ0²).

    E[S] = V + x B₁ + x² B₁′ and Cov(S) = x 𝒜 + x² G.
    """

    drift: np.ndarray
    drift_next: np.ndarray
    noise: np.ndarray
    noise_next: np.ndarray


def attention_series(V: np.ndarray, mask: np.ndarray) -> AttentionSeries:
    """By series of the softmax and a rule that integrates polynomials of degree five."""
    weights, terms = expanded(V, mask)
    flat = [term.reshape(len(weights), -1) for term in terms]

    def between(i: int, j: int) -> np.ndarray:
        return covariance(weights, flat[i], flat[j]).reshape((len(V),) * 4)

    second, fourth = (np.tensordot(weights, terms[order], 1) for order in (2, 4))
    crossed = between(1, 3)
    return AttentionSeries(second, fourth, between(1, 1), between(2, 2) + crossed + np.einsum("abdw->dwab", crossed))


def crossed(A: np.ndarray, B: np.ndarray) -> np.ndarray:
    """A_αδ B_βω + A_αω B_βδ + B_αδ A_βω + B_αω A_βδ."""
    one = np.einsum("ad,bw->abdw", A, B) + np.einsum("aw,bd->abdw", A, B)
    return one + np.einsum("ad,bw->abdw", B, A) + np.einsum("aw,bd->abdw", B, A)


def repeated(T: np.ndarray) -> np.ndarray:
    """Σ_lin of a V of covariance T: T(αδ, βω) + T(αω, βδ)."""
    return np.einsum("adbw->abdw", T) + np.einsum("awbd->abdw", T)


def kink(layer, width: float) -> float:
    """q of √c σ_s(x) = √(1 − q) x ± √q |x|."""
    s_plus, s_minus = (1 + float(c) / math.sqrt(width) for c in (layer.c_plus, layer.c_minus))
    return (s_plus - s_minus) ** 2 / (2 * (s_plus**2 + s_minus**2))


def unit_moments(V: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """B₂, and the terms q and q² of Cov(φ_αφ_β, φ_δφ_ω), where φ = √(1 − q) h ± √q |h| of h ~ N(0, V)."""
    relu = references.relu_drift(V, 1.0, 0.0)
    absolute = V + 4 * relu
    mixed = signed_and_absolute(V, absolute)
    pairs = sum(np.einsum(f"{order}->abdw", mixed) for order in ("abdw", "adbw", "awbd", "bdaw", "bwad", "dwab"))
    outer = np.einsum("ab,dw->abdw", V, relu) + np.einsum("ab,dw->abdw", relu, V)
    first = pairs - 2 * isserlis(V) - 4 * outer
    second = isserlis(V) - pairs + all_absolute(V, absolute) - 16 * np.einsum("ab,dw->abdw", relu, relu)
    return relu, first, second


def relu_along(V: np.ndarray, S: np.ndarray) -> np.ndarray:
    """DB₂(V)[S] by differences."""
    size = STEP / max(np.abs(S).max(), 1e-300)
    values = (references.relu_drift(V + k * size * S, 1.0, 0.0) for k in range(-3, 4))
    return sum((c * value for c, value in zip(FIRST, values, strict=True)), np.zeros_like(V)) / size


def relu_curvature(V: np.ndarray, noise: np.ndarray) -> np.ndarray:
    """½ 𝒜:∇²B₂ by second differences along the axes of 𝒜."""
    sizes, axes = np.linalg.eigh(packed_tensor(noise))
    found = np.zeros_like(V)
    for size, axis in zip(sizes, axes.T, strict=True):
        S = unpacked(axis, len(V))
        for k, c in zip(range(-3, 4), SECOND, strict=True):
            found += size / 2 * c * references.relu_drift(V + k * STEP * S, 1.0, 0.0) / STEP**2
    return found


def unpacked(x: np.ndarray, tokens: int) -> np.ndarray:
    """The symmetric matrix of entries α ≤ β."""
    S, (rows, columns) = np.zeros((tokens, tokens)), np.triu_indices(tokens)
    S[rows, columns] = S[columns, rows] = x
    return S


def relu_jacobian(V: np.ndarray) -> np.ndarray:
    """∂B₂,αβ/∂V_δω over packed entries."""
    p = len(V) * (len(V) + 1) // 2
    return np.stack([packed(relu_along(V, unpacked(axis, len(V)))) for axis in np.eye(p)], axis=1)


def layer_moments(layer, V, width: float) -> LayerMoments:
    """Moments of one layer; terms of O(1/n²) relative to the limit's are left out, but for B₁′ in the covariance."""
    V, h = np.asarray(V, float), 1 / width
    match type(layer).__name__:
        case "ShapedMLP":
            return mlp_moments(layer, V, width)
        case "ResidualFeedForward":
            return feedforward_moments(layer, V, width)
        case "ShapedAttention":
            return attention_moments(layer, V, width)
        case "ShapedTransformer":
            return layer_moments(layer.stack, V, width)
        case "Stack" if len(layer.layers) == 1:
            return layer_moments(layer.layers[0], V, width)
    attention, feedforward = layer.layers
    first, second = (layer_moments(part, V, width) for part in (attention, feedforward))
    # The second layer sees V + E[dV] with the noise of the first: the mean of its drift and of its noise, and the
    # covariance of what it adds with what it is given.
    series = attention_series(V, attention.pattern.mask(len(V)))
    noise = first.linear_noise * references.linear_tensor(V) + first.attention_noise * series.noise
    strength = 4 * kink(feedforward, width) * feedforward_strength(feedforward)
    moved = h * first.attention_drift * series.drift
    increment = first.increment + second.increment
    increment = increment + strength * (
        relu_along(V, moved) + relu_curvature(V, h * first.attention_noise * series.noise)
    )
    after = moved + h**2 * first.attention_drift / float(attention.tau0) ** 2 * series.drift_next
    passed = second.linear_noise * (crossed(V, after) + h * repeated(noise))
    response = tensor_of(strength * relu_jacobian(V) @ packed_tensor(noise), len(V))
    covariance = first.covariance + second.covariance + passed + response + np.einsum("abdw->dwab", response)
    return LayerMoments(increment, covariance, 0.0, 0.0, 0.0)


def feedforward_strength(layer) -> float:
    """Of the branch in V′: γ², or 1."""
    return 1.0 if type(layer).__name__ == "ShapedMLP" else float(layer.gamma) ** 2


def tensor_of(matrix: np.ndarray, tokens: int) -> np.ndarray:
    """The tensor of a matrix over packed entries."""
    place = unpacked(np.arange(len(matrix)), tokens).astype(int)
    return matrix[place[:, :, None, None], place]


def mlp_moments(layer, V: np.ndarray, width: float) -> LayerMoments:
    """V′ ~ Wishart(n, S/n), S the covariance of the n images of tokens whose Gram matrix V is given.

    Given V, of φ_αφ_β only h_α|h_β| + |h_α|h_β is random in the terms of O(q).
    """
    q, (relu, *_) = kink(layer, width), unit_moments(V)
    mixed = signed_and_absolute(V, V + 4 * relu)
    random = sum(np.einsum(f"{order}->abdw", mixed) for order in ("adbw", "awbd", "bdaw", "bwad"))
    return LayerMoments(4 * q * relu, references.linear_tensor(V + 4 * q * relu) + q * random, 1.0, 0.0, 0.0)


def feedforward_moments(layer, V: np.ndarray, width: float) -> LayerMoments:
    """S is the mean of φφᵀ over rn units. The term qF of its covariance stands for half of what it adds repeatedly."""
    g2, r, h, q = float(layer.gamma) ** 2, layer.expansion, 1 / width, kink(layer, width)
    relu, first, second = unit_moments(V)
    lin, K = references.linear_tensor(V), V + 4 * q * relu
    of_units = lin + q * (1 + 2 * h) * first + q**2 * second + h * repeated(lin)
    branch = of_units / r + references.linear_tensor(K)
    covariance = (1 - g2) * g2 * crossed(V, K) + g2**2 * branch
    return LayerMoments(4 * q * g2 * relu, covariance, g2 * (2 * (1 - g2) + g2 * (1 + 1 / r)), 0.0, 0.0)


def attention_moments(layer, V: np.ndarray, width: float) -> LayerMoments:
    """S of each of H heads is the covariance of n/H columns; an output projection mixes Wishart matrices of them."""
    g2, tau0, H, h = float(layer.gamma) ** 2, float(layer.tau0), layer.heads, 1 / width
    x = h / tau0**2
    series = attention_series(V, layer.pattern.mask(len(V)))
    lin, grown = references.linear_tensor(V), crossed(V, x * series.drift + x**2 * series.drift_next)
    # n Cov of the mean of the heads' S, and E[S_αδ S_βω + S_αω S_βδ] of one head.
    of_heads = (series.noise + x * series.noise_next) / (H * tau0**2)
    of_columns = lin + grown + x * repeated(series.noise)
    if layer.output_projection:
        of_heads = of_heads + of_columns
        of_columns = lin + grown + h * repeated(lin + series.noise / (H * tau0**2))
    covariance = (1 - g2) * g2 * (2 * lin + grown) + g2**2 * (of_heads + of_columns)
    increment = g2 * (x * series.drift + x**2 * series.drift_next)
    a = g2 * (2 if layer.output_projection else 2 - g2)
    return LayerMoments(increment, covariance, a, g2**2 / (H * tau0**2), g2 / tau0**2)


def along(W: np.ndarray, T: np.ndarray) -> np.ndarray:
    """Σ W_αβ W_δω T_αβδω for every W."""
    return np.einsum("qab,qdw,abdw->q", W, W, T, optimize=True)


def dense_log_density(layer, V, after, width: float, W: np.ndarray) -> float:
    """Log density on the entries α ≤ β of a normal with these moments, whose covariance is diagonal in ⟨W_q, dV⟩.

    Arguments:
        layer: the layer.
        V: the covariance before it.
        after: the covariance after it.
        width: n.
        W: the coordinates, in which Σ_lin is the identity: checked.
    """
    moments: Any = layer_moments(layer, V, width)
    lin = np.einsum("qab,rdw,abdw->qr", W, W, references.linear_tensor(np.asarray(V)), optimize=True)
    np.testing.assert_allclose(lin, np.eye(len(W)), atol=1e-9)
    U = packed(2 * V @ W @ V)
    covariance: Any = np.einsum("qa,q,qb->ab", U, along(W, moments.covariance), U) / width
    mean = packed(V + moments.increment)
    return float(multivariate_normal.logpdf(packed(after), mean, covariance))
