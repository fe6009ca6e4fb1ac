"""Stacks of layers: the coefficients of their limits add (Eq. 11, Corollary 4.3).

Tests: `tests/layers/test_finite_width.py`.
"""

import abc
import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax.random as jr
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from sdeinfer._arguments import at_least_one, given, shown
from sdeinfer._files import InputError
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._pattern import EVERY_TOKEN, require_pattern
from sdeinfer.layers._attention import ShapedAttention
from sdeinfer.layers._base import AbstractLayer, size
from sdeinfer.layers._feedforward import ResidualFeedForward, ShapedMLP, check_expansion
from sdeinfer.layers._finite_width import FiniteWidth
from sdeinfer.layers._wishart import Keys
from sdeinfer.parameters import C_MINUS, C_PLUS, GAMMA, TAU0, Parameter
from sdeinfer.terms._limit import Limit


def _as_tuple(given: Any) -> tuple[Any, ...]:
    return tuple(given) if isinstance(given, Iterable) else (given,)


class AbstractStack(AbstractLayer):
    """Several layers that count as one: together they advance depth-time by dt = 1/n."""

    @property
    @abc.abstractmethod
    def parts(self) -> tuple[AbstractLayer, ...]:
        """The layers in order of application, each with its own parameters."""

    def forward(self, X: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m n"]:
        """Apply the layers in order."""
        for layer, layer_key in zip(self.parts, jr.split(key, len(self.parts)), strict=True):
            X = layer.forward(X, key=layer_key)
        return X

    @property
    def on_host(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether all parts have chains of NumPy arrays."""
        return all(part.on_host for part in self.parts)

    @property
    def has_tangents(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether all parts have chains of tangents."""
        return all(part.has_tangents for part in self.parts)

    @property
    def column_blocks(self) -> int:
        """Least common multiple of the layers' numbers of column blocks."""
        return math.lcm(*(layer.column_blocks for layer in self.parts))

    def check_width(self, width: int) -> None:
        """Raise an InputError for a width that one of the layers does not support."""
        for layer in self.parts:
            layer.check_width(width)

    def forward_covariance(
        self, V: Float[Any, "m m blocks networks"], *, width: Int[Any, ""] | int, keys: Keys, **tangents: bool
    ) -> Float[Any, "m m blocks networks"]:
        """Apply the layers' `forward_covariance` in order."""
        for layer, layer_keys in zip(self.parts, keys.split(len(self.parts)), strict=True):
            V = layer.forward_covariance(V, width=width, keys=layer_keys, **tangents)
        return V

    @property
    def has_chain(self) -> bool:
        """Whether all layers have a `forward_covariance`."""
        return all(layer.has_chain for layer in self.parts)

    def limit(self) -> Limit:
        """The sum of the layers' limits."""
        return functools.reduce(operator.add, (layer.limit() for layer in self.parts))

    def finite_width(self, width: ArrayLike) -> FiniteWidth:
        """The law of one layer, or of attention followed by a feed-forward or MLP layer."""
        match self.parts:
            case (layer,):
                return layer.finite_width(width)
            case (ShapedAttention() as attention, ResidualFeedForward() | ShapedMLP() as feedforward):
                return attention.finite_width(width).then(feedforward.finite_width(width), width)
        raise InputError(
            "law: 'finite-width' supports attention followed by one other layer; use law='limit' for other stacks"
        )

    @property
    def skewness(self) -> float:
        """Skewness of a product of independent factors with equal variances and the layers' skewnesses."""
        count = len(self.parts)
        return (sum(layer.skewness for layer in self.parts) + 3 * count * (count - 1)) / count**2


class Stack(AbstractStack):
    """Several layers that count as one: together they advance depth-time by dt = 1/n.

    Attributes:
        layers: the layers in order of application, each with its own parameters.
    """

    layers: tuple[AbstractLayer, ...] = eqx.field(converter=_as_tuple)

    def __check_init__(self):
        if not self.layers:
            raise InputError("layers: at least one is needed, got none")
        for layer in self.layers:
            if not isinstance(layer, AbstractLayer):
                raise InputError(f"layers: a layer is needed, got {shown(layer)}")

    @property
    def parts(self) -> tuple[AbstractLayer, ...]:
        """The layers."""
        return self.layers

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers, used as prefixes of their parameters, such as attention, feedforward or mlp_2."""
        kinds = [layer.part_name for layer in self.layers]
        earlier = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
        return tuple(f"{kind}_{count + 1}" if count else kind for kind, count in zip(kinds, earlier, strict=True))

    def declared(self) -> dict[str, Parameter]:
        """The parameters of all layers, with names such as attention.gamma and feedforward.gamma."""
        return self._named_by_part(lambda layer: layer.declared())

    def parameters(self) -> dict[str, Any]:
        """Parameter values of all layers, by the names of `declared`."""
        return self._named_by_part(lambda layer: layer.parameters())

    def with_parameters(self, values: Mapping[str, ArrayLike]) -> "Stack":
        """A copy of the stack with some parameters replaced."""
        part_values = [
            {name.removeprefix(f"{part}."): value for name, value in values.items() if name.startswith(f"{part}.")}
            for part in self.names
        ]
        changed = (layer.with_parameters(new) for layer, new in zip(self.layers, part_values, strict=True))
        return dataclasses.replace(self, layers=tuple(changed))

    def _named_by_part[T](self, mapping: Callable[[AbstractLayer], Mapping[str, T]]) -> dict[str, T]:
        return {
            f"{part}.{name}": value
            for part, layer in zip(self.names, self.layers, strict=True)
            for name, value in mapping(layer).items()
        }


class ShapedTransformer(AbstractStack):
    """Shaped attention, then residual feed-forward, with one γ (Eq. 11); both count as one layer (Corollary 4.3).

    Attributes:
        gamma: strength γ of both residual branches, in (0, 1]; λ² + γ² = 1.
        tau0: constant τ0 > 0 of the softmax temperature.
        c_plus: c₊ of the slope 1 + c₊/√n.
        c_minus: c₋ of the slope 1 + c₋/√n.
        key_width: width of the queries and keys of one head; n/H if None.
        heads: number H of heads; must divide n.
        output_projection: whether attention ends with W_O.
        expansion: r, the hidden width of the feed-forward layer divided by n.
        pattern: which tokens each token attends to.
    """

    architecture: ClassVar[str | None] = "transformer"

    gamma: Float[Any, ""] = GAMMA.field()
    tau0: Float[Any, ""] = TAU0.field()
    c_plus: Float[Any, ""] = C_PLUS.field()
    c_minus: Float[Any, ""] = C_MINUS.field()
    key_width: int | None = eqx.field(default=None, static=True)
    heads: int = size(1)
    output_projection: bool = size(False)  # noqa: FBT003
    expansion: float = size(1)
    pattern: Pattern = size(EVERY_TOKEN)  # pyright: ignore[reportIncompatibleMethodOverride]

    def __check_init__(self):
        at_least_one(heads=self.heads, **given(key_width=self.key_width))
        require_pattern(self.pattern)
        check_expansion(self.expansion)

    @property
    def parts(self) -> tuple[AbstractLayer, ...]:
        """Attention and the feed-forward layer."""
        attention = ShapedAttention(
            gamma=self.gamma,
            tau0=self.tau0,
            key_width=self.key_width,
            heads=self.heads,
            output_projection=self.output_projection,
            pattern=self.pattern,
        )
        feedforward = ResidualFeedForward(
            gamma=self.gamma, c_plus=self.c_plus, c_minus=self.c_minus, expansion=self.expansion
        )
        return attention, feedforward

    @property
    def stack(self) -> Stack:
        """The two layers as a `Stack`."""
        return Stack(self.parts)
