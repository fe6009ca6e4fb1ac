"""The MLP branch, plain or gated, and activations by name. Tests: `tests/blocks/test_law.py`."""

import math
from collections.abc import Callable
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray
from scipy.special import ndtri

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.blocks._branch import GAIN, AbstractBranch, check_bias, projected, projection, uniform_nodes
from sdeinfer.blocks._law import MatrixMoments, fourth_moments, moments_of_draws
from sdeinfer.covariance._batched import gram, matmul, total
from sdeinfer.covariance._matrix import pairs, vech
from sdeinfer.layers._keys import NetworkKeys
from sdeinfer.layers._wishart import COLUMNS_AT_ONCE, factor
from sdeinfer.parameters import Parameter

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": lambda z: jax.nn.gelu(z, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": jax.nn.relu,
    "relu_squared": lambda z: jnp.square(jax.nn.relu(z)),
    "quick_gelu": lambda z: z * jax.nn.sigmoid(1.702 * z),
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
    "identity": lambda z: z,
}
"""Activations by the names that blocks know; any other function of an array is used as it is."""


def activation_of(given: str | Callable[[Array], Array]) -> Callable[[Array], Array]:
    """The function of a name, or a function unchanged."""
    if isinstance(given, str) and given in ACTIVATIONS:
        return ACTIVATIONS[given]
    if isinstance(given, str) or not callable(given):
        raise InputError(f"activation: one of {', '.join(ACTIVATIONS)} or a function is needed, got {shown(given)}")
    return given


