"""Naive twins of the fast code, written from the paper's index sums in plain NumPy; nothing here imports sdeinfer.

A layer is known here by the name of its class and its parameters only. Packed vectors hold the entries α ≤ β row by
row.
"""

import math
from itertools import product
from typing import Any

import numpy as np
from scipy.stats import multivariate_normal


def assert_agrees(fast, naive, *, rtol: float = 1e-10) -> None:
    """Largest difference at most `rtol` times the largest entry: what rounding leaves of an array of one scale."""
    fast, naive = np.asarray(fast), np.asarray(naive)
    assert fast.shape == naive.shape
    error, scale = np.abs(fast - naive).max(), np.abs(naive).max()
    assert error <= rtol * scale, f"off by {error:.3g}, which is {error / scale:.3g} of the largest entry {scale:.3g}"


def extrapolated(whole, half, order: int = 2):
    """Richardson's extrapolation: a value whose error is C hᵖ + …, from its values at h and at h/2."""
    return (2**order * half - whole) / (2**order - 1)


def packed(V) -> np.ndarray:
    """The entries α ≤ β of a matrix, or of the last two axes of a stack."""
    V = np.asarray(V)
    return np.stack([V[..., a, b] for a in range(V.shape[-1]) for b in range(a, V.shape[-1])], axis=-1)


def packed_tensor(T) -> np.ndarray:
    """T[αβδω] as a matrix over pairs α ≤ β and δ ≤ ω."""
    rows, columns = np.triu_indices(T.shape[0])
    return T[rows[:, None], columns[:, None], rows, columns]


def everything(V) -> np.ndarray:
    """The mask of tokens that attend to all."""
    return np.ones(V.shape, bool)


def S1(V, mask=None) -> np.ndarray:
    """S₁^{αδ,βω} of Eq. 10 with means over the tokens to which α and β attend; zero for other δ and ω."""
    m, mask = len(V), everything(V) if mask is None else mask
    S = np.zeros((m, m, m, m), V.dtype)
    one = [[V[mask[a], w].mean() for w in range(m)] for a in range(m)]
    both = [[V[np.ix_(mask[a], mask[b])].mean() for b in range(m)] for a in range(m)]
    for a, d, b, w in product(range(m), repeat=4):
        if mask[a, d] and mask[b, w]:
            S[a, d, b, w] = V[a, b] * (V[d, w] - one[a][w] - one[b][d] + both[a][b])
    return S


def S2(V, mask=None) -> np.ndarray:
    """S₂^{αδ} of Eq. 10 with means over the tokens to which α attends; zero for other δ."""
    m, mask = len(V), everything(V) if mask is None else mask
    S = np.zeros((m, m), V.dtype)
    for a, d in product(range(m), repeat=2):
        if mask[a, d]:
            own = V[np.ix_(mask[a], mask[a])]
            S[a, d] = V[a, a] * (V[d, d] - 2 * V[d, mask[a]].mean() + 2 * own.mean() - np.diag(own).mean())
    return S


def attention_drift(V, mask=None) -> np.ndarray:
    """The bracket of Theorem 4.2's drift, b without γ²/τ0²: sums over the tokens to which α attends, and 1/m_α."""
    mask = everything(V) if mask is None else mask
    m, size = len(V), [int(row.sum()) for row in mask]
    first, second = S1(V, mask), S2(V, mask)
    b = np.zeros((m, m), V.dtype)
    for a, c, n in product(range(m), repeat=3):
        b[a, c] += V[c, n] * second[a, n] / (2 * size[a]) + V[a, n] * second[c, n] / (2 * size[c])
        for k in range(m):
            b[a, c] += V[n, k] * first[a, n, c, k] / (size[a] * size[c])
    return b


