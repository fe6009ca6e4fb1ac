"""What every layer has: a finite form with weights, and the limit of its covariance."""

import abc
import functools
import math
import operator
from collections.abc import Callable, Mapping

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from sdeinfer._compiler import RUN_ONCE
from sdeinfer._files import InputError
from sdeinfer.covariance import is_concrete
from sdeinfer.layers._finite_width import FiniteWidth
from sdeinfer.layers._keys import NetworkKeys
from sdeinfer.layers._limit import Limit


class AbstractLayer(eqx.Module):
    """One layer of a shaped network: a Markov kernel on representations, and the SDE its covariance tends to."""

    @abc.abstractmethod
    def forward(self, X: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m n"]:
        """Apply one layer with fresh N(0, 1) weights to the representations X of m tokens at width n."""

    @property
    @abc.abstractmethod
    def column_blocks(self) -> int:
        """Into how many equal blocks the columns of X fall that the layer treats differently."""

    @abc.abstractmethod
    def check_width(self, width: int) -> None:
        """Raise an InputError for a width that the layer cannot have."""

    @abc.abstractmethod
    def forward_covariance(
        self, V: Float[Array, "m m blocks networks"], *, width: Int[Array, ""] | int, keys: NetworkKeys
    ) -> Float[Array, "m m blocks networks"]:
        """Draw the covariances of `forward`'s results without any weights, for many networks at once.

        X′ in law depends on X through V only, up to a rotation of its columns, or of those of each block.

        Arguments:
            V: X_b X_bᵀ/n of every block b of columns, n the whole width; a multiple of `column_blocks`, at least 2m
                columns in each.
            width: n, one that `check_width` has seen; it may be traced.
            keys: one for each network.
        """

    @abc.abstractmethod
    def limit(self) -> Limit:
        """Coefficients of the covariance SDE; one layer is dt = 1/n."""

    @abc.abstractmethod
    def finite_width(self, width: ArrayLike) -> FiniteWidth:
        """Coefficients of the law of one layer of width n, to the next order in 1/n; n may be traced."""

    @abc.abstractmethod
    def parameters(self) -> Mapping[str, Array]:
        """The scalars that the layer is made of, by their public names."""


def parameter(value: ArrayLike, name: str, *, above: float = -math.inf, most: float = math.inf) -> Array:
    """Convert a parameter to a scalar array in JAX's default floating-point type, or refuse it.

    Traced values cannot be looked at and pass; `check_parameters` checks them where they are used.

    Arguments:
        value: a real scalar.
        name: what to call it in the error.
        above: it must exceed this …
        most: … and not exceed this.

    Raises:
        InputError: for a value that is not a finite scalar in that range.
    """
    array = jnp.asarray(value)
    if array.ndim != 0 or not jnp.issubdtype(array.dtype, jnp.number) or jnp.iscomplexobj(array):
        raise InputError(f"{name}: a real scalar is needed, got {value!r}")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        array = array.astype(float)
    if is_concrete(array) and not (math.isfinite(array) and above < float(array) <= most):
        raise InputError(f"{name}: must be {_range(above, most)}, got {float(array):g}")
    return array


def gamma_parameter(value: ArrayLike) -> Array:
    """γ in (0, 1]."""
    return parameter(value, "gamma", above=0.0, most=1.0)


def tau0_parameter(value: ArrayLike) -> Array:
    """τ0 > 0."""
    return parameter(value, "tau0", above=0.0)


def gain_parameter(name: str) -> Callable[[ArrayLike | None], Array | None]:
    """Converter of a gain of Eq. 33, finite, or None."""
    return lambda value: None if value is None else parameter(value, name)


def c_plus_parameter(value: ArrayLike) -> Array:
    """c₊, finite."""
    return parameter(value, "c_plus")


def c_minus_parameter(value: ArrayLike) -> Array:
    """c₋, finite."""
    return parameter(value, "c_minus")


def check_parameters[T: AbstractLayer](layer: T) -> T:
    """Check a layer's parameters: known ones at once, traced ones at run time, so that none gives NaN instead.

    Raises:
        InputError: for known parameters out of range.
    """
    parameters = layer.parameters()
    message = f"{', '.join(parameters)}: a parameter is out of range (0 < γ ≤ 1, τ0 > 0)"
    if all(map(is_concrete, parameters.values())):
        if any(np.asarray(_is_faulty(name, np.asarray(value))) for name, value in parameters.items()):
            raise InputError(message)
        return layer
    faulty = functools.reduce(operator.or_, (_is_faulty(name, value) for name, value in parameters.items()))
    return eqx.error_if(layer, faulty, message)


def _is_faulty(name: str, value: Array | np.ndarray) -> Array | np.ndarray:
    # NaN compares as false.
    match name.rpartition(".")[2]:
        case "gamma":
            return ~((value > 0) & (value <= 1))
        case "tau0":
            return ~((value > 0) & (value < math.inf))
    return ~(abs(value) < math.inf)


def limit_on_host(layer: AbstractLayer) -> Limit:
    """The limit of a layer with known parameters, in NumPy arrays and by one compiled program."""
    # Known gains that have no limit are refused in one line; compiled, the refusal would come with a traceback.
    gains = any(name.endswith(("gamma1", "gamma2")) for name in layer.parameters())
    return jax.tree.map(np.asarray, layer.limit() if gains else _limit(layer))


@functools.partial(jax.jit, compiler_options=RUN_ONCE)
def _limit(layer: AbstractLayer) -> Limit:
    return layer.limit()


def shortcut(gamma: Float[Array, ""]) -> Float[Array, ""]:
    """λ = √(1 − γ²), the strength of the shortcut."""
    return jnp.sqrt((1 - gamma) * (1 + gamma))


def _range(above: float, most: float) -> str:
    if math.isinf(above):
        return "finite"
    return f"greater than {above:g} and finite" if math.isinf(most) else f"in ({above:g}, {most:g}]"
