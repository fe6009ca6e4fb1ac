"""Derivatives in a few numbers, which are computed forwards whichever way they are asked for.

The reverse pass of a solve compiles for five times as long as its tangents, which are one program for all directions.
Along n numbers tangents cost n solves, and are as large as n results. Tests: `tests/solve/test_derivatives.py`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

FORWARD_SCALARS = 8
"""Largest number of scalars along which a derivative is computed forwards."""


def along_few_numbers[T](function: Callable[..., T]) -> Callable[..., T]:
    """A function of arrays: its derivatives in scalars by tangents, to any order; in other arrays as JAX has them."""
    wrapped = jax.custom_jvp(function)

    def derivative(primals, tangents):
        places = [place for place, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]
        directions = [tangents[place] for place in places]

        def along(direction, values):
            """The function, and its tangent along a direction of the scalars."""

            def of_scalars(*scalars):
                changed = dict(zip(places, scalars, strict=True))
                return function(*(changed.get(place, value) for place, value in enumerate(values)))

            return jax.jvp(of_scalars, [values[place] for place in places], direction)

        def with_columns(*values):
            basis = list(jnp.eye(len(places), dtype=directions[0].dtype))
            return jax.vmap(along, in_axes=(0, None), out_axes=(None, 0))(basis, values)

        if len(places) > FORWARD_SCALARS or any(map(jnp.ndim, directions)):
            return along(directions, primals)
        output, columns = along_few_numbers(with_columns)(*primals)
        return output, jax.tree.map(lambda column: jnp.tensordot(jnp.stack(directions), column, 1), columns)

    wrapped.defjvp(derivative, symbolic_zeros=True)
    return wrapped