def attention_tensor(V, mask) -> np.ndarray:
    """𝒜^{αβ,δω} of Theorem 4.2, the covariance of M + Mᵀ, M_αβ = Σ_ν (first order of A)_αν V_νβ."""
    m, size = len(V), [int(row.sum()) for row in mask]
    S = S1(V, mask)
    # Cov(M_xy, M_zu), indexed by x, y, z and u.
    covariance = np.einsum("yn,xnzk,ku->xyzu", V, S, V)
    for x, z in product(range(m), repeat=2):
        covariance[x, :, z] = covariance[x, :, z] / (size[x] * size[z])
    one = covariance + np.einsum("yxzu->xyzu", covariance)
    return one + np.einsum("xyuz->xyzu", one)


def linear_tensor(V) -> np.ndarray:
    """Σ_lin^{αβ,δω} of Theorem 3.2."""
    return np.einsum("ad,bw->abdw", V, V) + np.einsum("aw,bd->abdw", V, V)


def nu(rho: float, c_plus: float, c_minus: float) -> float:
    """ν(ρ) of Eq. 6."""
    return (c_plus - c_minus) ** 2 / (2 * math.pi) * (math.sqrt(1 - rho**2) - rho * math.acos(rho))


def relu_drift(V, c_plus: float, c_minus: float) -> np.ndarray:
    """b_ReLU of Theorem 3.2."""
    m = len(V)
    b = np.zeros((m, m))
    for a, c in product(range(m), repeat=2):
        scale = math.sqrt(V[a, a] * V[c, c])
        if a != c:  # ν(1) = 0, which rounding in ρ would spoil
            b[a, c] = nu(V[a, c] / scale, c_plus, c_minus) * scale
    return b


def drift(layer, V) -> np.ndarray:
    """b(V) as the theorems give it for each architecture."""
    V = np.asarray(V)
    theta1, theta2, _, _ = coefficients(layer)
    attention = attention_drift(V, pattern_of(layer).mask(len(V)))
    return theta1 * attention + theta2 * relu_drift(V, 1.0, 0.0)


def pattern_of(layer):
    """The pattern of the layer's attention; the full one without attention."""
    parts = getattr(layer, "layers", (layer,))
    return next((part.pattern for part in parts if not part.pattern.everything), layer.pattern)


def diffusion(layer, V) -> np.ndarray:
    """Σ^{αβ,δω} as the theorems give it for each architecture, as a p×p matrix."""
    V = np.asarray(V)
    _, _, a, kappa2 = coefficients(layer)
    return packed_tensor(a * linear_tensor(V) + kappa2 * attention_tensor(V, pattern_of(layer).mask(len(V))))


def log_density(layer, V, V_next, *, width: float) -> float:
    """Log density of one step of the Euler chain over dt = 1/n, as a dense normal on the p entries α ≤ β."""
    mean = packed(V + drift(layer, V) / width)
    covariance: Any = diffusion(layer, V) / width  # SciPy's stubs know scalars only
    return float(multivariate_normal.logpdf(packed(V_next), mean, covariance))


def log_density_rounding(layer, V, V_next, *, width: float) -> float:
    """What rounding may make of `log_density`, to first order.

    Of the residual, that of the matrices it is a difference of; of Σ, p times its condition number. The dense normal is
    by far the less accurate side: attention's noise may be much larger than the rest, which spectral coordinates keep
    apart. In 60 digits it was off by 5e-11 of its value at a condition number of 7e6, and the statistics by 4e-15.
    """
    V, V_next, b = np.asarray(V), np.asarray(V_next), drift(layer, V) / width
    covariance, residual = diffusion(layer, V) / width, packed(V_next - V - b)
    solved = np.linalg.solve(covariance, residual)
    of_residual = 2 * np.abs(solved) @ packed(np.abs(V_next) + np.abs(V) + np.abs(b))
    size = residual @ solved + len(residual) + abs(np.linalg.slogdet(covariance)[1])
    return np.finfo(float).eps * (of_residual + len(residual) * np.linalg.cond(covariance) * size)


def log_likelihood_rounding(layer, path, *, width: float) -> float:
    """What rounding may make of `log_likelihood`."""
    steps = zip(path[:-1], path[1:], strict=True)
    return sum(log_density_rounding(layer, V, V_next, width=width) for V, V_next in steps)


