"""A Diffrax solver that steps a factor X of V = XXᵀ, so that V stays positive semi-definite for every step size."""

from collections.abc import Callable
from typing import ClassVar

import diffrax
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from sdeinfer.covariance import (
    centred_gram,
    factor_noise,
    identity_like,
    is_positive_definite,
    matmul,
    semidefinite_cholesky,
    total,
    transpose,
)
from sdeinfer.layers import Limit, relu_drift
from sdeinfer.solve._causal import causal_psd_step


class CovarianceTerm(diffrax.AbstractTerm):
    """The covariance SDE of Corollary 4.3 as one Diffrax term: its coefficients and its Brownian motion.

    It has no vector field, because `PSDEuler` does not step along one.

    Attributes:
        limit: coefficients of the SDE: scalars, or one value per path.
        brownian: Brownian motion of shape (*normals, *paths), with the `Limit.normals` of m tokens.
    """

    limit: Limit
    brownian: diffrax.AbstractBrownianPath

    def vf(self, t, y, args) -> Limit:
        """The coefficients."""
        return self.limit

    def contr(self, t0, t1, **kwargs):
        """Step in depth-time and Brownian increment."""
        return t1 - t0, self.brownian.evaluate(t0, t1)

    def prod(self, vf: Limit, control) -> Float[Array, "m m ..."]:
        """Not defined: the step is not linear in the increments."""
        raise NotImplementedError("the covariance SDE is stepped by PSDEuler only")


class PSDEuler(diffrax.AbstractItoSolver):
    """Solver of weak order 1 for the covariance SDE, which steps a factor of V for many paths at once.

    The state y is the factor X, of shape (m, m, *paths). The solver state is the stopping time of each path, +∞ while
    the path runs; a stopped path keeps its X. A path is stopped

    - at the end of the step in which an eigenvalue of V reaches `lowest` or `highest` (Definition 4.1), and
    - at the start of a step over which attention's drift would change V by more than V itself: the drift is cubic, so
      the path explodes within about that step (§4.4).

    Attributes:
        lowest: eigenvalue of V at or below which a path is stopped; None for no bound.
        highest: eigenvalue of V at or above which a path is stopped; None for no bound.
    """

    lowest: Float[Array | np.ndarray, ""] | None = None
    highest: Float[Array | np.ndarray, ""] | None = None
    term_structure: ClassVar = CovarianceTerm
    interpolation_cls: ClassVar[Callable[..., diffrax.LocalLinearInterpolation]] = diffrax.LocalLinearInterpolation

    def order(self, terms) -> None:
        """None: the solver has no order for ODEs."""
        return None

    def strong_order(self, terms) -> float:
        """½, as for Euler–Maruyama with non-commutative noise."""
        return 0.5

    def init(self, terms, t0, t1, y0, args) -> Float[Array, "..."]:
        """The stopping time: t0 for a path that starts outside the bounds, otherwise +∞."""
        return jnp.where(self._outside(y0), t0, jnp.inf)

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        """Step the factor from t0 to t1."""
        del args, made_jump
        stopped = solver_state
        h, G = terms.contr(t0, t1)
        # A stopped path steps from the identity: its own factor may be ill-conditioned, which would slow all paths.
        running = jnp.isinf(stopped)
        limit = terms.vf(t0, y0, None)
        advance = causal_psd_step if limit.causal else psd_step
        y1, change = advance(limit, jnp.where(running, y0, identity_like(y0)), h.astype(y0.dtype), G)
        stopped = jnp.where(running & ~(change <= 1), t0, stopped)
        y1 = jnp.where(jnp.isinf(stopped), y1, y0)
        stopped = jnp.where(jnp.isinf(stopped) & self._outside(y1), t1, stopped)
        return y1, None, {"y0": y0, "y1": y1}, stopped, diffrax.RESULTS.successful

    def func(self, terms, t0, y0, args):
        """Not defined: there is no vector field."""
        raise NotImplementedError("the covariance SDE has no vector field along which to step")

    def _outside(self, X):
        outside = jnp.zeros(X.shape[2:], bool)
        if self.lowest is None and self.highest is None:
            return outside
        V = matmul(X, transpose(X))
        if self.lowest is not None:
            outside |= below(V, self.lowest)
        if self.highest is not None:
            outside |= above(V, self.highest)
        return outside


