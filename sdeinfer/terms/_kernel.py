"""Kernels of two prompts X + εẊ that draw near: what they add to the joint covariance of tokens and tangents."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from sdeinfer.covariance import transpose


class Kernel(NamedTuple):
    """A symmetric kernel between prompts X(ε) and X(ε′), X(ε) = X + εẊ, expanded about ε = ε′ = 0.

    Attributes:
        value: the kernel of α and β.
        along: its derivative by ε′, as β moves along Ẋ; by ε it is the transpose.
        mixed: its derivative by ε and ε′.
    """

    value: Float[Array, "m m ..."]
    along: Float[Array, "m m ..."]
    mixed: Float[Array, "m m ..."]

    @classmethod
    def of(cls, S: Float[Array, "rows rows ..."]) -> "Kernel":
        """The blocks V, C and D of a joint covariance [[V, C], [Cᵀ, D]]."""
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
