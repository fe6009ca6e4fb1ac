"""Recipes by name, and from a user's own standard deviations."""

import inspect
import math
from collections.abc import Mapping
from typing import Any, get_args

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.auditing._recipe import Matrix, Recipe, Role
from sdeinfer.auditing._recipes import RECIPES

EXAMPLES = {"base_width": 256, "base_layers": 2}
"""Examples, in errors, of the sizes that a recipe needs."""


def recipe_of(recipe: Any, sd: float | None = None) -> Recipe:
    """A recipe from its name, from standard deviations by role, or as it is.

    Recipes by name take `sd`, that of the model's configuration, if they have one.

    Raises:
        InputError: for an unknown name or role, and for the name of a recipe that needs sizes.
    """
    match recipe:
        case Recipe():
            return recipe
        case str():
            return _named(recipe, sd)
        case Mapping():
            return _own(recipe)
    raise InputError(f"recipe: a name, a Recipe or a dict of standard deviations is needed, got {shown(recipe)}")


def _named(name: str, sd: float | None) -> Recipe:
    if name not in RECIPES:
        raise InputError(f"recipe: one of {', '.join(RECIPES)} is needed, got {shown(name)}")
    known = inspect.signature(RECIPES[name]).parameters
    missing = [each.name for each in known.values() if each.default is each.empty]
    if missing:
        example = ", ".join(f"{each}={EXAMPLES[each]}" for each in missing)
        raise InputError(f"recipe: {name} needs {' and '.join(missing)}: pass si.audit.recipes.{name}({example})")
    return RECIPES[name]() if sd is None or "sd" not in known else RECIPES[name](sd=sd)


def _own(sds: Mapping[Any, Any]) -> Recipe:
    """A recipe of standard deviations by role; it has the scale 1/√(2L) if those of the last matrices have."""
    roles = get_args(Role)
    for role, sd in sds.items():
        if role not in roles:
            raise InputError(f"recipe: roles are {', '.join(roles)}, got {shown(role)}")
        if not isinstance(sd, int | float):
            raise InputError(f"recipe: a standard deviation is needed for {role}, got {shown(sd)}")

    def of(matrix: Matrix) -> float:
        if matrix.role not in sds:
            raise InputError(f"recipe: a standard deviation is needed for {matrix.role}, got none")
        return sds[matrix.role]

    def factors(matrix: Matrix) -> dict[str, float]:
        first = {"attention output": "value", "mlp output": "up"}.get(matrix.role)
        scale = 1 / math.sqrt(2 * matrix.layers)
        known = first in sds and matrix.role in sds
        return {"1/√(2L)": scale} if known and math.isclose(sds[matrix.role], scale * sds[first], rel_tol=0.01) else {}

    return Recipe("the given standard deviations", "the user", of, factors=factors)
