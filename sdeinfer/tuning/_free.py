"""Which parameters of a layer tuning chooses, from what is fixed, and their boxes.

Tests: `tests/tuning/test_tune.py`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sdeinfer._arguments import at_least_one
from sdeinfer._files import InputError
from sdeinfer.blocks._block import OUTPUT_GAIN, STRENGTH
from sdeinfer.layers import AbstractLayer
from sdeinfer.layers._over_depth import as_module, is_profile
from sdeinfer.parameters import BIJECTIONS, SLOPES, Parameter
from sdeinfer.tuning._space import BOX, Free, Space


def space_of(
    kind: AbstractLayer,
    *,
    fixed: Mapping[str, Any],
    objective: str | None,
    bounds: Mapping[str, tuple[float, float]],
    knots: Mapping[str, int],
) -> Space:
    """The space of all parameters of a layer that are not fixed; those that one name means have one value."""
    sampled, declared = kind.coordinates.sampled, kind.coordinates.declared
    parameters = declared | sampled
    for argument, values in {"fixed": fixed, "bounds": bounds, "knots": knots}.items():
        for name in values:
            if not parameters.keys() & parts_named(kind, name):
                raise InputError(f"{argument}: {kind.name} has no parameter {name}; it has {', '.join(parameters)}")
    names = [name for name in sampled if name not in fixed and not _is_settled(kind, name, set(fixed))]
    groups = _groups(kind, names, [*bounds, *knots, *([objective] if objective else [])])
    for argument, values in {"bounds": bounds, "knots": knots}.items():
        for name in values:
            if name not in groups:
                raise InputError(f"{argument}: {name} is not free; free are {', '.join(groups) or 'none'}")
    if not groups:
        raise InputError("fixed: no parameter is free")
    free = tuple(
        _free(name, members, sampled[members[0]], bounds, knots.get(name, 1)) for name, members in groups.items()
    )
    profiled = tuple(name for name, value in fixed.items() if is_profile(value))
    for name in (*profiled, *(member for parameter in free if parameter.knots > 1 for member in parameter.members)):
        if name not in declared:
            raise InputError(f"{name}: only the layer's own parameters, {', '.join(declared)}, change with depth")
    _check_fixed(kind, set(fixed), profiled)
    return Space(kind, free, profiled)


def parts_named(kind: AbstractLayer, name: str) -> tuple[str, ...]:
    """The parameters and coordinates that a name means: one, or those of all parts of a layer, as `strength`."""
    names = [*kind.coordinates.declared, *kind.coordinates.sampled]
    return (name,) if name in names else tuple(dict.fromkeys(part for part in names if part.endswith(f".{name}")))


def with_parts(kind: AbstractLayer, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values with the names of single parameters; that of a single one overrides that of all parts."""
    single_values = {name: value for name, value in values.items() if (name,) == parts_named(kind, name)}
    return {
        part: value for name, value in values.items() for part in parts_named(kind, name) or (name,)
    } | single_values


def fixed_values(kind: AbstractLayer, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The fixed values, checked; functions of depth-time as modules."""
    values, parameters = {}, kind.coordinates.sampled | kind.coordinates.declared
    for name, value in fixed.items():
        values[name] = as_module(value) if is_profile(value) else np.asarray(parameters[name].checked(value), float)
        if not is_profile(value) and values[name].ndim:
            raise InputError(f"fixed: {name}: a number or a function of depth-time is needed")
    return values


def _groups(kind: AbstractLayer, names: list[str], given: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The free coordinates by name, in the layer's order, where names that are given may mean several."""
    grouped: dict[str, str] = {}
    for name in dict.fromkeys(given):
        if name not in names:
            grouped |= {member: name for member in parts_named(kind, name) if member in names}
    for name in given:
        if name in grouped:
            raise InputError(f"{name}: it has the value of {grouped[name]}, which is given as well")
    groups: dict[str, tuple[str, ...]] = {}
    for member in names:
        name = grouped.get(member, member)
        groups[name] = (*groups.get(name, ()), member)
    return groups


def _free(
    name: str,
    members: tuple[str, ...],
    parameter: Parameter,
    bounds: Mapping[str, tuple[float, float]],
    knots: int,
) -> Free:
    bijection = parameter.bijection
    # A strength of blocks compares with the size of the stream, that of embeddings: 0.02 in many models.
    box = (1e-4, BOX["log"][1]) if parameter in (STRENGTH, OUTPUT_GAIN) else BOX[bijection]
    pair, range_of = bounds.get(name, box), BIJECTIONS[bijection]
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not pair[0] < pair[1]:
        raise InputError(f"bounds: {name}: an increasing pair is needed, got {pair}")
    if not all(range_of.above < end <= range_of.most for end in pair):
        raise InputError(f"bounds: {name}: values {range_of.range} are needed, got {pair}")
    at_least_one(**{f"knots: {name}": knots})
    # The upper end of γ is at infinity on the real line.
    low, high = (min(float(end), BOX[bijection][1]) if bijection == "logit" else float(end) for end in pair)
    return Free(name, members, bijection, low, high, knots)


def _check_fixed(kind: AbstractLayer, settled: set[str], profiled: Iterable[str]) -> None:
    """Raise an InputError where fixed parameters contradict each other, or do not determine a layer."""
    for names, sampled, rule in kind.coordinates.rules:
        known = [name for name in (*names, *sampled) if name in settled]
        if rule is None:
            continue
        if len(known) > len(sampled):
            raise InputError(f"fixed: {', '.join(known)} are too many, {len(sampled)} of them fix the others")
        if rule is SLOPES and sampled[1] in known and set(names) & set(known):
            raise InputError(f"fixed: {', '.join(known)}: give {' and '.join(names)}, or one of them")
        whole = rule is not SLOPES or any(name in profiled for name in known)
        if whole and known and not settled.issuperset(names):
            raise InputError(f"fixed: give all of {', '.join(names)}, or none of them")


def _is_settled(kind: AbstractLayer, name: str, settled: set[str]) -> bool:
    """Whether a sampled coordinate follows from the fixed parameters, or changes nothing in the limit.

    Of c₊, c₋ and their mean, one determines the others once the gap is known.
    """
    for parameters, sampled, rule in kind.coordinates.rules:
        if name not in sampled or rule is None:
            continue
        if rule is not SLOPES:
            return bool(settled & set(parameters))
        return name == sampled[1] or settled.issuperset(parameters)
    return False
