"""The interface of a term of the covariance SDE, and of a kernel that a term adds."""

import abc
import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from sdeinfer.covariance._batched import transpose


class AddedKernel(NamedTuple):
    """A drift dV/dt = N(V) − λV whose N adds a covariance, such as a kernel of two tokens.

    `present` is false where the drift vanishes; `decay` is λ ≥ 0; `of_tokens` is N of covariances V, and `of_tangents`
    that of joint covariances [[V, Γ], [Γᵀ, D]] of tokens and tangents, see `Kernel`.
    """

    present: Bool[Array, "..."]
    decay: Float[Array, "..."]
    of_tokens: Callable[[Array], Array]
    of_tangents: Callable[[Array], Array]


@dataclasses.dataclass(frozen=True)
class AbstractTerm(abc.ABC):
    """One term of the covariance SDE. A `Limit` is the sum of its terms, each with a coefficient c.

    A term is hashable and has no arrays: programs are compiled for it. Its drift consists of a part that moves a factor
    X of V = XXᵀ (`flow`), of one that adds covariances to V (`kernel`), and of what the noise adds to E V (`noise`).
    Every method takes stacks: tokens come first, the batch last.

    `PSDSplitting` composes `kernel`, `flow` and `noise`, each of weak order 2. A term of yours, say of an activation,
    has `drift` and `flow`; for tangents `flow` is differentiated.
    """

    @abc.abstractmethod
    def drift(self, c: Any, V: Float[Any, "m m ..."]) -> Float[Any, "m m ..."]:
        """The drift of V, per unit of depth-time; linear in c, the coefficient of a likelihood's regressor."""

    def flow(self, c: Any, X: Float[Array, "m k ..."], h: Float[Array, ""]) -> Float[Array, "m k ..."]:
        """X after a step h of the drift's first part: of weak order 2, and equivariant to X ↦ XU, UUᵀ = I."""
        del c, h
        return X

    def kernel(self, c: Any) -> AddedKernel | None:
        """The drift's second part; None if there is none."""
        del c
        return None

    @property
    def columns(self) -> int:
        """Normals per entry of X that `noise` takes."""
        return 0

    def noise(
        self, c: Any, X: Float[Array, "m k ..."], h: Float[Array, ""], G: Float[Array, "k columns*k ..."]
    ) -> Float[Array, "m k ..."]:
        """X after a step h of the noise, of weak order 2. G holds independent normals of variance h.

        `drift` includes what the noise adds to E V.
        """
        del c, h, G
        return X

    def change(self, c: Any, X: Float[Array, "m k ..."], h: Float[Array, ""]) -> Float[Array, "..."] | None:
        """The change of V by the drift over a step h, relative to V; None if the term cannot make paths explode."""
        del c, X, h
        return None

    def of_prompts(self) -> "AbstractTerm":
        """The same term without shortcuts that hold for one prompt only, for tangents."""
        return self


def is_present(c: Any) -> Bool[Array, "..."]:
    """Whether a coefficient is not zero."""
    return functools.reduce(operator.or_, [jnp.asarray(part) != 0 for part in jax.tree.leaves(c)])


def where_present(c: Any, flow: Callable[[Array], Array], X: Array) -> Array:
    """The flow of the paths whose coefficient is not zero; the others stand still."""
    present = is_present(c)
    return jax.lax.cond(jnp.any(present), lambda X: jnp.where(present, flow(X), X), lambda X: X, X)


class Kernel(NamedTuple):
    """A symmetric kernel between prompts X(ε) and X(ε′), X(ε) = X + εẊ, expanded about ε = ε′ = 0.

    `along` is its derivative by ε′, as β moves along Ẋ (by ε it is the transpose), and `mixed` that by both.
    """

    value: Float[Array, "m m ..."]
    along: Float[Array, "m m ..."]
    mixed: Float[Array, "m m ..."]

    @classmethod
    def of(cls, S: Float[Array, "rows rows ..."]) -> "Kernel":
        """The blocks V, Γ and D of a joint covariance [[V, Γ], [Γᵀ, D]]."""
        half = len(S) // 2
        return cls(S[:half, :half], S[:half, half:], S[half:, half:])

    def __mul__(self, other: "Kernel") -> "Kernel":  # type: ignore[override]
        """The entrywise product."""
        return Kernel(
            self.value * other.value,
            self.along * other.value + self.value * other.along,
            self.mixed * other.value
            + transpose(self.along) * other.along
            + self.along * transpose(other.along)
            + self.value * other.mixed,
        )

    @property
    def joint(self) -> Float[Array, "rows rows ..."]:
        """The joint matrix."""
        upper = jnp.concatenate([self.value, self.along], axis=1)
        return jnp.concatenate([upper, jnp.concatenate([transpose(self.along), self.mixed], axis=1)])
