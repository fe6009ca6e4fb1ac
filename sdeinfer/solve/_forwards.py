"""Derivatives in a few numbers, which are computed forwards whichever way they are asked for.

The reverse pass of a solve compiles for five times as long as its tangents, which are one program for all directions.
Along n numbers tangents cost n solves, and are as large as n results. Tests: `tests/solve/test_derivatives.py`.
"""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp

FORWARD_SCALARS = 8
"""Largest number of scalars along which a derivative is computed forwards: more than a shaped layer has parameters."""


def along_few_numbers[T](function: Callable[..., T]) -> Callable[..., T]:
    """Differentiate `function` by tangents where few scalars are perturbed and no arrays, otherwise as JAX does.

    Derivatives of derivatives go the same way.
    """
    wrapped = eqx.filter_custom_jvp(function)

    @wrapped.def_jvp
    def derivative(primals, tangents):
        directions, structure = jax.tree.flatten(tangents)
        is_perturbed = jax.tree.map(lambda tangent: tangent is not None, tangents, is_leaf=lambda x: x is None)

        def along(direction, values):
            """The function, and its tangent along a direction of the perturbed arguments."""
            perturbed, fixed = eqx.partition(values, is_perturbed)
            tangent = jax.tree.unflatten(structure, direction)
            return jax.jvp(lambda perturbed: function(*eqx.combine(perturbed, fixed)), [perturbed], [tangent])

        def with_columns(*values):
            """The function, and its derivatives by each of the perturbed scalars."""
            basis = list(jnp.eye(len(directions), dtype=directions[0].dtype))
            return jax.vmap(lambda direction: along(direction, values), out_axes=(None, 0))(basis)

        if len(directions) > FORWARD_SCALARS or any(map(jnp.ndim, directions)):
            return along(directions, primals)
        # Wrapped again, so that the columns have the same rule.
        output, columns = along_few_numbers(with_columns)(*primals)
        return output, jax.tree.map(lambda column: jnp.tensordot(jnp.stack(directions), column, 1), columns)

    return wrapped