def log_likelihood(layer, path, *, width: float) -> float:
    """Log density of a path given its start, V of shape (layers, m, m)."""
    return sum(log_density(layer, V, V_next, width=width) for V, V_next in zip(path[:-1], path[1:], strict=True))


def coefficients(layer) -> tuple[float, float, float, float]:
    """The θ₁, θ₂, a and κ² of the drift θ₁ B₁ + θ₂ B₂ and the diffusion a Σ_lin + κ² 𝒜; B₂ is b_ReLU at c₊ − c₋ = 1."""
    match type(layer).__name__:
        case "ShapedMLP":
            return 0.0, (float(layer.c_plus) - float(layer.c_minus)) ** 2, 1.0, 0.0
        case "ResidualFeedForward":
            g, r = float(layer.gamma), layer.expansion
            a = 2 * g**2 * (1 - g**2) + g**4 * (1 + 1 / r)  # V and the branch; the branch itself, W_post and W_pre
            return 0.0, g**2 * (float(layer.c_plus) - float(layer.c_minus)) ** 2, a, 0.0
        case "ShapedAttention":
            g, t = float(layer.gamma), float(layer.tau0)
            a = 2 * g**2 * (1 - g**2) + g**4 * (2 if layer.output_projection else 1)
            return g**2 / t**2, 0.0, a, g**4 / (layer.heads * t**2)
        case "ShapedTransformer":
            theta1, theta2, a, kappa2 = np.sum([coefficients(part) for part in layer.stack.layers], axis=0)
            return theta1, theta2, a, kappa2
        case "Stack":
            theta1, theta2, a, kappa2 = np.sum([coefficients(part) for part in layer.layers], axis=0)
            return theta1, theta2, a, kappa2
        case name:
            raise TypeError(name)


def arc_cosine_kernel(V) -> np.ndarray:
    """κ₁(V), twice E[relu(g) relu(h)] for normals of covariance V; (κ₁ − V)/2 is the drift of a ReLU."""
    return V + 2 * relu_drift(V, 1.0, 0.0)


