"""Residual blocks as layers, and the norms of their tokens, without gains and without the constant in the root."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.blocks._branch import AbstractBranch, check_bias
from sdeinfer.covariance._batched import diagonal, matmul
from sdeinfer.layers import AbstractLayer
from sdeinfer.layers._keys import NetworkKeys
from sdeinfer.layers._wishart import factor, residual_covariance, wishart_draws, wishart_factor
from sdeinfer.parameters import Parameter, distributions

STRENGTH = Parameter(
    "strength", "g", "strength √u σ of a residual branch", "log", lambda: distributions().LogNormal(-1.0, 2.0)
)
"""The default prior has 95 % between .007 and 19, for strengths of order 1/√L to 1."""


class Block(AbstractLayer):
    """A residual block with one branch: X′ = αX + g h(norm(X)) W/√u (Pre-LN), or norm(αX + g h(X) W/√u) (Post-LN).

    W has independent N(0, 1) entries and u rows, for u hidden features h of the branch; a network whose last matrix has
    entries of standard deviation σ has the strength g = √u σ. A Transformer layer is a `Stack` of two blocks.

    A block has no limit in n and d/n: it is sampled, with weights or without, and fitted to increments by the exact
    moments of its branch.

    Attributes:
        branch: `SelfAttention` or `MLP`, or a branch of your own.
        strength: g.
        norm: "layer" (LayerNorm), "rms" (RMSNorm) or None, without gains.
        position: "pre", for a norm of what the branch reads, or "post", for one of the sum.
        skip: α.
        bias: variance of the biases of the last linear map.
        dropout: p; training sets each entry of the increment to 0 with this probability, independently, and divides the
            others by 1 − p. Only networks with weights and moments have it, see `require_no_dropout`.
    """

    branch: AbstractBranch
    strength: Float[Any, ""] = STRENGTH.field(default=1.0)
    norm: Literal["layer", "rms"] | None = eqx.field(default=None, static=True)
    position: Literal["pre", "post"] = eqx.field(default="pre", static=True)
    skip: float = eqx.field(default=1.0, static=True)
    bias: float = eqx.field(default=0.0, static=True)
    dropout: float = eqx.field(default=0.0, static=True)

    def __check_init__(self):
        if not isinstance(self.branch, AbstractBranch):
            raise InputError(f"branch: a branch is needed, as si.blocks.MLP(), got {shown(self.branch)}")
        if self.norm not in ("layer", "rms", None):
            raise InputError(f"norm: one of layer, rms, None is needed, got {shown(self.norm)}")
        if self.position not in ("pre", "post"):
            raise InputError(f"position: 'pre' or 'post' is needed, got {shown(self.position)}")
        check_bias(self.bias)
        if not (isinstance(self.dropout, int | float) and 0 <= self.dropout < 1):
            raise InputError(f"dropout: a probability below 1 is needed, got {shown(self.dropout)}")

    @property
    def part_name(self) -> str:
        """The kind of the branch."""
        return self.branch.kind

    def check_width(self, width: int) -> None:
        """Raise an InputError for a width that the branch does not support."""
        self.branch.check_width(width)

    def require_no_dropout(self, instead: str) -> None:
        """Raise an InputError for a block with dropout, under which V is not a Markov chain."""
        if self.dropout:
            raise InputError(f"dropout: {instead}, got {self.dropout:g}")

    def forward(self, X: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m n"]:
        """Apply the block with fresh weights."""
        return self.with_increment(X, self.increment(self.read(X), key=key))

    def read(self, X: Float[Array, "m n"]) -> Float[Array, "m n"]:
        """The input of the branch."""
        return normalised_tokens(X, self.norm) if self.position == "pre" else X

    def increment(self, U: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m n"]:
        """The increment of the branch, with fresh weights and a fresh mask of dropout."""
        key_hidden, key_out, key_bias, key_kept = jr.split(key, 4)
        h = self.branch.hidden(U, key=key_hidden)
        W = jr.normal(key_out, (h.shape[1], U.shape[1]), U.dtype)
        offset = jr.normal(key_bias, (U.shape[1],), U.dtype)
        found = self.strength * h @ W / jnp.sqrt(h.shape[1]) + jnp.sqrt(self.bias) * offset
        if not self.dropout:
            return found
        return jnp.where(jr.bernoulli(key_kept, 1 - self.dropout, found.shape), found / (1 - self.dropout), 0.0)

    def with_increment(self, X: Float[Array, "m n"], increment: Float[Array, "m n"]) -> Float[Array, "m n"]:
        """The output, given what the branch adds."""
        total = self.skip * X + increment
        return total if self.position == "pre" else normalised_tokens(total, self.norm)

    def forward_covariance(  # pyright: ignore[reportIncompatibleMethodOverride]  not `on_host`
        self, V: Float[Array, "m m 1 networks"], *, width: Int[Array, ""] | int, keys: NetworkKeys
    ) -> Float[Array, "m m 1 networks"]:
        """Draw S, then the noncentral Wishart variable V′ given S.

        LayerNorm also needs the means of the tokens over features. Before a branch they are drawn anew from their law
        given V, although those of successive layers are dependent: an error of 1/n in V̂ that has mean zero.

        Raises:
            InputError: for dropout; networks with weights have it.
        """
        self.require_no_dropout("the chain has none: use method='weights'")
        tokens, pre = len(V), self.position == "pre"
        key_read, key_branch, key_out = keys.split(3)
        read = normalised(V, self.norm, width=width, keys=key_read) if pre else V
        S = self.branch.hidden_covariance(read, width=width, keys=key_branch)
        # Tokens after a LayerNorm, and what it keeps of the increments, have no component along the ones.
        features = width - 1 if not pre and self.norm == "layer" else width
        drawn = wishart_draws([features - tokens], tokens=tokens, blocks=1, normals=1, dtype=V.dtype, keys=key_out)
        found = residual_covariance(
            factor(V),
            factor(self.strength**2 * S + self.bias),
            shortcut=jnp.asarray(self.skip, V.dtype),
            gamma=jnp.ones((), V.dtype),
            width=width,
            near=drawn.normals[1],
            far=wishart_factor(features - tokens, drawn.normals[0], drawn.chi[0]),
        )
        return found if pre else normalised_covariance(found, self.norm)

    def declared(self) -> dict[str, Parameter]:
        """The strength, and the parameter of the branch."""
        return super().declared() | self.branch.declared()

    def parameters(self) -> dict[str, Any]:
        """Values of the parameters by public name."""
        return {name: getattr(self if name == "strength" else self.branch, name) for name in self.declared()}

    def with_parameters(self, values: Mapping[str, ArrayLike]) -> "Block":
        """A copy with some parameters replaced."""
        own = {name: value for name, value in values.items() if name == "strength"}
        of_branch = {name: value for name, value in values.items() if name != "strength"}
        return dataclasses.replace(self, **own, branch=dataclasses.replace(self.branch, **of_branch))


def normalised_tokens(X: Float[Array, "m n"], norm: Literal["layer", "rms"] | None) -> Float[Array, "m n"]:
    """Tokens with a mean square of 1 over their features, by LayerNorm with a mean of 0."""
    if norm is None:
        return X
    if norm == "layer":
        X = X - X.mean(axis=1, keepdims=True)
    return X / jnp.sqrt(jnp.square(X).mean(axis=1, keepdims=True))


def normalised_covariance(
    V: Float[Array, "m m ..."], norm: Literal["layer", "rms"] | None, mean: Float[Array, "m ..."] | None = None
) -> Float[Array, "m m ..."]:
    """V̂ = D^{-1/2} V D^{-1/2}, with D = diag V; by LayerNorm for V less the products of the tokens' means."""
    if norm is None:
        return V
    if norm == "layer" and mean is not None:
        V = V - mean[:, None] * mean
    scale = 1 / jnp.sqrt(diagonal(V))
    return V * scale[:, None] * scale


def normalised(
    V: Float[Array, "m m 1 networks"],
    norm: Literal["layer", "rms"] | None,
    *,
    width: Int[Array, ""] | int,
    keys: NetworkKeys,
) -> Float[Array, "m m 1 networks"]:
    """V̂ of tokens with uniformly random directions: their means are L z/√n with L Lᵀ = V and z of normals."""
    if norm != "layer":
        return normalised_covariance(V, norm)
    z = keys.normals((len(V), 1, 1), V.dtype) / jnp.sqrt(jnp.asarray(width, V.dtype))
    return normalised_covariance(V, norm, matmul(factor(V), z)[:, 0])
