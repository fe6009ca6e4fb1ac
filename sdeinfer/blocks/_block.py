"""Residual blocks as layers, one after the other or beside each other. Tests: `tests/blocks/test_block.py`."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.blocks._branch import AbstractBranch, check_bias
from sdeinfer.blocks._norms import Norm, normalised_covariance, normalised_tokens
from sdeinfer.covariance._batched import gram, matmul, total
from sdeinfer.layers import AbstractLayer
from sdeinfer.layers._keys import NetworkKeys
from sdeinfer.layers._wishart import factor, wishart_draws, wishart_factor
from sdeinfer.parameters import Parameter, distributions

STRENGTH = Parameter(
    "strength", "g", "strength √u σ of a residual branch", "log", lambda: distributions().LogNormal(-1.0, 2.0)
)
"""The default prior has 95 % between .007 and 19, for strengths of order 1/√L to 1."""

OUTPUT_GAIN = Parameter(
    "output_gain", "γ", "gain of the norm after a residual branch", "log", lambda: distributions().LogNormal(-1.0, 2.0)
)


class Block(AbstractLayer):
    """A residual block with one branch: X′ = αX + Δ, Δ = g h(norm(X)) W/√u (Pre-LN), or norm(αX + Δ) (Post-LN).

    With a norm after the branch X′ = αX + γ norm(Δ), as in OLMo 2 and, beside a norm before it, Gemma: X′ does not
    depend on the strength then, only on the gain γ. Fits of increments see Δ itself, before the norm.

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
        output_norm: "rms" or "layer" for a norm of Δ; None for none.
        output_gain: γ; 1 + w for a norm that multiplies by 1 + w.
        output_epsilon: ε of that norm, which counts where increments are small: without a norm before the branch.
        dropout: p; training sets each entry of the increment to 0 with this probability, independently, and divides the
            others by 1 − p. Only networks with weights and moments have it, see `require_no_dropout`.
    """

    branch: AbstractBranch
    strength: Float[Any, ""] = STRENGTH.field(default=1.0)
    norm: Norm = eqx.field(default=None, static=True)
    position: Literal["pre", "post"] = eqx.field(default="pre", static=True)
    skip: float = eqx.field(default=1.0, static=True)
    bias: float = eqx.field(default=0.0, static=True)
    dropout: float = eqx.field(default=0.0, static=True)
    output_norm: Norm = eqx.field(default=None, static=True)
    output_gain: Float[Any, ""] = OUTPUT_GAIN.field(default=1.0)
    output_epsilon: float = eqx.field(default=0.0, static=True)

    def __check_init__(self):
        if not isinstance(self.branch, AbstractBranch):
            raise InputError(f"branch: a branch is needed, as si.blocks.MLP(), got {shown(self.branch)}")
        for name in ("norm", "output_norm"):
            if getattr(self, name) not in ("layer", "rms", None):
                raise InputError(f"{name}: one of layer, rms, None is needed, got {shown(getattr(self, name))}")
        if self.output_norm is not None and self.position == "post":
            raise InputError("output_norm: a block with a norm after the sum has no norm after the branch")
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
        delta = self.strength * h @ W / jnp.sqrt(h.shape[1]) + jnp.sqrt(self.bias) * offset
        if not self.dropout:
            return delta
        return jnp.where(jr.bernoulli(key_kept, 1 - self.dropout, delta.shape), delta / (1 - self.dropout), 0.0)

    def with_increment(self, X: Float[Array, "m n"], increment: Float[Array, "m n"]) -> Float[Array, "m n"]:
        """The output, given what the branch adds."""
        if self.output_norm is not None:
            increment = self.output_gain * normalised_tokens(increment, self.output_norm, self.output_epsilon)
        total = self.skip * X + increment
        return total if self.position == "pre" else normalised_tokens(total, self.norm)

    def forward_covariance(  # pyright: ignore[reportIncompatibleMethodOverride]  not `on_host`
        self, V: Float[Array, "m m 1 networks"], *, width: Int[Array, ""] | int, keys: NetworkKeys
    ) -> Float[Array, "m m 1 networks"]:
        """Draw S, then the noncentral Wishart variable V′ given S.

        LayerNorm also needs the means of the tokens over features. Before a branch they are drawn anew from their law
        given V, although those of successive layers are dependent: an error of 1/n in V̂ that has mean zero. After a
        branch it takes the component along the ones from the increment alone; the tokens keep theirs, which the chain
        leaves out: an error of 1/n in the variance of XΔᵀ.

        Raises:
            InputError: for dropout; networks with weights have it.
        """
        self.require_no_dropout("the chain has none: use method='weights'")
        key_read, key_branch, key_out = keys.split(3)
        S = self.increment_covariance(self.read_covariance(V, width=width, keys=key_read), width=width, keys=key_branch)
        # Tokens after a LayerNorm, and what it keeps of the increments, have no component along the ones.
        norm = self.output_norm if self.position == "pre" else self.norm
        centred = norm == "layer"
        parts = increment_parts(V, S, width=width, features=width - 1 if centred else width, keys=key_out)
        if self.output_norm is not None:
            squares = total(jnp.square(parts.inside) + jnp.square(parts.outside), axis=1)
            scale = self.output_gain / jnp.sqrt(squares + self.output_epsilon)
            parts = IncrementParts(parts.stream, *(part * scale[:, None] for part in parts[1:]))
        covariance = parts.sum_covariance(self.skip)
        return covariance if self.position == "pre" else normalised_covariance(covariance, self.norm)

    def read_covariance(
        self, V: Float[Array, "m m 1 networks"], *, width: Int[Array, ""] | int, keys: NetworkKeys
    ) -> Float[Array, "m m 1 networks"]:
        """The covariance of what the branch reads; tokens in random directions have the means L z/√n with L Lᵀ = V."""
        if self.position == "post":
            return V
        if self.norm != "layer":
            return normalised_covariance(V, self.norm)
        z = keys.normals((len(V), 1, 1), V.dtype) / jnp.sqrt(jnp.asarray(width, V.dtype))
        return normalised_covariance(V, self.norm, matmul(factor(V), z)[:, 0])

    def increment_covariance(
        self, V: Float[Array, "m m 1 networks"], *, width: Int[Array, ""] | int, keys: NetworkKeys
    ) -> Float[Array, "m m 1 networks"]:
        """g² S + b of the branch's features, the covariance of the columns of Δ, given that of what it reads."""
        return self.strength**2 * self.branch.hidden_covariance(V, width=width, keys=keys) + self.bias

    def declared(self) -> dict[str, Parameter]:
        """The strength, or the gain of a norm after the branch; and the parameter of the branch."""
        scale = STRENGTH if self.output_norm is None else OUTPUT_GAIN
        return {scale.name: scale} | self.branch.declared()

    def parameters(self) -> dict[str, Any]:
        """Values of the parameters by public name."""
        of_branch = self.branch.declared()
        return {name: getattr(self.branch if name in of_branch else self, name) for name in self.declared()}

    def with_parameters(self, values: Mapping[str, ArrayLike]) -> "Block":
        """A copy with some parameters replaced."""
        of_branch = {name: value for name, value in values.items() if name in self.branch.declared()}
        of_block = {name: value for name, value in values.items() if name not in of_branch}
        return dataclasses.replace(self, **of_block, branch=dataclasses.replace(self.branch, **of_branch))