def wishart_path(tokens: int, layers: int, *, width: int, seed: int) -> np.ndarray:
    """A path of positive definite covariances with unequal norms: V′ | V ~ Wishart(n, V/n)."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(tokens, tokens + 3))
    path = [X @ X.T / (tokens + 3)]
    for _ in range(layers):
        X = np.linalg.cholesky(path[-1]) @ rng.normal(size=(tokens, width))
        path.append(X @ X.T / width)
    return np.stack(path)


def linear_layer_covariance(layer, V, *, width: int) -> np.ndarray:
    """Cov(V′_αβ, V′_δω) for a layer with c± = 0 and τ0 = ∞, exact at every width, by Isserlis' theorem.

    Feed-forward: X′ = λX + γ X W₁W₂/(n√r), with W₁ integrated after W₂; attention with an output projection is one of
    r = 1, and heads without it are one W; a stack by the law of total covariance.
    """
    V = np.asarray(V)
    return _linear_layer_covariance(layer, linear_tensor(V), np.einsum("ab,dw->abdw", V, V), width)


def _linear_layer_covariance(layer, lin, outer, width: int) -> np.ndarray:
    """From E[V_αδ V_βω + V_αω V_βδ] and E[V_αβ V_δω] of the V that the layer sees."""
    match type(layer).__name__:
        case "ShapedMLP":
            return lin / width
        case "ShapedAttention" if not layer.output_projection:
            g = float(layer.gamma)
            return g**2 * (2 - g**2) * lin / width
        case "ResidualFeedForward" | "ShapedAttention":
            g, r = float(layer.gamma), getattr(layer, "expansion", 1)
            return ((2 * g**2 - g**4 * (1 - 1 / r)) * lin + g**4 * (lin + 2 * outer) / (r * width)) / width
        case "ShapedTransformer":
            return _linear_layer_covariance(layer.stack, lin, outer, width)
        case "Stack":
            covariance = np.zeros_like(lin)
            for part in layer.layers:
                # E[V′_αδ V′_βω] = V_αδ V_βω + Cov(V′_αδ, V′_βω), in the quadratic form of the next layer
                seen = lin + np.einsum("adbw->abdw", covariance) + np.einsum("awbd->abdw", covariance)
                covariance = covariance + _linear_layer_covariance(part, seen, outer + covariance, width)
            return covariance
        case name:
            raise TypeError(name)


def bounded(x):
    """(1 + x⁴)^{−1/4}."""
    return (1 + x**4) ** -0.25


def finite_width_variances(law, e, f, centre, xp: Any = np):
    """The variance of each term with the features' means, as `PathStatistics` take it; and what is left of them.

    Arguments:
        law: the coefficients of one width.
        e: shape (terms, p).
        f: the features of each term, shape (terms, features, p).
        centre: their means, shape (features, p).
        xp: numpy, or jax.numpy for gradients.
    """

    def raised(base, features):
        up, down = xp.where(features > 0, features, 0.0).sum(axis=0), -xp.where(features < 0, features, 0.0).sum(axis=0)
        taken = xp.where(base > 0, down * bounded(down / xp.where(base > 0, base / 2, 1.0)), 0.0)
        return base + up - taken

    w, mixing_w = law.variance[:, None], law.variance_mixing[:, None]
    noise = raised(law.limit.linear_noise, w * centre)
    mixing = raised(law.limit.attention_noise, mixing_w * centre)
    return noise + mixing * e, ((w + mixing_w * e[:, None]) * (f - centre)).sum(axis=1)


def finite_width_terms(law, z, b, e, f, statistics, xp: Any = np):
    """The log density of each term with the features' means, and e (g₀ + g₁ e) for G, bounded as in the statistics.

    Arguments as in `finite_width_variances`; z of shape (terms, p) and b of shape (terms, 4, p).
    """
    centre, (start, slope, largest) = statistics.centre, statistics.next_order
    v, _ = finite_width_variances(law, e, f, centre, xp)
    mixing = finite_width_variances(law, xp.ones_like(e), f, centre, xp)[0]
    mixing = mixing - finite_width_variances(law, xp.zeros_like(e), f, centre, xp)[0]
    weight = law.variance[3] / xp.where(mixing > 0, mixing, 1.0)[0]
    v = v + mixing * e * weight * (start + slope * e) * bounded(weight * largest / 0.75)
    mu = (law.drift[:, None] * b).sum(axis=1)
    return -((z - mu) ** 2 / v + xp.log(2 * math.pi * v)) / 2


def layer_step(law, V) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of Z with Q (I + Z) Qᵀ one layer after V, in the coordinates of `spectral_coordinates`.

    `law` holds one covariance's coefficients: θ of both drifts, what is added to them, the noise and the mixing of the
    variances, and h = 1/n.
    """
    theta, more_drift, noise, mixing, h = law
    m = len(V)
    Q, delta = spectral_coordinates(V)
    R = np.linalg.inv(Q)
    drift = theta[0] * attention_drift(V) + theta[1] * relu_drift(V, 1.0, 0.0) + more_drift
    variance = np.empty((m, m))
    for i in range(m):
        for j in range(m):
            e = (delta[i] ** 2 + delta[j] ** 2) / m**2
            variance[i, j] = h * (1 + (i == j)) * (noise[i, j] + mixing[i, j] * e)
    return h * R @ drift @ R.T, variance


def spectral_coordinates(V) -> tuple[np.ndarray, np.ndarray]:
    """Q and δ with V = QQᵀ and Qᵀ H Q = diag δ."""
    m = len(V)
    L = np.linalg.cholesky(V)
    delta, U = np.linalg.eigh(L.T @ (np.eye(m) - 1 / m) @ L)
    return L @ U, delta


def spectral_forms(V) -> np.ndarray:
    """W_q with ⟨W_q, dV⟩ = Z_ij/√(1 + [i = j]), i ≤ j, in these coordinates."""
    (Q, _), (rows, columns) = spectral_coordinates(V), np.triu_indices(len(V))
    R = np.linalg.inv(Q)
    product = R[rows][:, :, None] * R[columns][:, None]
    return (product + product.swapaxes(1, 2)) / 2 / np.sqrt(1 + (rows == columns))[:, None, None]
