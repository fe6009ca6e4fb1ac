"""Self-attention as a flow of tokens on the sphere."""

import functools
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.core import Tracer
from jaxtyping import Array, Float, PRNGKeyArray
from numpy.typing import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.layers._over_depth import as_module

_product = functools.partial(jnp.matmul, precision="highest")
"""JAX's default on a GPU rounds factors in single precision to 11 bits: an error of 7·10⁻⁴ in the tokens at T = 2."""


class SelfAttentionFlow(eqx.Module):
    """Tokens x_i on the sphere S^{D−1} that move by self-attention with fixed matrices.

        ẋ_i = P_{x_i} [ (1/H) Σ_h V_h Σ_j p^h_ij x_j + mlp(x_i) ],    P_x = I − x xᵀ,

    with p^h = softmax of β⟨Q_h x_i, K_h x_j⟩ over j or, unnormalised, p^h_ij = exp(β⟨Q_h x_i, K_h x_j⟩)/n. It is the
    limit of residual layers that add `step` times the bracket and normalise, as step → 0; see `layer`.

    Attributes:
        beta: inverse temperature β ≥ 0.
        Q: query matrices, shape (D, D) or (heads, D, D); None for the identity.
        K: key matrices, likewise.
        V: value matrices, likewise.
        heads: number of heads H.
        normalised: whether attention is normalised (softmax).
        mlp: function of one token, shape (D,) → (D,), whose field is added; None for none.
    """

    beta: Float[Array, ""]
    Q: Float[Array, "heads D D"] | None
    K: Float[Array, "heads D D"] | None
    V: Float[Array, "heads D D"] | None
    mlp: Callable[[Float[Array, " D"]], Float[Array, " D"]] | None
    heads: int = eqx.field(static=True)
    normalised: bool = eqx.field(static=True)

    def __init__(
        self,
        beta: ArrayLike,
        Q: ArrayLike | None = None,
        K: ArrayLike | None = None,
        V: ArrayLike | None = None,
        *,
        heads: int = 1,
        normalised: bool = True,
        mlp: Callable[[Float[Array, " D"]], Float[Array, " D"]] | None = None,
    ):
        """Make a flow; an InputError for β that is not one number ≥ 0, and matrices of other shapes."""
        self.beta = jnp.asarray(beta, jnp.result_type(float, beta))
        if self.beta.ndim:
            raise InputError(f"beta: one number is needed, got shape {self.beta.shape}")
        if not isinstance(self.beta, Tracer) and not self.beta >= 0:
            raise InputError(f"beta: must be at least 0, got {float(self.beta):g}")
        matrices = {"Q": Q, "K": K, "V": V}
        self.Q, self.K, self.V = (_per_head(name, matrix, heads) for name, matrix in matrices.items())
        sizes = {matrix.shape[-1] for matrix in (self.Q, self.K, self.V) if matrix is not None}
        if len(sizes) > 1:
            raise InputError(f"Q, K, V: must have one size D, got {sorted(sizes)}")
        self.mlp = mlp if mlp is None else as_module(mlp)
        self.heads, self.normalised = heads, normalised

    def attention(
        self, x: Float[Array, "q D"], tokens: Float[Array, "n D"], weights: Float[Array, " n"] | None = None
    ) -> Float[Array, "heads q n"]:
        """The attention p of points x on the sphere to tokens, for each head; weights have sum 1, None for 1/n each."""
        self._require_size(x)
        p = _masses(tokens, weights) * self._kernel(x, tokens)
        return p / p.sum(axis=-1, keepdims=True) if self.normalised else p

    def residual(
        self, x: Float[Array, "q D"], tokens: Float[Array, "n D"], weights: Float[Array, " n"] | None = None
    ) -> Float[Array, "q D"]:
        """The branch of a residual layer at x per unit of step: the mean of the heads and the MLP, not projected."""
        self._require_size(x)
        # Divided by their sums after the product: a pass over n² numbers less than the mean by `attention`.
        kernel, masses = self._kernel(x, tokens), _masses(tokens, weights)[:, None]
        if self.normalised:
            sums = _product(kernel, jnp.concatenate([masses * tokens, masses], axis=1))
            means = sums[..., :-1] / sums[..., -1:]
        else:
            means = _product(kernel, masses * tokens)
        change = (means if self.V is None else _product(means, self.V.mT)).mean(axis=0)
        if self.mlp is None:
            return change
        added = jax.vmap(self.mlp)(x)
        if added.shape != x.shape:
            raise InputError(f"mlp: a function of shape {x.shape[1:]} to itself is needed, got {added.shape[1:]}")
        return change + added

    def velocity(
        self, x: Float[Array, "q D"], tokens: Float[Array, "n D"], weights: Float[Array, " n"] | None = None
    ) -> Float[Array, "q D"]:
        """The field of the measure Σ_j w_j δ(tokens_j), tangent to the sphere at x; arguments as of `attention`."""
        return tangent(x, self.residual(x, tokens, weights))

    def __call__(self, tokens: Float[Array, "n D"], weights: Float[Array, " n"] | None = None) -> Float[Array, "n D"]:
        """The velocity ẋ of the tokens."""
        return self.velocity(tokens, tokens, weights)

    def layer(
        self, tokens: Float[Array, "n D"], step: Float[Array, ""] | float, *, normalise: bool = True
    ) -> Float[Array, "n D"]:
        """One residual layer, x ← N(x + step · residual), of this depth-time: a step of Euler's method up to O(step²).

        Without `normalise` the tokens do not return to the sphere, as in a ResNet.
        """
        moved = tokens + step * self.residual(tokens, tokens)
        return on_sphere(moved) if normalise else moved

    def energy(self, tokens: Float[Array, "n D"], weights: Float[Array, " n"] | None = None) -> Float[Array, ""]:
        """The energy (1/2β) Σ_ij w_i w_j exp(β⟨Qx_i, Kx_j⟩), averaged over the heads.

        With Q = K = V = I it rises; without normalisation the flow is its gradient ascent, ẋ_i = n P ∂E/∂x_i.
        """
        masses = _masses(tokens, weights)
        kernel = jnp.exp(self._logits(tokens, tokens)).mean(axis=0)
        return _product(_product(masses, kernel), masses) / (2 * self.beta)

    def _require_size(self, x: Float[Array, "q D"]) -> None:
        for name, matrix in {"Q": self.Q, "K": self.K, "V": self.V}.items():
            if matrix is not None and matrix.shape[-1] != x.shape[-1]:
                raise InputError(f"{name}: tokens have {x.shape[-1]} components, got a matrix of {matrix.shape[-1]}")

    def _kernel(self, x: Float[Array, "q D"], tokens: Float[Array, "n D"]) -> Float[Array, "heads q n"]:
        logits = self._logits(x, tokens)
        largest = jax.lax.stop_gradient(logits.max(axis=-1, keepdims=True)) if self.normalised else 0.0
        return jnp.exp(logits - largest)

    def _logits(self, x: Float[Array, "q D"], tokens: Float[Array, "n D"]) -> Float[Array, "heads q n"]:
        logits = self.beta * _product(_applied(self.Q, x), _applied(self.K, tokens).mT)
        return jnp.broadcast_to(logits, (self.heads, *logits.shape[1:]))


