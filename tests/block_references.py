"""Naive twins of the law of residual blocks: sums over heads, units and tokens, without an import of the package.

A branch is known here by its parameters; S = hhᵀ/u is drawn from its definition, for `count` networks at once, given
the covariance G of the first projections.
"""

import math

import numpy as np
from scipy.special import polygamma, psi


def hidden_of_mlp(G, phi, *, units: int, gated: bool, count: int, rng) -> np.ndarray:
    """S of shape (count, m, m), a mean over units of φ(z)φ(z)ᵀ, or of the same with φ(z) ⊙ z′."""
    m, L = len(G), np.linalg.cholesky(G)
    S = np.zeros((count, m, m))
    for _ in range(units):
        h = phi(rng.standard_normal((count, m)) @ L.T)
        if gated:
            h = h * (rng.standard_normal((count, m)) @ L.T)
        S += h[:, :, None] * h[:, None, :]
    return S / units


def hidden_of_attention(G, mask, *, heads, groups, size, temperature, rope, positions, count: int, rng) -> np.ndarray:
    """S of shape (count, m, m), a mean over heads and over columns of values of A v vᵀAᵀ."""
    m, L = len(G), np.linalg.cholesky(G)
    S = np.zeros((count, m, m))
    for _ in range(groups):
        k, v = (np.einsum("ab,rbc->rac", L, rng.standard_normal((count, m, size))) for _ in range(2))
        k = turned(k, rope, positions)
        for _ in range(heads // groups):
            q = turned(np.einsum("ab,rbc->rac", L, rng.standard_normal((count, m, size))), rope, positions)
            for column in range(size):
                h = np.zeros((count, m))
                for a in range(m):
                    seen = [b for b in range(m) if mask[a][b]]
                    logits = np.stack([(q[:, a] * k[:, b]).sum(1) for b in seen], axis=1)
                    weights = np.exp(logits / (temperature * math.sqrt(size)))
                    weights /= weights.sum(1, keepdims=True)
                    h[:, a] = sum(weights[:, i] * v[:, b, column] for i, b in enumerate(seen))
                S += h[:, :, None] * h[:, None, :]
    return S / (heads * size)


def turned(x, rope, positions) -> np.ndarray:
    """Rows of x, of shape (count, m, d), as d/2 complex numbers that turn by angles of their own."""
    if rope is None:
        return x
    d = x.shape[-1]
    found = np.empty_like(x)
    for a, position in enumerate(positions):
        for c in range(d // 2):
            z = (x[:, a, c] + 1j * x[:, a, c + d // 2]) * np.exp(1j * position * rope ** (-2 * c / d))
            found[:, a, c], found[:, a, c + d // 2] = z.real, z.imag
    return found


def isserlis(V) -> np.ndarray:
    """Cov(z_a z_b, z_c z_d) = V_ac V_bd + V_ad V_bc for z ~ N(0, V), as an array of four indices."""
    m = len(V)
    found = np.empty((m, m, m, m))
    for a in range(m):
        for b in range(m):
            for c in range(m):
                for d in range(m):
                    found[a, b, c, d] = V[a, c] * V[b, d] + V[a, d] * V[b, c]
    return found


def relu_kernel(V) -> np.ndarray:
    """E φ(z_a) φ(z_b) of ReLUs: the arc-cosine kernel of order one, √(V_aa V_bb)(sin θ + (π − θ) cos θ)/(2π)."""
    m = len(V)
    found = np.empty((m, m))
    for a in range(m):
        for b in range(m):
            scale = math.sqrt(V[a, a] * V[b, b])
            theta = math.acos(min(1.0, max(-1.0, V[a, b] / scale)))
            found[a, b] = scale * (math.sin(theta) + (math.pi - theta) * math.cos(theta)) / (2 * math.pi)
    return found


def log_det_of_wishart(m: int, freedom: int) -> tuple[float, float]:
    """Mean and variance of log det W for W ~ Wishart_m(freedom, I)/freedom."""
    halves = [(freedom - i) / 2 for i in range(m)]
    mean = sum(psi(half) for half in halves) + m * math.log(2 / freedom)
    return float(mean), float(sum(polygamma(1, half) for half in halves))


def log_wilks(A, C, B) -> float:
    """log Λ of two groups of rows by determinants: log det of their joint Gram matrix, less those of each."""
    joint = np.block([[A, C], [C.T, B]])
    return float(np.linalg.slogdet(joint)[1] - np.linalg.slogdet(A)[1] - np.linalg.slogdet(B)[1])
