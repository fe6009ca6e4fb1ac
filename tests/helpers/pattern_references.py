"""Naive twins of the next order of attention patterns; nothing here imports sdeinfer, a pattern is its boolean mask.

The Taylor coefficients of AVAᵀ in ε are polynomials in the normals G of the logits. They are had by arithmetic with
power series, and their moments of total degree up to five by a rule that is exact for them.
"""

import functools
import itertools
import math

import numpy as np


@functools.cache
def degree_five(dimension: int) -> tuple[np.ndarray, np.ndarray]:
    """Points and weights that integrate every polynomial of degree five against N(0, I), 2d² + 1 of them."""
    d = dimension
    axes = math.sqrt(3) * np.stack([np.eye(d), -np.eye(d)])
    pairs = [x[i] + y[j] for x, y in itertools.product(axes, axes) for i, j in itertools.combinations(range(d), 2)]
    points = np.concatenate([np.zeros((1, d)), axes.reshape(-1, d), np.reshape(pairs, (-1, d))])
    weights = [1 + (d**2 - 7 * d) / 18] + [(4 - d) / 18] * (2 * d) + [1 / 36] * len(pairs)
    return points, np.array(weights)


def softmax_series(V: np.ndarray, mask: np.ndarray, Y: np.ndarray) -> list[np.ndarray]:
    """T₀ to T₄ of AVAᵀ = Σ ε^k T_k with A = I + softmax(εY) − the mean, both over the tokens of the mask."""
    powers = [mask * Y**k / math.factorial(k) for k in range(5)]
    sums = [power.sum(axis=-1, keepdims=True) for power in powers]
    A: list[np.ndarray] = []
    for k in range(5):
        A.append((powers[k] - sum((sums[k - i] * A[i] for i in range(k)), np.zeros_like(Y))) / sums[0])
    A[0] = A[0] + np.eye(len(V)) - mask / mask.sum(axis=1, keepdims=True)
    return [sum(A[i] @ V @ A[k - i].swapaxes(-1, -2) for i in range(k + 1)) for k in range(5)]


def expanded(V: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, list[np.ndarray]]:
    """The weights of the rule, and T₀ to T₄ at its points."""
    m, L = len(V), np.linalg.cholesky(V)
    points, weights = degree_five(m**2)
    return weights, softmax_series(V, mask, L @ points.reshape(-1, m, m) @ L.T)


def covariance(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Cov(x_i, y_j) of values at the points of a rule."""
    x, y = (z - weights @ z for z in (x, y))
    return (weights[:, None] * x).T @ y


def attention_tensor(V: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """𝒜(αβ, δω)."""
    weights, terms = expanded(V, mask)
    flat = terms[1].reshape(len(weights), -1)
    return covariance(weights, flat, flat).reshape((len(V),) * 4)


def coordinates(V: np.ndarray, noise: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """W, U and e for the eigenvectors of 𝒜 relative to Σ_lin: ⟨W_q, dV⟩ are uncorrelated, of variance a + κ² e_q."""
    L, m = np.linalg.cholesky(V), len(V)
    basis = []
    for i, j in itertools.combinations_with_replacement(range(m), 2):
        E = np.zeros((m, m))
        E[i, j] = E[j, i] = 1 if i < j else math.sqrt(2)
        basis.append(E)
    R = np.linalg.inv(L)
    white = np.einsum("qij,ia,jb->qab", basis, R, R) / 2
    e, turn = np.linalg.eigh(np.einsum("qab,abcd,rcd->qr", white, noise, white))
    return np.tensordot(turn.T, white, 1), np.tensordot(turn.T, L @ np.array(basis) @ L.T, 1), e


def signed_and_absolute(V: np.ndarray, absolute: np.ndarray) -> np.ndarray:
    """E[h_a h_b |h_c||h_d|] over (a, b, c, d) of h ~ N(0, V), with absolute = E|h||h|ᵀ: docs/theory/finite_width.md."""
    m, norm = len(V), np.sqrt(np.diag(V))
    found = np.empty((m,) * 4)
    for a, b, c, d in itertools.product(range(m), repeat=4):
        rho = 1.0 if c == d else V[c, d] / (norm[c] * norm[d])
        sine, sign = math.sqrt(1 - rho**2) * 2 / math.pi, math.asin(rho) * 2 / math.pi
        found[a, b, c, d] = (
            V[a, b] * absolute[c, d]
            + (V[a, c] * V[b, d] + V[a, d] * V[b, c]) * sign
            + (V[a, c] * V[b, c] * norm[d] / norm[c] + V[a, d] * V[b, d] * norm[c] / norm[d]) * sine
        )
    return found


def isserlis(V: np.ndarray) -> np.ndarray:
    """E[h_a h_b h_c h_d] of h ~ N(0, V)."""
    return np.einsum("ab,cd->abcd", V, V) + np.einsum("ac,bd->abcd", V, V) + np.einsum("ad,bc->abcd", V, V)


def all_absolute(V: np.ndarray, absolute: np.ndarray, mixed: np.ndarray | None = None) -> np.ndarray:
    """E|h_a h_b h_c h_d|, exact where two of the four are one, else of a normal with the moments of |h|.

    `mixed` is E[h_a h_b |h_c||h_d|], from elsewhere than `signed_and_absolute`.
    """
    mixed = signed_and_absolute(V, absolute) if mixed is None else mixed
    mean = np.sqrt(2 * np.diag(V) / math.pi)
    found = isserlis(absolute) - 2 * np.einsum("a,b,c,d->abcd", mean, mean, mean, mean)
    for index in itertools.product(range(len(V)), repeat=4):
        twice = [token for token in index if index.count(token) > 1]
        if twice:
            others = list(index)
            others.remove(twice[0])
            others.remove(twice[0])
            found[index] = mixed[twice[0], twice[0], others[0], others[1]]
    return found
