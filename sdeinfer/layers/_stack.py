"""Layers on layers: the coefficients of their limits add (Eq. 11, Corollary 4.3)."""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Self

import equinox as eqx
import jax.random as jr
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from sdeinfer._files import InputError
from sdeinfer.layers._attention import ShapedAttention, check_heads
from sdeinfer.layers._base import AbstractLayer
from sdeinfer.layers._feedforward import ResidualFeedForward, check_expansion
from sdeinfer.layers._finite_width import FiniteWidth
from sdeinfer.layers._keys import NetworkKeys
from sdeinfer.layers._limit import Limit
from sdeinfer.layers._mlp import ShapedMLP
from sdeinfer.parameters import C_MINUS, C_PLUS, GAMMA, TAU0, Parameter


class Stack(AbstractLayer):
    """Several layers that together count as one: dt = 1/n for all of them.

    Attributes:
        layers: the layers, in the order in which they are applied; each keeps its own parameters.
    """

    layers: tuple[AbstractLayer, ...] = eqx.field(converter=tuple)

    def __check_init__(self):
        if not self.layers:
            raise InputError("layers: at least one is needed, got none")

    def forward(self, X: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m n"]:
        """Apply the layers one after the other."""
        for layer, layer_key in zip(self.layers, jr.split(key, len(self.layers)), strict=True):
            X = layer.forward(X, key=layer_key)
        return X

    @property
    def column_blocks(self) -> int:
        """The fewest that are a multiple of every layer's own."""
        return math.lcm(*(layer.column_blocks for layer in self.layers))

    def check_width(self, width: int) -> None:
        """Refuse a width that one of the layers refuses."""
        for layer in self.layers:
            layer.check_width(width)

    def forward_covariance(
        self, V: Float[Array, "m m blocks networks"], *, width: Int[Array, ""] | int, keys: NetworkKeys
    ) -> Float[Array, "m m blocks networks"]:
        """One layer's law after the other's."""
        for layer, layer_keys in zip(self.layers, keys.split(len(self.layers)), strict=True):
            V = layer.forward_covariance(V, width=width, keys=layer_keys)
        return V

    def limit(self) -> Limit:
        """The sum of the layers' limits.

        Raises:
            InputError: for attention with a causal mask and attention without one.
        """
        if len(_masks(self)) > 1:
            raise InputError("causal: layers of attention with a causal mask and without one have no limit in common")
        return functools.reduce(operator.add, (layer.limit() for layer in self.layers))

    def finite_width(self, width: ArrayLike) -> FiniteWidth:
        """The law of one layer, or of attention followed by a layer without it: no other has been derived.

        Raises:
            InputError: for another stack.
        """
        match self.layers:
            case (layer,):
                return layer.finite_width(width)
            case (ShapedAttention() as attention, ResidualFeedForward() | ShapedMLP() as feedforward):
                return attention.finite_width(width).then(feedforward.finite_width(width), width)
        raise InputError("law: at finite width, stacks of attention and one other layer only; others have a limit")

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers, by which their parameters are told apart: attention, feedforward or mlp_2."""
        kinds = [PART_NAMES.get(type(layer), type(layer).__name__.lower()) for layer in self.layers]
        earlier = [kinds[:place].count(kind) for place, kind in enumerate(kinds)]
        return tuple(f"{kind}_{count + 1}" if count else kind for kind, count in zip(kinds, earlier, strict=True))

    @property
    def skewness(self) -> float:
        """The layers' own, as a product of independent factors of like variance has it."""
        count = len(self.layers)
        return (sum(layer.skewness for layer in self.layers) + 3 * count * (count - 1)) / count**2

    def declared(self) -> dict[str, Parameter]:
        """Every layer's parameters, named as in attention.gamma and feedforward.gamma."""
        return self._of_each(lambda layer: layer.declared())

    def parameters(self) -> dict[str, Array]:
        """Every layer's values, by the names of `declared`."""
        return self._of_each(lambda layer: layer.parameters())

    def with_parameters(self, values: Mapping[str, ArrayLike]) -> Self:
        """The same layers with other values of some of their parameters."""
        own = [
            {name.removeprefix(f"{part}."): value for name, value in values.items() if name.startswith(f"{part}.")}
            for part in self.names
        ]
        changed = (layer.with_parameters(new) for layer, new in zip(self.layers, own, strict=True))
        return dataclasses.replace(self, layers=tuple(changed))

    def _of_each[T](self, mapping: Callable[[AbstractLayer], Mapping[str, T]]) -> dict[str, T]:
        return {
            f"{part}.{name}": value
            for part, layer in zip(self.names, self.layers, strict=True)
            for name, value in mapping(layer).items()
        }


class ShapedTransformer(AbstractLayer):
    """Shaped attention, then residual feed-forward, with one γ (Eq. 11); both count as one layer (Corollary 4.3).

    Attributes:
        gamma: strength γ of both residual branches, in (0, 1]; λ² + γ² = 1.
        tau0: constant τ0 > 0 of the softmax temperature.
        c_plus: c₊ of the slope 1 + c₊/√n.
        c_minus: c₋ of the slope 1 + c₋/√n.
        key_width: width of the queries and keys of one head; n/H where None.
        heads: how many heads H; n must be a multiple.
        output_projection: whether attention ends with W_O.
        expansion: r, the hidden width of the feed-forward layer divided by n.
        causal: whether a token attends to itself and those before it only.
    """

    gamma: Float[Array, ""] = GAMMA.field()
    tau0: Float[Array, ""] = TAU0.field()
    c_plus: Float[Array, ""] = C_PLUS.field()
    c_minus: Float[Array, ""] = C_MINUS.field()
    key_width: int | None = eqx.field(default=None, static=True)
    heads: int = eqx.field(default=1, static=True)
    output_projection: bool = eqx.field(default=False, static=True)
    expansion: float = eqx.field(default=1, static=True)
    causal: bool = eqx.field(default=False, static=True)

    def __check_init__(self):
        check_heads(self.key_width, self.heads)
        check_expansion(self.expansion)

    @property
    def stack(self) -> Stack:
        """The two layers."""
        attention = ShapedAttention(
            gamma=self.gamma,
            tau0=self.tau0,
            key_width=self.key_width,
            heads=self.heads,
            output_projection=self.output_projection,
            causal=self.causal,
        )
        feedforward = ResidualFeedForward(
            gamma=self.gamma, c_plus=self.c_plus, c_minus=self.c_minus, expansion=self.expansion
        )
        return Stack((attention, feedforward))

    def forward(self, X: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m n"]:
        """Eq. 11."""
        return self.stack.forward(X, key=key)

    @property
    def column_blocks(self) -> int:
        """Those of its attention."""
        return self.stack.column_blocks

    def check_width(self, width: int) -> None:
        """Refuse a width that one of the two layers refuses."""
        self.stack.check_width(width)

    def forward_covariance(
        self, V: Float[Array, "m m blocks networks"], *, width: Int[Array, ""] | int, keys: NetworkKeys
    ) -> Float[Array, "m m blocks networks"]:
        """Attention's law, then the feed-forward layer's."""
        return self.stack.forward_covariance(V, width=width, keys=keys)

    def limit(self) -> Limit:
        """Corollary 4.3."""
        return self.stack.limit()

    def finite_width(self, width: ArrayLike) -> FiniteWidth:
        """Attention's law, then that of the feed-forward layer."""
        return self.stack.finite_width(width)

    @property
    def skewness(self) -> float:
        """That of its two layers."""
        return self.stack.skewness


PART_NAMES: dict[type[AbstractLayer], str] = {
    ShapedTransformer: "transformer",
    ShapedAttention: "attention",
    ResidualFeedForward: "feedforward",
    ShapedMLP: "mlp",
}
"""What a layer is called in a `Stack`; other types go by their own name."""


def _masks(layer: AbstractLayer) -> set[bool]:
    """Whether the layer's attention has a causal mask; both, where some has and some has not."""
    match layer:
        case Stack():
            return set().union(*(_masks(part) for part in layer.layers))
        case ShapedAttention() | ShapedTransformer():
            return {layer.causal}
    return set()
