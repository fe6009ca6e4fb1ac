"""Growth of small perturbations of the uniform state, for Q = K = V = I."""

import numpy as np
from jaxtyping import Float
from scipy.optimize import brentq
from scipy.special import gammaln, ive

from sdeinfer._files import InputError


def growth_rates(
    beta: float, *, dimension: int, modes: int = 32, normalised: bool = True
) -> Float[np.ndarray, " modes"]:
    """Growth rates λ_1 … λ_modes of the modes about uniformly distributed tokens.

    A perturbation along the gradient of a spherical harmonic of degree k on S^{D−1} grows like exp(λ_k t), with

        λ_k = k(k + D − 2) I_{k+ν}(β) / (β I_ν(β)),    ν = D/2 − 1.

    Without normalisation the rates are Γ(D/2) (2/β)^ν I_ν(β) times as large: k² I_k(β)/β on the circle.

    Arguments:
        beta: inverse temperature β > 0.
        dimension: dimension D ≥ 2 of the tokens.
        modes: number of modes.
        normalised: whether attention is normalised (softmax).
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
    """argmax_k λ_k of `growth_rates`: on the circle, the number of the first clusters of random tokens as n → ∞."""
    # λ_k is largest near k = √(2β), since I_k(β)/I_0(β) ≈ exp(−k²/2β).
    return 1 + int(np.argmax(growth_rates(beta, dimension=dimension, modes=int(4 * beta**0.5) + 8)))


def expected_first_clusters(beta: float, number: int) -> float:
    """Mean number of the first clusters of n independent, uniform tokens on the circle, by linear growth.

        (Σ_k k⁴ S_k / Σ_k k² S_k)^½,    S_k = I_k(β)² exp(2 λ_k t),    (2/n) Σ_k (exp(λ_k t) − 1)² = 1.

    The mode k of the tokens is normal with variance 1/n at time 0, and grows like exp(λ_k t). The time t is where the
    displacements would have a gradient of variance 1: tokens meet. The potential Σ_j exp(β⟨x, x_j⟩), with spectrum S,
    then has that mean number of maxima by the formula of Rice; `fastest_mode` for log n ≫ β.
    """
    if number < 2:
        raise InputError(f"number: at least 2 tokens are needed, got {number}")
    rates = growth_rates(beta, dimension=2, modes=int(8 * beta**0.5) + 16)
    # The fastest mode alone reaches the variance at `latest`.
    latest = np.log1p((number / 2) ** 0.5) / rates.max()
    time = brentq(lambda t: 2 / number * (np.expm1(rates * t) ** 2).sum() - 1, 0, latest)
    k = np.arange(1, len(rates) + 1)
    spectrum = (ive(k, beta) * np.exp(rates * time)) ** 2
    return float(((k**4 * spectrum).sum() / (k**2 * spectrum).sum()) ** 0.5)
