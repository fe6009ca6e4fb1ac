"""How a likelihood that is too sure, or not sure enough, is widened or narrowed."""

from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float


class Adjustment(eqx.Module):
    """ℓ(u) → ℓ(û + C (u − û))/φ, with unconstrained parameters u.

    Below a certain τ0 the law of attention does not hold for the data, and is not believed: ℓ is constant there, and
    the prior decides.

    Attributes:
        dispersion: φ.
        least_tau0: that τ0.
        centre: û, shape (parameters,).
        matrix: C, shape (parameters, parameters).
    """

    dispersion: Float[Array, ""]
    least_tau0: Float[Array, ""]
    centre: Float[Array, " parameters"]
    matrix: Float[Array, "parameters parameters"]

    def __call__(self, parameters: Mapping[str, ArrayLike]) -> dict[str, Array]:
        """Move parameters by their names."""
        moved = self.centre + self.matrix @ (unconstrained(parameters) - self.centre)
        at = constrained(tuple(parameters), moved)
        if "tau0" in at:
            at["tau0"] = _at_least(at["tau0"], self.least_tau0)
        return at


def no_adjustment(parameters: int) -> Adjustment:
    """The adjustment of so many parameters that changes nothing; with it, one program serves before and after."""
    dtype = jnp.result_type(float)
    values = (1.0, 0.0, np.zeros(parameters), np.eye(parameters))
    return Adjustment(*jax.device_put([np.asarray(x, dtype) for x in values]))


def unconstrained(parameters: Mapping[str, ArrayLike]) -> Float[Array, " parameters"]:
    """Of those there are: logit γ, log τ0, log(c₊ − c₋) and (c₊ + c₋)/2; of NumPy arrays, by NumPy."""
    xp = _numpy_of(*parameters.values())
    given = {name: xp.asarray(value, float) for name, value in parameters.items()}
    u = []
    if "gamma" in given:
        u.append(xp.log(given["gamma"]) - xp.log1p(-given["gamma"]))
    if "tau0" in given:
        u.append(xp.log(given["tau0"]))
    if "c_plus" in given:
        u += [xp.log(given["c_plus"] - given["c_minus"]), (given["c_plus"] + given["c_minus"]) / 2]
    return xp.stack(u)


def constrained[T: Array | np.ndarray](names: tuple[str, ...], u: Float[T, "parameters ..."]) -> dict[str, T]:
    """The parameters of these names, of which `unconstrained` makes u; of a NumPy array, by NumPy."""
    xp, left = _numpy_of(u), list(u)
    parameters = {}
    if "gamma" in names:
        parameters["gamma"] = 1 / (1 + xp.exp(-left.pop(0)))
    if "tau0" in names:
        parameters["tau0"] = xp.exp(left.pop(0))
    if "c_plus" in names:
        half_gap, mean = xp.exp(left.pop(0)) / 2, left.pop(0)
        parameters |= {"c_plus": mean + half_gap, "c_minus": mean - half_gap}
    return parameters


def _numpy_of(*values: Any) -> Any:
    """NumPy for its arrays and for numbers, JAX's for what JAX has made or traces."""
    return jnp if any(isinstance(value, jax.Array) for value in values) else np


def _at_least(x: Float[Array, ""], least: Float[Array, ""]) -> Float[Array, ""]:
    """x, smoothly kept above a bound: 0.6 % more than x at 1.5 times the bound."""
    larger = jnp.maximum(x, least)
    return larger * (1 + (jnp.minimum(x, least) / larger) ** 8) ** (1 / 8)