class MLP(AbstractBranch):
    """h = φ(z), or φ(z) ⊙ z′ if gated, of projections z and z′ to `expansion` · n hidden units.

    The u parts of S are φφᵀ of one unit. ReLU is homogeneous, so that its gain is a factor of the strength.

    Attributes:
        gain: w = n σ², for weights of standard deviation σ.
        activation: φ, a name of `ACTIVATIONS` or a function of an array.
        expansion: number u of hidden units divided by n.
        gated: whether φ is multiplied by a second projection, as in SwiGLU ("silu") and GeGLU ("gelu").
        offset: c of φ ⊙ (z′ + c) in gated units (1 in gpt-oss).
        bias: variance of the biases of the first projections.
    """

    kind: ClassVar[str] = "mlp"
    shape: ClassVar[Parameter] = GAIN

    gain: Float[Any, ""] = GAIN.field(default=1.0)
    activation: str | Callable[[Array], Array] = eqx.field(default="gelu", static=True)
    expansion: float = eqx.field(default=4.0, static=True)
    gated: bool = eqx.field(default=False, static=True)
    bias: float = eqx.field(default=0.0, static=True)
    offset: float = eqx.field(default=0.0, static=True)

    def __check_init__(self):
        activation_of(self.activation)
        check_bias(self.bias)
        if not (isinstance(self.expansion, int | float) and 0 < self.expansion < math.inf):
            raise InputError(f"expansion: must be positive, got {shown(self.expansion)}")
        if not (isinstance(self.offset, int | float) and math.isfinite(self.offset)):
            raise InputError(f"offset: a number is needed, got {shown(self.offset)}")

    def alternatives(self, width: int) -> dict[str, AbstractBranch]:
        """Other activations, and units with a gate or without."""
        del width
        return self.with_changes(self.changes())

    def changes(self) -> dict[str, dict[str, Any]]:
        """Fields of units that code may have by mistake, by what is other."""
        of_activation = {f"the activation is {name}": {"activation": name} for name in ("relu", "gelu", "silu")}
        of_gates = {
            "units have no gate" if self.gated else "units have a gate": {"gated": not self.gated, "offset": 0.0},
            "gates have no offset": {"offset": 0.0},
        }
        return of_activation | of_gates

    def check_width(self, width: int) -> None:
        """Raise an InputError for a width of less than one hidden unit."""
        if self.units(width) < 1:
            raise InputError(f"expansion: {self.expansion:g} times a width of {width} is less than one hidden unit")

    def hidden(self, U: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m u"]:
        """Draw weights and compute h."""
        width = U.shape[1]
        key_weights, key_biases = jr.split(key)
        count, units = 1 + self.gated, self.units(width)
        W = jr.normal(key_weights, (count, width, units), U.dtype)
        offsets = jr.normal(key_biases, (count, units), U.dtype)
        return self._features(*(projection(U, W[k], offsets[k], self.gain, self.bias) for k in range(count)))

    def hidden_covariance(
        self, V: Float[Array, "m m 1 networks"], *, width: Int[Array, ""] | int, keys: NetworkKeys
    ) -> Float[Array, "m m 1 networks"]:
        """The sum over units of hhᵀ, for projections z = L × normals with L Lᵀ = G."""
        units = self.units(width)
        return self.units_gram(factor(projected(V, self.gain, self.bias)), units, keys=keys) / units

    def units_gram(
        self,
        L: Float[Array, "m m 1 networks"],
        units: Int[Array, ""] | int,
        *,
        weights: Float[Array, "m experts networks"] | None = None,
        keys: NetworkKeys,
    ) -> Float[Array, "m m 1 networks"]:
        """Σ hhᵀ over hidden units, whose projections have the covariance L Lᵀ.

        With weights p of experts, the sum over experts of that of p ⊙ h.
        """
        tokens, experts = len(L), 1 if weights is None else weights.shape[1]

        def add(number: Int[Array, ""], S: Array) -> Array:
            shape = (1 + self.gated, tokens, COLUMNS_AT_ONCE, experts)
            h = self._features(*(matmul(L, z) for z in keys.normals(shape, L.dtype, stream=1, block=number)))
            is_unit = number * COLUMNS_AT_ONCE + jnp.arange(COLUMNS_AT_ONCE) < units
            h = h if weights is None else h * weights[:, None]
            return S + total(gram(jnp.where(is_unit[:, None, None], h, 0.0)), axis=2)[:, :, None]

        return jax.lax.fori_loop(0, -(-units // COLUMNS_AT_ONCE), add, jnp.zeros_like(L))

    def nodes(self, tokens: int, width: int, *, log2: int, seed: int = 0) -> Float[np.ndarray, "nodes m"]:
        """Standard normals; the gate's are integrated out."""
        del width
        return ndtri(uniform_nodes(tokens, log2, seed))

    def moments(self, V: Float[Array, "m m"], nodes: Any, *, width: Int[Array, ""] | int) -> MatrixMoments:
        """Means over nodes; given φ, a gated unit is normal with the mean c φ and the covariance φ_a G_ab φ_b."""
        tokens, count = len(V), len(nodes)
        L = jnp.linalg.cholesky(projected(V, self.gain, self.bias))
        phi = jax.lax.optimization_barrier(activation_of(self.activation)(nodes @ L.T))
        if self.gated:
            M = phi[:, :, None] * L
            P = M @ M.mT
            part, of_gates = vech(P), fourth_moments(P)
            if self.offset:
                N = self.offset**2 * phi[:, :, None] * phi[:, None, :]
                part, of_gates = vech(P + N), fourth_moments(P + N) - fourth_moments(N)
        else:
            a, b = pairs(tokens)
            part, of_gates = phi[:, a] * phi[:, b], 0.0
        mean, covariance = moments_of_draws(part)
        return MatrixMoments(mean, (covariance + of_gates / count) / self.units(width))

    def _features(self, z: Array, gate: Array | None = None) -> Array:
        phi = activation_of(self.activation)(z)
        return phi if gate is None else phi * (gate + self.offset)

    def units(self, width: Any) -> Any:
        """Number u of hidden units."""
        if isinstance(width, int | np.integer):
            return round(self.expansion * int(width))
        return jnp.round(self.expansion * width).astype(int)