def on_sphere(x: ArrayLike) -> Float[Array, "*batch D"]:
    """The nearest points of the unit sphere, x/‖x‖, of points x of shape (*batch, D)."""
    x = jnp.asarray(x)
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def tangent(x: Float[Array, "*batch D"], v: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
    """P_x v = v − ⟨x, v⟩ x, for x on the sphere."""
    return v - (x * v).sum(axis=-1, keepdims=True) * x


def random_tokens(number: int, dimension: int, *, key: PRNGKeyArray) -> Float[Array, "n D"]:
    """N independent tokens, uniform on the unit sphere S^{D−1} of this dimension D."""
    return on_sphere(jr.normal(key, (number, dimension)))


def _per_head(name: str, matrix: ArrayLike | None, heads: int) -> Float[Array, "heads D D"] | None:
    if matrix is None:
        return None
    given = jnp.asarray(matrix)
    matrices = given[None] if given.ndim == 2 else given
    if matrices.ndim != 3 or matrices.shape[1] != matrices.shape[2] or matrices.shape[0] not in (1, heads):
        raise InputError(f"{name}: shape (D, D) or ({heads}, D, D) is needed, got {given.shape}")
    return matrices


def _masses(tokens: Float[Array, "n D"], weights: Float[Array, " n"] | None) -> Float[Array, " n"]:
    return jnp.full(len(tokens), 1 / len(tokens), tokens.dtype) if weights is None else weights


def _applied(matrix: Float[Array, "heads D D"] | None, x: Float[Array, "n D"]) -> Float[Array, "heads n D"]:
    return x[None] if matrix is None else _product(x, matrix.mT)
