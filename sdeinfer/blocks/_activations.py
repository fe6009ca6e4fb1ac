"""Activations by name."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

from sdeinfer._arguments import shown
from sdeinfer._files import InputError

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda z: jax.nn.gelu(z, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "relu_squared": lambda z: jnp.square(jax.nn.relu(z)),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "identity": lambda z: z,
}
"""Activations by the names that blocks know; any other function of an array is used as it is."""


def activation_of(given: str | Callable[[Array], Array]) -> Callable[[Array], Array]:
    """The function of a name, or a function unchanged.

    Raises:
        InputError: for an unknown name, and for what is no function.
    """
    if isinstance(given, str) and given in ACTIVATIONS:
        return ACTIVATIONS[given]
    if isinstance(given, str) or not callable(given):
        raise InputError(f"activation: one of {', '.join(ACTIVATIONS)} or a function is needed, got {shown(given)}")
    return given
