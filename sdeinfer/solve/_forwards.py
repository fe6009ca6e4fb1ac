"""Derivatives in a few numbers, which are computed forwards whichever way they are asked for.

The reverse pass of a solve compiles for five times as long as its tangents, which are one program for all directions.
Along n numbers tangents cost n solves, and are as large as n results. Tests: `tests/solve/test_derivatives.py`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

FORWARD_SCALARS = 8
"""Largest number of scalars along which a derivative is computed forwards: more than a shaped layer has parameters."""


def along_few_numbers[T](function: Callable[..., T]) -> Callable[..., T]:
    """Differentiate `function` by tangents where few scalars are perturbed and no arrays, otherwise as JAX does.

    Derivatives of derivatives go the same way.
    """
    wrapped = jax.custom_jvp(function)

    def derivative(primals, tangents):
        places = [place for place, tangent in enumerate(tangents) if not isinstance(tangent, SymbolicZero)]
        directions = [tangents[place] for place in places]

        def along(direction, values):
            """The function, and its tangent along a direction of the perturbed arguments."""

            def of_perturbed(*perturbed):
                changed = dict(zip(places, perturbed, strict=True))
                return function(*(changed.get(place, value) for place, value in enumerate(values)))

            return jax.jvp(of_perturbed, [values[place] for place in places], direction)

        def with_columns(*values):
            """The function, and its derivatives by each of the perturbed scalars."""
            basis = list(jnp.eye(len(places), dtype=directions[0].dtype))
            return jax.vmap(along, in_axes=(0, None), out_axes=(None, 0))(basis, values)

        if len(places) > FORWARD_SCALARS or any(map(jnp.ndim, directions)):
            return along(directions, primals)
        # Wrapped again, so that the columns have the same rule.
        output, columns = along_few_numbers(with_columns)(*primals)
        return output, jax.tree.map(lambda column: jnp.tensordot(jnp.stack(directions), column, 1), columns)

    wrapped.defjvp(derivative, symbolic_zeros=True)
    return wrapped
