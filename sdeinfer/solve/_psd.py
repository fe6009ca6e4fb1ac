"""A Diffrax solver that steps a factor X of V = XXᵀ, so that V stays positive semi-definite whatever the step."""

from collections.abc import Callable
from typing import ClassVar

import diffrax
import jax.numpy as jnp
from jaxtyping import Array, Float

from sdeinfer.covariance import centre, factor_noise, semidefinite_cholesky
from sdeinfer.layers import Limit, attention_drift_vectors, relu_drift
from sdeinfer.solve._brownian import BrownianSteps


class CovarianceTerm(diffrax.AbstractTerm):
    """The covariance SDE of Corollary 4.3 as one Diffrax term: its coefficients and its Brownian motion.

    It has no vector field of its own, since `PSDEuler` does not step along one.

    Attributes:
        limit: coefficients of the SDE.
        brownian: Brownian motion of shape (2, m, m), see `covariance.factor_noise`.
    """

    limit: Limit
    brownian: BrownianSteps

    def vf(self, t, y, args) -> Limit:
        """The coefficients."""
        return self.limit

    def contr(self, t0, t1, **kwargs):
        """Step in depth-time and Brownian increment."""
        return t1 - t0, self.brownian.evaluate(t0, t1)

    def prod(self, vf: Limit, control) -> Float[Array, "m m"]:
        """Not defined: the step is not linear in the increments."""
        raise NotImplementedError("the covariance SDE is stepped by PSDEuler only")


class PSDEuler(diffrax.AbstractItoSolver):
    """One step of weak order 1 that acts on the factor: X′ = (left) X (right), then the arc-cosine kernel.

    - Noise from the right: X ← (1 − a m h/4) X + X E. The mean of E Eᵀ is (a m/2 + κ² tr(K²)/m²) h I with K = XᵀH_mX:
      its first part restores the norm, its second is a part of the attention drift's first term.
    - The rest of that term: X ← X √(1 + h (θ₁ − κ²) tr(K²)/m²), where θ₁ ≥ κ² since γ ≤ 1.
    - The attention drift's second term: X ← (I + h θ₁/(2m) v sᵀ) X.
    - The ReLU's drift: V ← (1 − w) V + w κ₁(V) with w = 1 − e^{−hθ₂/2} and κ₁ = V + 2B₂ the arc-cosine kernel, which is
      positive semi-definite; X becomes the Cholesky factor of the sum.
    """

    term_structure: ClassVar = CovarianceTerm
    interpolation_cls: ClassVar[Callable[..., diffrax.LocalLinearInterpolation]] = diffrax.LocalLinearInterpolation

    def order(self, terms) -> None:
        """No order of its own as an ODE solver."""
        return None

    def strong_order(self, terms) -> float:
        """½, as Euler–Maruyama with noise that does not commute."""
        return 0.5

    def init(self, terms, t0, t1, y0, args) -> None:
        """No state between steps."""
        return None

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        """Step the factor from t0 to t1."""
        del args, solver_state, made_jump
        h, G = terms.contr(t0, t1)
        y1 = psd_step(terms.vf(t0, y0, None), y0, h.astype(y0.dtype), G)
        return y1, None, {"y0": y0, "y1": y1}, None, diffrax.RESULTS.successful

    def func(self, terms, t0, y0, args):
        """Not defined: there is no vector field."""
        raise NotImplementedError("the covariance SDE has no vector field along which to step")


def psd_step(
    limit: Limit,
    X: Float[Array, "m m"],
    h: Float[Array, ""],
    G: Float[Array, "2 m m"],
) -> Float[Array, "m m"]:
    """Advance a factor of V by h; G holds 2m² normals of variance h."""
    tokens = X.shape[0]
    V = X @ X.T
    v, s = attention_drift_vectors(V)
    trace = jnp.sum(V * centre(V)) / tokens**2
    E = factor_noise(X, G, limit.linear_noise, limit.attention_noise)

    X = (1 - h * limit.linear_noise * tokens / 4) * X + X @ E
    X = X * jnp.sqrt(1 + h * (limit.attention_drift - limit.attention_noise) * trace)
    X = X + h * limit.attention_drift / (2 * tokens) * v[:, None] * (s @ X)[None, :]
    return _align(X, 1 - jnp.exp(-h * limit.relu_drift / 2))


def _align(X: Float[Array, "m m"], w: Float[Array, ""]) -> Float[Array, "m m"]:
    """A factor of (1 − w) V + w κ₁(V) = V + 2w B₂(V); X itself where w = 0, so that no factor is rebuilt in vain.

    Tokens whose correlation has reached ±1 in rounding make the sum singular: their factor has columns of zeros.
    """
    V = X @ X.T
    active = w > 0
    aligned = semidefinite_cholesky(jnp.where(active, V + 2 * w * relu_drift(V), jnp.eye(X.shape[0], dtype=X.dtype)))
    return jnp.where(active, aligned, X)