def below(V: Float[Array, "m m ..."], lowest: ArrayLike) -> Array:
    """Whether an eigenvalue of V is at or below `lowest`: V − lowest·I is not positive definite."""
    return ~is_positive_definite(V - lowest * identity_like(V))


def above(V: Float[Array, "m m ..."], highest: ArrayLike) -> Array:
    """Whether an eigenvalue of V is at or above `highest`: highest·I − V is not positive definite."""
    return ~is_positive_definite(jnp.asarray(highest * identity_like(V) - V))


@jax.jit
def psd_step(
    limit: Limit,
    X: Float[Array, "m m ..."],
    h: Float[Array, ""],
    G: Float[Array, "m m ..."],
) -> tuple[Float[Array, "m m ..."], Float[Array, "..."]]:
    """Advance a factor of V by h; every term acts on X from the left or from the right, or is the arc-cosine kernel.

    - Noise from the right: X ← X (I + E), E with independent rows of covariance h ((a/2) I + (κ²/m²) K²), K = XᵀH_mX.
      The mean of (I + E)(I + E)ᵀ is 1 + h (a m/2 + κ² T) times I, with T = tr(K²)/m² = tr(V C)/m².
    - Dividing V by this factor keeps its mean; multiplying V by 1 + h θ₁ T is the attention drift's first term.
    - The attention drift's second term: X ← (I + h θ₁/(2m) v sᵀ) X, with v = diag V and s the centred diag C.
    - The ReLU's drift: V ← (1 − w) V + w κ₁(V) with w = 1 − e^{−hθ₂/2} and κ₁ = V + 2B₂ the arc-cosine kernel, which is
      positive semi-definite; X becomes a Cholesky factor of the sum.

    Arguments:
        limit: coefficients of the SDE.
        X: factor of V.
        h: step in depth-time.
        G: independent normals of variance h.

    Returns:
        a factor of V after the step; and the change of V by attention's drift at the start of the step, relative to V.
        Where this change exceeds 1 the factor is finite but invalid.
    """
    tokens = len(X)
    centred, K = centred_gram(X)
    # Without attention these terms do not enter the step and must not overflow.
    attends = (limit.attention_drift > 0) | (limit.attention_noise > 0)
    K, centred = jnp.where(attends, K, 0.0), jnp.where(attends, centred, 0.0)
    T = total(total(K * K)) / tokens**2
    centred_norms = total(centred * centred, axis=1)
    s = centred_norms - total(centred_norms) / tokens
    push = h * limit.attention_drift / (2 * tokens) * total(X * X, axis=1)

    change = _relative_change(h * limit.attention_drift * T, push, s, X)
    explodes = ~(change <= 1)  # NaN, where V overflows, counts as more than 1
    K, T, push = (jnp.where(explodes, 0.0, x) for x in (K, T, push))

    spread = limit.linear_noise * tokens / 2 + limit.attention_noise * T
    X = X + matmul(X, factor_noise(K, G, limit.linear_noise, limit.attention_noise))
    X = X * jnp.sqrt((1 + h * limit.attention_drift * T) / (1 + h * spread))
    X = X + push[:, None] * total(s[:, None] * X)[None]
    return _align(X, -jnp.expm1(-h * limit.relu_drift / 2)), change


def _relative_change(growth, push, s, X):
    """Relative growth of V by the first term of attention's drift, plus twice ‖push (sᵀX)‖/‖X‖ for the second term."""
    growth, push, s, X = jax.lax.stop_gradient((growth, push, s, X))
    size = total(total(X * X))
    turned = total(push**2) * total(total(s[:, None] * X) ** 2)
    return growth + 2 * jnp.sqrt(turned / jnp.where(size > 0, size, 1.0))


def _align(X: Float[Array, "m m ..."], w: Float[Array, "..."]) -> Float[Array, "m m ..."]:
    """A factor of (1 − w) V + w κ₁(V) = V + 2w B₂(V); X itself where w = 0, without a factorisation."""

    def factorise(X):
        V = matmul(X, transpose(X))
        return jnp.where(w > 0, semidefinite_cholesky(V + 2 * w * relu_drift(V)), X)

    return jax.lax.cond(jnp.any(w > 0), factorise, lambda X: X, X)
