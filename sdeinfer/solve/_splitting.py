"""A step of weak order 2 as a composition of flows of the terms of a limit.

Every flow maps a factor X of V = XXᵀ to a factor, so that V stays positive semi-definite. With tangents the state is a
factor Z = [X; Ẋ] of 𝒱 = [[V, Γ], [Γᵀ, D]], the limit ε → 0 of two prompts, X and X + εẊ, through one network. A flow
that moves X by its tokens and the normals moves Ẋ by its derivative along Ẋ. A kernel k(x_α, x_β) that is added to V
adds its derivative in the second argument to Γ and the mixed derivative in both to D, which is again a positive
semi-definite kernel: the covariance of a random function and of its derivative.
"""

import functools
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from sdeinfer.covariance._batched import gram, identity_like, semidefinite_cholesky
from sdeinfer.layers._wishart import with_tangents
from sdeinfer.terms import AbstractTerm
from sdeinfer.terms._base import AddedKernel, is_present
from sdeinfer.terms._limit import Limit

type Flow = Callable[[Array], Array]

EXPLOSION_CHANGE = 0.5
"""Relative change of V by the drift over a step, above which a path explodes."""

NEXT_STEP_FRACTION = 0.01
"""Fraction of the next step over which a path that explodes counts as exploded in this step."""


def splitting_step(
    limit: Limit,
    X: Float[Array, "rows rows ..."],
    h: Float[Array, ""],
    G: Array,
    odd: Bool[Array, ""],
    *,
    tangents: bool,
) -> tuple[Float[Array, "rows rows ..."], Bool[Array, "..."]]:
    """The factor after a step h, and whether the path explodes within about that step. Ignore the factor where it does.

    G are independent normals of variance h, with the shape of `Limit.normals`; flows run in reverse order where `odd`.
    """
    tokens = len(X) // 2 if tangents else len(X)
    explodes = explosion(limit, X[:tokens], h)
    # The terms of a path that explodes must not overflow.
    X = jnp.where(explodes, identity_like(X), X)
    moved = composed(flows_of(limit, h, G, tangents=tangents), X, odd)
    # Noise may take a path so far that it explodes at once, or that the drift after it overflows: its V would pass for
    # finite where no step follows. No entry of V exceeds the sum.
    explodes |= explosion(limit, moved[:tokens], NEXT_STEP_FRACTION * h)
    explodes |= ~jnp.isfinite(jnp.sum(moved * moved, axis=(0, 1)))
    return moved, explodes


def flows_of(limit: Limit, h: Float[Array, ""], G: Float[Array, "k columns ..."], *, tangents: bool) -> list[Flow]:
    """The flows of a step, see `splitting_step`: of all kernels together, of each other drift, of each noise."""
    parts = [(term.of_prompts() if tangents else term, c) for term, c in limit.parts.items()]
    kernels = [kernel for term, c in parts if (kernel := term.kernel(c)) is not None]
    # The flow of `AbstractTerm` does not move X, and need not be compiled.
    moving = [(term, c) for term, c in parts if type(term).flow is not AbstractTerm.flow]
    drifts = [functools.partial(term.flow, c, h=h) for term, c in moving]
    ends = np.cumsum([term.columns * len(G) for term, _ in parts])
    noises = [
        functools.partial(term.noise, c, h=h, G=normals)
        for (term, c), normals in zip(parts, jnp.split(G, ends[:-1], axis=1), strict=True)
        if term.columns
    ]
    # Any order is of weak order 2. In this one attention's noise comes before the linear noise, as in
    # docs/theory/solver.md.
    flows: list[Flow] = [*drifts, *reversed(noises)]
    if tangents:
        flows = [functools.partial(with_tangents, flow) for flow in flows]
    if kernels:
        flows = [functools.partial(kernel_flow, kernels, h=h, tangents=tangents), *flows]
    return flows


def composed(flows: list[Flow], X: Array, odd: Bool[Array, ""]) -> Array:
    """Apply the flows in their order, or in reverse order; each is compiled once."""
    order = jnp.arange(len(flows))
    X, _ = jax.lax.scan(lambda X, i: (jax.lax.switch(i, flows, X), None), X, jnp.where(odd, order[::-1], order))
    return X


def explosion(limit: Limit, X: Float[Array, "m k ..."], h: Float[Array, ""]) -> Bool[Array, "..."]:
    """Whether the drift would change V by more than half of V over a step h."""
    explodes = jnp.zeros(X.shape[2:], bool)
    for term, c in limit.parts.items():
        change = term.change(c, X, h)
        if change is not None:
            # Terms that are absent are powers of X, and may overflow; NaN, where V overflows, counts as more.
            explodes |= is_present(c) & ~(change <= EXPLOSION_CHANGE)
    return explodes


def kernel_flow(kernels: list[AddedKernel], X: Array, h: Float[Array, ""], *, tangents: bool) -> Array:
    """The drift dV/dt = N(V) − λV of all kernels together, or that of the joint covariance, on a factor X.

    The exponential Heun scheme, with s = λh,

        V* = e^{−s} V + h φ₁ N(V),    V′ = e^{−s} V + h (φ₁ − φ₂) N(V) + h φ₂ N(V*),

    φ₁ = (1 − e^{−s})/s and φ₂ = (e^{−s} − 1 + s)/s², adds positive semi-definite matrices with positive weights. X
    becomes a Cholesky factor of V′; without such a drift it stays as it is, without a factorisation.
    """
    rate = functools.reduce(operator.add, [kernel.decay for kernel in kernels])
    present = functools.reduce(operator.or_, [kernel.present for kernel in kernels])

    def added(V):
        functions = [kernel.of_tangents if tangents else kernel.of_tokens for kernel in kernels]
        return functools.reduce(operator.add, [function(V) for function in functions])

    def factorise(X):
        V, s = gram(X), h * rate
        decay, (first, second) = jnp.exp(-s), _phi(s)
        N = added(V)
        N_end = added(decay * V + h * first * N)
        end = semidefinite_cholesky(decay * V + h * (first - second) * N + h * second * N_end)
        return jnp.where(present, end, X)

    return jax.lax.cond(jnp.any(present), factorise, lambda X: X, X)


def _phi(s: Float[Array, "..."]) -> tuple[Array, Array]:
    """φ₁ and φ₂ of s ≥ 0; by their series where s is small."""
    small = s < 0.1
    away = jnp.where(small, 1.0, s)
    decayed = -jnp.expm1(-away)
    first = 1 - s / 2 * (1 - s / 3 * (1 - s / 4 * (1 - s / 5 * (1 - s / 6 * (1 - s / 7)))))
    second = (1 - s / 3 * (1 - s / 4 * (1 - s / 5 * (1 - s / 6 * (1 - s / 7 * (1 - s / 8)))))) / 2
    return jnp.where(small, first, decayed / away), jnp.where(small, second, (away - decayed) / away**2)
