"""Naive twins of tangents, in plain NumPy; nothing here imports sdeinfer.

The joint covariance 𝒱 = [[V, C], [Cᵀ, D]] of tokens and a tangent is that of two prompts, X and X + εẊ, seen through
J = [[I, 0], [−I/ε, I/ε]]. Attention's part of its drift and diffusion is a polynomial in ε: the index sums are added up
in exact fractions, with an ε so small that only the limit is left in a float. The ReLU's part is an integral over
normals and their derivatives.
"""

import math
from fractions import Fraction
from itertools import product

import numpy as np
from helpers.references import attention_drift, attention_tensor, coefficients, linear_tensor, packed_tensor, pattern_of

EPSILON = Fraction(1, 2**60)


def joint_drift(layer, S) -> np.ndarray:
    """The drift of 𝒱."""
    theta1, theta2, _, _ = coefficients(layer)
    S = np.asarray(S, float)
    prompts, J = _two_prompts(S)
    of_attention = J @ attention_drift(prompts, _mask(layer, len(S) // 2)) @ J.T
    return theta1 * of_attention.astype(float) + theta2 * joint_relu_drift(S)


def joint_diffusion(layer, S) -> np.ndarray:
    """Σ(𝒱) as a matrix over the entries α ≤ β of 𝒱."""
    _, _, a, kappa2 = coefficients(layer)
    S = np.asarray(S, float)
    prompts, J = _two_prompts(S)
    tensor = attention_tensor(prompts, _mask(layer, len(S) // 2))
    for axis in range(4):
        tensor = np.moveaxis(np.tensordot(J, tensor, axes=(1, axis)), 0, axis)
    return packed_tensor(a * linear_tensor(S) + kappa2 * tensor.astype(float))


def joint_relu_drift(S) -> np.ndarray:
    """(κ₁ − 𝒱)/2 with the arc-cosine kernel κ₁ = 2E[φ(g)φ(g′)] of φ = max(·, 0) and, for tangents, of φ′(g) ġ."""
    m = len(S) // 2
    kernel = S.copy()
    for a, b in product(range(m), repeat=2):
        if a == b:
            continue
        part = _quadrant(S[np.ix_([a, b, m + a, m + b], [a, b, m + a, m + b])])
        kernel[a, b] = part[0, 1]
        kernel[a, m + b], kernel[m + b, a] = part[0, 3], part[0, 3]
        kernel[m + a, m + b] = part[2, 3]
    return (kernel - S) / 2


def _quadrant(S) -> np.ndarray:
    """2E[y yᵀ 1(g > 0) 1(g′ > 0)] for normals y = (g, g′, ġ, ġ′), by quadrature over the angle of (g, g′)."""
    sd = np.sqrt(np.diag(S)[:2])
    rho = S[0, 1] / sd.prod()
    root = sd[:, None] * np.array([[1.0, 0.0], [rho, math.sqrt(1 - rho**2)]])
    given = S[:, :2] @ np.linalg.inv(root).T  # y given z, with (g, g′) = root z
    left = S - given @ given.T
    # g > 0 and g′ > 0 for angles of z from arccos ρ − π/2 to π/2; the squared radius has mean 2.
    nodes, weights = np.polynomial.legendre.leggauss(40)
    width = math.pi - math.acos(rho)
    angles, weights = math.pi / 2 - width * (1 - nodes) / 2, weights * width / 2 / (2 * math.pi)
    z = np.stack([np.cos(angles), np.sin(angles)])
    return 2 * (left * weights.sum() + 2 * given @ (z * weights) @ z.T @ given.T)


def _mask(layer, tokens: int) -> np.ndarray:
    """The mask of X and X + εẊ, which attend to their own tokens."""
    return np.kron(np.eye(2, dtype=bool), pattern_of(layer).mask(tokens))


def _two_prompts(S) -> tuple[np.ndarray, np.ndarray]:
    """The covariance of X and X + εẊ in exact fractions, and J."""
    m = len(S) // 2
    exact = np.vectorize(Fraction, otypes=[object])
    identity, zero = exact(np.eye(m)), exact(np.zeros((m, m)))
    K = np.block([[identity, zero], [identity, EPSILON * identity]])
    J = np.block([[identity, zero], [-identity / EPSILON, identity / EPSILON]])
    return K @ exact(S) @ K.T, J
