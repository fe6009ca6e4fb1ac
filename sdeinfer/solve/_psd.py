"""A Diffrax solver that steps a factor X of V = XXᵀ, so that V stays positive semi-definite for every step size."""

from collections.abc import Callable
from typing import ClassVar

import diffrax
import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from sdeinfer.covariance import identity_like, is_positive_definite, matmul, transpose
from sdeinfer.layers import Limit, LimitSteps
from sdeinfer.solve._steps import psd_step
from sdeinfer.solve._tangent_step import tangent_psd_step


class CovarianceTerm(diffrax.AbstractTerm):
    """The covariance SDE of Corollary 4.3 as one Diffrax term: its coefficients and its Brownian motion.

    It has no vector field, because `PSDEuler` does not step along one.

    Attributes:
        limit: coefficients of the SDE: scalars, or one value per path; `LimitSteps` where they change with time.
        brownian: Brownian motion of shape (*normals, *paths), with the `Limit.normals` of m tokens.
    """

    limit: Limit | LimitSteps
    brownian: diffrax.AbstractBrownianPath

    def vf(self, t, y, args) -> Limit:
        """The coefficients at time t."""
        return self.limit.at(t)

    def contr(self, t0, t1, **kwargs):
        """Step in depth-time and Brownian increment."""
        return t1 - t0, self.brownian.evaluate(t0, t1)

    def prod(self, vf: Limit, control) -> Float[Array, "m m ..."]:
        """Not defined: the step is not linear in the increments."""
        raise NotImplementedError("the covariance SDE is stepped by PSDEuler only")


class PSDEuler(diffrax.AbstractItoSolver):
    """Solver of weak order 1 for the covariance SDE, which steps a factor of V for many paths at once.

    The state y is the factor X, of shape (m, m, *paths); or, with tangents, the factor [X; Ẋ] of the joint covariance
    of tokens and tangents, of shape (2m, 2m, *paths). The solver state is the stopping time of each path, +∞ while the
    path runs; a stopped path keeps its state. A path is stopped

    - at the end of the step in which an eigenvalue of V reaches `lowest` or `highest` (Definition 4.1), and
    - at the start of a step over which attention's drift would change V by more than V itself: the drift is cubic, so
      the path explodes within about that step (§4.4).

    Attributes:
        lowest: eigenvalue of V at or below which a path is stopped; None for no bound.
        highest: eigenvalue of V at or above which a path is stopped; None for no bound.
        tangents: whether the state has tangents.
    """

    lowest: Float[Array | np.ndarray, ""] | None = None
    highest: Float[Array | np.ndarray, ""] | None = None
    tangents: bool = eqx.field(default=False, static=True)
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
        advance = tangent_psd_step if self.tangents else psd_step
        y1, change = advance(
            terms.vf((t0 + t1) / 2, y0, None), jnp.where(running, y0, identity_like(y0)), h.astype(y0.dtype), G
        )
        stopped = jnp.where(running & ~(change <= 1), t0, stopped)
        y1 = jnp.where(jnp.isinf(stopped), y1, y0)
        stopped = jnp.where(jnp.isinf(stopped) & self._outside(y1), t1, stopped)
        return y1, None, {"y0": y0, "y1": y1}, stopped, diffrax.RESULTS.successful

    def func(self, terms, t0, y0, args):
        """Not defined: there is no vector field."""
        raise NotImplementedError("the covariance SDE has no vector field along which to step")

    def normals(self, limit: Limit | LimitSteps, rows: int) -> tuple[int, int]:
        """Shape of the standard normals that advance a factor of so many rows by one step."""
        return (rows, 2 * rows) if self.tangents else limit.normals(rows)

    def _outside(self, X):
        X = X[: len(X) // 2] if self.tangents else X
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