class IncrementParts(NamedTuple):
    """Tokens over √n in an orthonormal basis whose first m directions span them, and an increment in it.

    Attributes:
        stream: L with L Lᵀ = V, the tokens in the first m directions.
        inside: the increment in these directions.
        outside: a factor of the increment's Gram matrix in all others.
    """

    stream: Float[Array, "m m 1 networks"]
    inside: Float[Array, "m m 1 networks"]
    outside: Float[Array, "m m 1 networks"]

    def sum_covariance(self, skip: float) -> Float[Array, "m m 1 networks"]:
        """The covariance of the tokens times `skip` plus the increment."""
        return gram(skip * self.stream + self.inside) + gram(self.outside)


def increment_parts(
    V: Float[Array, "m m 1 networks"],
    S: Float[Array, "m m 1 networks"],
    *,
    width: Int[Array, ""] | int,
    features: Int[Array, ""] | int,
    keys: NetworkKeys,
) -> IncrementParts:
    """Draw an increment whose columns have the covariance S; `features` is the number of its independent columns."""
    tokens = len(V)
    drawn = wishart_draws([features - tokens], tokens=tokens, blocks=1, normals=1, dtype=V.dtype, keys=keys)
    F = factor(S) / jnp.sqrt(jnp.asarray(width, V.dtype))
    outside = wishart_factor(features - tokens, drawn.normals[0], drawn.chi[0])
    return IncrementParts(factor(V), matmul(F, drawn.normals[1]), matmul(F, outside))
