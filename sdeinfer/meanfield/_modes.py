"""Growth of small perturbations of the uniform state, for Q = K = V = I."""

import numpy as np
from jaxtyping import Float
from scipy.special import gammaln, ive

from sdeinfer._files import InputError


def growth_rates(
    beta: float, *, dimension: int, modes: int = 32, normalised: bool = True
) -> Float[np.ndarray, " modes"]:
    """Growth rates λ_1 … λ_modes of the modes about uniformly distributed tokens.

    A perturbation along the gradient of a spherical harmonic of degree k on S^{D−1} grows like exp(λ_k t), with

        λ_k = k(k + D − 2) I_{k+ν}(β) / (β I_ν(β)),    ν = D/2 − 1,

    by the theorem of Funk and Hecke: exp(β⟨x, y⟩) has the eigenvalue a_k = Γ(D/2) (2/β)^ν I_{k+ν}(β) on them, whose
    gradient the flow ascends. Without normalisation the rates are a_0 times as large: k² I_k(β)/β on the circle.

    Arguments:
        beta: inverse temperature β > 0.
        dimension: dimension D ≥ 2 of the tokens.
        modes: number of modes.
        normalised: whether attention is normalised (softmax).

    Raises:
        InputError: for β ≤ 0 or D < 2.
    """
    if not beta > 0:
        raise InputError(f"beta: must be positive, got {beta:g}")
    if dimension < 2:
        raise InputError(f"dimension: at least 2 is needed, got {dimension}")
    k, nu = np.arange(1, modes + 1), dimension / 2 - 1
    # I_ν(β) e^{−β}: the factor e^β cancels in the ratio, and overflows without it.
    rates = k * (k + dimension - 2) * ive(k + nu, beta) / (beta * ive(nu, beta))
    if normalised:
        return rates
    return rates * np.exp(gammaln(nu + 1) + nu * np.log(2 / beta) + beta) * ive(nu, beta)


def fastest_mode(beta: float, *, dimension: int) -> int:
    """argmax_k λ_k: on the circle, the number of the first clusters of many tokens from a uniform random start.

    Arguments:
        beta: inverse temperature β > 0.
        dimension: dimension D ≥ 2 of the tokens.
    """
    # λ_k is largest near k = √β, since I_k(β)/I_0(β) ≈ exp(−k²/2β).
    return 1 + int(np.argmax(growth_rates(beta, dimension=dimension, modes=int(4 * beta**0.5) + 8)))
