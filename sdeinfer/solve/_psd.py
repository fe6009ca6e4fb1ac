"""A Diffrax solver that steps a factor X of V = XXᵀ, so that V stays positive semi-definite for every step size.

Tests: `tests/solve/test_laws.py`.
"""
# pyright: reportIncompatibleVariableOverride=false
# Diffrax declares t0, t1 and levy_area as attributes and implements them as properties and fields, as this file does.

import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import diffrax
import equinox as eqx
import equinox.internal as eqxi
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Bool, Float, Integer, PRNGKeyArray

from sdeinfer.covariance._batched import gram, identity_like, is_positive_definite
from sdeinfer.layers._keys import NetworkKeys, key_words, threefry
from sdeinfer.solve._splitting import splitting_step
from sdeinfer.terms._limit import Limit, LimitSteps


class BrownianSteps(diffrax.AbstractBrownianPath):
    """A Brownian motion that is evaluated only over the steps of one fixed grid.

    Each increment is drawn from the key, the block and the start of its step, so that evaluating a step again, as
    checkpointed reverse-mode differentiation does, gives the same increment. Diffrax's `UnsafeBrownianPath` draws in
    the same way. This class adds blocks, which share a key; starts in single precision, so that grids that differ by
    rounding share their increments; and normals that are faster than those of `jax.random`.

    Attributes:
        shape: shape and type of one increment; paths are its last axis.
        key: PRNG key.
        block: number of this motion among those that share the key.
        together: number of paths to draw, of which the first are kept; None draws as many as `shape` has. A traced
            solve of few paths draws a whole block, as a concrete solve does, so that both have the same noise.
    """

    shape: jax.ShapeDtypeStruct = eqx.field(static=True)
    key: PRNGKeyArray
    block: Integer[Array | np.ndarray, ""] | int = 0
    together: int | None = eqx.field(static=True, default=None)
    levy_area: type[diffrax.BrownianIncrement] = eqx.field(static=True, default=diffrax.BrownianIncrement)

    @property
    def t0(self):
        return -jnp.inf

    @property
    def t1(self):
        return jnp.inf

    def evaluate(self, t0, t1=None, left: bool = True, use_levy: bool = False) -> Float[Array, "..."]:  # noqa: FBT001, FBT002
        """The increment over [t0, t1]."""
        del left
        if t1 is None or use_levy:
            raise ValueError("a Brownian motion on steps has increments only: no values at single times, no Lévy areas")
        t0, t1 = eqxi.nondifferentiable(t0), eqxi.nondifferentiable(t1)
        # `step_grid` refuses steps that single precision cannot resolve.
        start = jax.lax.bitcast_convert_type(jnp.asarray(t0, jnp.float32), jnp.uint32)
        # The top bit separates these keys from all others derived from the same key.
        block = jnp.asarray(self.block, jnp.uint32) | jnp.uint32(1 << 31)
        keys = NetworkKeys(*threefry(*key_words(self.key), block[None], start))
        *sizes, paths = self.shape.shape
        together = paths if self.together is None else self.together
        normals = keys.normals((math.prod(sizes) * together,), self.shape.dtype)
        draws = normals.reshape(*sizes, together)[..., :paths]
        return draws * jnp.sqrt(t1 - t0).astype(self.shape.dtype)


class CovarianceTerm(diffrax.AbstractTerm):
    """The covariance SDE of Corollary 4.3 as one Diffrax term: its coefficients and its Brownian motion.

    It has no vector field, because the solver does not step along one.

    Attributes:
        limit: coefficients of the SDE: scalars, or one value per path; `LimitSteps` where they change with time.
        brownian: Brownian motion of shape (*normals, *paths), with the limit's `normals` of m tokens.
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
        raise NotImplementedError("the covariance SDE is stepped by PSDSplitting only")


class SolverState(NamedTuple):
    """The stopping time of each path, +∞ while it runs; and whether the number of steps so far is odd."""

    stopped: Float[Array, "..."]
    odd: Bool[Array, ""]


class PSDSplitting(diffrax.AbstractItoSolver):
    """Solver of weak order 2, which steps a factor of V for many paths at once by the flows of the SDE's terms.

    The state y is the factor X, of shape (m, m, *paths); or, with tangents, the factor [X; Ẋ] of the joint covariance
    of tokens and tangents, of shape (2m, 2m, *paths). The flows are those of the drifts that add covariances (ReLU), of
    the drifts that move the factor (attention), and of the noises, see `solve._splitting`. The flows of a step are
    composed in this order and, in every other step, in reverse order: two steps together are then symmetric. An odd
    number of steps leaves one error of O(h²).

    The solver state has the stopping time of each path; a stopped path keeps its state. A path is stopped

    - at the end of the step in which an eigenvalue of V reaches `lowest` or `highest` (Fig. 5), and
    - at the start of a step over which its drift would change V by more than half of V, that overflows, or that ends
      where the path explodes at once: the attention drift is cubic, so the path explodes within about that step (§4.4).
      With dV/dt = θ₁ T V and T quadratic in V, V is infinite after the time 1/(2θ₁T). At the bound θ₁ T h = ½ this
      time is h: the end of the step.

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

    def init(self, terms, t0, t1, y0, args) -> SolverState:
        """No steps so far; a path that starts outside the bounds is stopped at t0."""
        return SolverState(jnp.where(self._outside(y0), t0, jnp.inf), jnp.asarray(False))  # noqa: FBT003

    def step(self, terms, t0, t1, y0, args, solver_state, made_jump):
        """Step the factor from t0 to t1."""
        del args, made_jump
        stopped, odd = solver_state
        h, G = terms.contr(t0, t1)
        # A stopped path steps from the identity: its own factor may be ill-conditioned, which would slow all paths.
        running = jnp.isinf(stopped)
        start = jnp.where(running, y0, identity_like(y0))
        limit = terms.vf((t0 + t1) / 2, y0, None)
        y1, explodes = splitting_step(limit, start, h.astype(y0.dtype), G, odd, tangents=self.tangents)
        stopped = jnp.where(running & explodes, t0, stopped)
        y1 = jnp.where(jnp.isinf(stopped), y1, y0)
        stopped = jnp.where(jnp.isinf(stopped) & self._outside(y1), t1, stopped)
        return y1, None, {"y0": y0, "y1": y1}, SolverState(stopped, ~odd), diffrax.RESULTS.successful

    def func(self, terms, t0, y0, args):
        """Not defined: there is no vector field."""
        raise NotImplementedError("the covariance SDE has no vector field along which to step")

    def _outside(self, X):
        X = X[: len(X) // 2] if self.tangents else X
        V, outside = gram(X), jnp.zeros(X.shape[2:], bool)
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
