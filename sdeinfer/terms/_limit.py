"""The limit n, d → ∞ of an architecture: the terms of its covariance SDE, with their coefficients.

Every shaped architecture has drift θ₁ B₁(V) + θ₂ B₂(V) and diffusion a Σ_lin(V) + κ² 𝒜(V); B₁ and 𝒜 depend on the
attention pattern. Stacking layers adds drifts and diffusions, hence coefficients (Corollary 4.3).
Tests: `tests/test_parameters.py`.
"""

import operator
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float

from sdeinfer._compiler import padded_size
from sdeinfer._files import InputError
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.terms._attention import Attention, AttentionStrength
from sdeinfer.terms._base import AbstractTerm
from sdeinfer.terms._linear import LinearNoise
from sdeinfer.terms._relu import ShapedReLU


class Limit(eqx.Module):
    """The neural covariance SDE dV = b(V) dt + Σ(V)^{1/2} dB (Eq. 12) as a sum of terms, each with its coefficient.

    The coefficients are arrays, scalars or of one shape; one that is None is left out, with its term.

    Arguments:
        attention_drift: θ₁, of the drift θ₁ B₁ of attention (Theorem 4.2).
        relu_drift: θ₂, of the drift θ₂ B₂ of a shaped ReLU (Theorem 3.2).
        linear_noise: a, of Σ_lin.
        attention_noise: κ², of 𝒜.
        pattern: the attention pattern of B₁ and 𝒜.
        others: coefficients of other terms. A fit refuses those that have noise.
    """

    terms: tuple[AbstractTerm, ...] = eqx.field(static=True)
    coefficients: tuple[Any, ...]

    def __init__(
        self,
        attention_drift: ArrayLike | None = None,
        relu_drift: ArrayLike | None = None,
        linear_noise: ArrayLike | None = None,
        attention_noise: ArrayLike | None = None,
        *,
        pattern: Pattern = EVERY_TOKEN,
        others: Mapping[AbstractTerm, ArrayLike] | None = None,
    ):
        given: dict[AbstractTerm, Any] = {}
        if linear_noise is not None:
            given[LinearNoise()] = _array(linear_noise)
        if attention_drift is not None and attention_noise is not None:
            given[Attention(pattern)] = AttentionStrength(_array(attention_drift), _array(attention_noise))
        elif attention_drift is not None or attention_noise is not None:
            raise InputError("attention_drift, attention_noise: attention has both")
        if relu_drift is not None:
            given[ShapedReLU()] = _array(relu_drift)
        given |= {term: _array(c) for term, c in (others or {}).items()}
        self.terms, self.coefficients = tuple(given), tuple(given.values())

    @property
    def parts(self) -> dict[AbstractTerm, Any]:
        """The coefficient of each term."""
        return dict(zip(self.terms, self.coefficients, strict=True))

    @property
    def attention(self) -> AttentionStrength:
        """The coefficients of attention, 0 without it."""
        return self.parts.get(Attention(self.pattern), AttentionStrength(self._zero, self._zero))

    @property
    def attention_drift(self) -> Float[Any, "..."]:
        """θ₁."""
        return self.attention.drift

    @property
    def attention_noise(self) -> Float[Any, "..."]:
        """κ²."""
        return self.attention.noise

    @property
    def relu_drift(self) -> Float[Any, "..."]:
        """θ₂."""
        return self.parts.get(ShapedReLU(), self._zero)

    @property
    def linear_noise(self) -> Float[Any, "..."]:
        """The coefficient a of Σ_lin."""
        return self.parts.get(LinearNoise(), self._zero)

    @property
    def others(self) -> dict[AbstractTerm, Any]:
        """The coefficients of other terms."""
        return {term: c for term, c in self.parts.items() if not isinstance(term, (LinearNoise, Attention, ShapedReLU))}

    @property
    def pattern(self) -> Pattern:
        """The attention pattern."""
        return next((term.pattern for term in self.terms if isinstance(term, Attention)), EVERY_TOKEN)

    def __add__(self, other: "Limit") -> "Limit":
        """The limit of two stacked layers."""
        parts = self.parts
        for term, c in other.parts.items():
            parts[term] = jax.tree.map(operator.add, parts[term], c) if term in parts else c
        if sum(isinstance(term, Attention) for term in parts) > 1:
            raise InputError(
                "pattern: layers of attention with different patterns have no limit in common; a limit without "
                "attention leaves out attention_drift and attention_noise"
            )
        pattern = next((term.pattern for term in parts if isinstance(term, Attention)), EVERY_TOKEN)
        # `__init__` orders the terms, so that all sums of the same terms have one structure.
        attention = parts.pop(Attention(pattern), AttentionStrength(None, None))
        relu_drift, linear_noise = parts.pop(ShapedReLU(), None), parts.pop(LinearNoise(), None)
        return Limit(attention.drift, relu_drift, linear_noise, attention.noise, pattern=pattern, others=parts)

    def drift(self, V: Float[Array, "m m"]) -> Float[Array, "m m"]:
        """Drift b(V), per unit of depth-time."""
        return sum((term.drift(c, V) for term, c in self.parts.items()), jnp.zeros_like(V))

    def normals(self, tokens: int) -> tuple[int, int]:
        """Shape of the standard normals that advance a factor of V of so many tokens, or rows, by one step."""
        return tokens, tokens * sum(term.columns for term in self.terms)

    def at(self, time: Any) -> "Limit":
        """The coefficients at a depth-time: the same at all."""
        del time
        return self

    @property
    def _zero(self) -> Any:
        return jax.tree.leaves(self.coefficients)[0] * 0


def _array(c: ArrayLike) -> Any:
    """A coefficient as an array in the default type."""
    return np.asarray(c, jnp.result_type(float)) if isinstance(c, (int, float)) else c


class LimitSteps(eqx.Module):
    """Coefficients that are constant over intervals of depth-time, their first axis; a second may be of paths."""

    limit: Limit
    starts: Float[Any, " intervals"]

    def normals(self, tokens: int) -> tuple[int, int]:
        """As `Limit.normals`."""
        return self.limit.normals(tokens)

    def padded(self, dtype: np.dtype) -> "LimitSteps":
        """In a type, and padded to 64, 256, … intervals, so that few shapes are compiled."""
        count = padded_size(len(self.starts), least=64) - len(self.starts)
        limit = jax.tree.map(lambda c: np.concatenate([c, np.repeat(c[-1:], count, axis=0)]).astype(dtype), self.limit)
        return LimitSteps(limit, np.append(self.starts, np.full(count, np.inf)).astype(dtype))

    def at(self, time: Any) -> Limit:
        """The coefficients at a depth-time that is not the end of an interval."""
        number = (self.starts <= time).sum() - 1
        return jax.tree.map(lambda c: c[number], self.limit)
