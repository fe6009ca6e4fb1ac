"""Layers on layers: the coefficients of their limits add (Eq. 11, Corollary 4.3)."""

import functools
import operator
from collections.abc import Mapping

import equinox as eqx
import jax.random as jr
from jaxtyping import Array, Float, PRNGKeyArray

from sdeinfer._files import InputError
from sdeinfer.layers._attention import ShapedAttention, check_key_width
from sdeinfer.layers._base import (
    AbstractLayer,
    c_minus_parameter,
    c_plus_parameter,
    gamma_parameter,
    tau0_parameter,
)
from sdeinfer.layers._feedforward import ResidualFeedForward
from sdeinfer.layers._limit import Limit


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

    def limit(self) -> Limit:
        """The sum of the layers' limits."""
        return functools.reduce(operator.add, (layer.limit() for layer in self.layers))

    def parameters(self) -> Mapping[str, Array]:
        """Every layer's parameters, numbered as in layer_0.gamma."""
        return {
            f"layer_{i}.{name}": value
            for i, layer in enumerate(self.layers)
            for name, value in layer.parameters().items()
        }


class ShapedTransformer(AbstractLayer):
    """Shaped attention, then residual feed-forward, with one γ (Eq. 11); both count as one layer (Corollary 4.3).

    Attributes:
        gamma: strength γ of both residual branches, in (0, 1]; λ² + γ² = 1.
        tau0: constant τ0 > 0 of the softmax temperature.
        c_plus: c₊ of the slope 1 + c₊/√n.
        c_minus: c₋ of the slope 1 + c₋/√n.
        key_width: width of queries and keys; the network's own width where None.
    """

    gamma: Float[Array, ""] = eqx.field(converter=gamma_parameter)
    tau0: Float[Array, ""] = eqx.field(converter=tau0_parameter)
    c_plus: Float[Array, ""] = eqx.field(converter=c_plus_parameter)
    c_minus: Float[Array, ""] = eqx.field(converter=c_minus_parameter)
    key_width: int | None = eqx.field(default=None, static=True)

    def __check_init__(self):
        check_key_width(self.key_width)

    @property
    def stack(self) -> Stack:
        """The two layers."""
        attention = ShapedAttention(gamma=self.gamma, tau0=self.tau0, key_width=self.key_width)
        feedforward = ResidualFeedForward(gamma=self.gamma, c_plus=self.c_plus, c_minus=self.c_minus)
        return Stack((attention, feedforward))

    def forward(self, X: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m n"]:
        """Eq. 11."""
        return self.stack.forward(X, key=key)

    def limit(self) -> Limit:
        """Corollary 4.3."""
        return self.stack.limit()

    def parameters(self) -> Mapping[str, Array]:
        """γ, τ0, c₊ and c₋."""
        return {"gamma": self.gamma, "tau0": self.tau0, "c_plus": self.c_plus, "c_minus": self.c_minus}
