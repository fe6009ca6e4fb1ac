"""Which parameters of a layer tuning chooses, from what is fixed, and their boxes."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from sdeinfer._arguments import at_least_one
from sdeinfer._files import InputError
from sdeinfer.blocks import STRENGTH
from sdeinfer.layers import Architecture, as_module, is_profile
from sdeinfer.parameters import BIJECTIONS, SLOPES, Parameter
from sdeinfer.tuning._space import BOX, BOX_OF_STRENGTH, DEPTH, START, Free, Space


def space_of(
    kind: Architecture,
    *,
    fixed: Mapping[str, Any],
    named: Iterable[str],
    depth: int | tuple[int, int],
    start: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]],
    knots: Mapping[str, int],
    drawn: tuple[str, ...] = (),
) -> Space:
    """The space of all parameters of a layer that are not fixed.

    Arguments:
        kind: the kind of layer.
        fixed: values of single parameters that are not free.
        named: names that the objective, a start, bounds or knots mention. Parameters of several parts that one of them
            means together, as `strength`, have one value.
        depth: d, or the fewest and the most layers.
        start: values at which the search starts, by name.
        bounds: lowest and highest value, by name.
        knots: number of values over depth, by name.
        drawn: names of parameters that have one value per posterior draw.

    Raises:
        InputError: for names that the layer does not have, or for values out of range.
    """
    sampled, declared = kind.coordinates.sampled, kind.coordinates.declared
    known, settled = {**declared, **sampled}, {*fixed, *drawn}
    of_free = {"start": start, "bounds": bounds, "knots": knots}
    for what, given in {"fixed": fixed, **of_free, "posterior": drawn}.items():
        for name in given:
            if not (known.keys() & parts_named(kind, name)) and not (name == DEPTH and what in ("start", "bounds")):
                raise InputError(f"{what}: {kind.name} has no parameter {name}; it has {', '.join(known)}")
    names = [name for name in sampled if name not in settled and not _is_settled(kind, name, settled)]
    groups = _groups(kind, names, named)
    for what, given in of_free.items():
        for name in given:
            if name not in groups and not (name == DEPTH and isinstance(depth, tuple)):
                raise InputError(f"{what}: {name} is not free; free are {', '.join(groups) or 'none'}")
    free = [
        _free(name, members, sampled[members[0]], start, bounds, knots.get(name, 1)) for name, members in groups.items()
    ]
    if isinstance(depth, tuple):
        low, high = depth
        if not 1 <= low < high:
            raise InputError(f"depth: 1 ≤ fewest < most layers are needed, got {low} and {high}")
        free.append(Free(DEPTH, (), "log", float(low), float(high), float(start.get(DEPTH, (low * high) ** 0.5))))
    if not free:
        raise InputError("fixed: no parameter is free")
    profiled = tuple(name for name, value in fixed.items() if is_profile(value))
    over_depth = [member for name, members in groups.items() for member in members if knots.get(name, 1) > 1]
    for name in (*profiled, *over_depth):
        if name not in declared:
            raise InputError(f"{name}: only the layer's own parameters, {', '.join(declared)}, change with depth")
    _check_fixed(kind, settled, profiled)
    return Space(kind, tuple(free), tuple(drawn), profiled)


def parts_named(kind: Architecture, name: str) -> tuple[str, ...]:
    """The parameters and coordinates that a name means: one, or those of all parts of a layer, as `strength`."""
    known = [*kind.coordinates.declared, *kind.coordinates.sampled]
    return (name,) if name in known else tuple(dict.fromkeys(each for each in known if each.endswith(f".{name}")))


def with_parts(kind: Architecture, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values with the names of single parameters; that of a single one overrides that of all parts."""
    own = {name: value for name, value in given.items() if (name,) == parts_named(kind, name)}
    return {part: value for name, value in given.items() for part in parts_named(kind, name) or (name,)} | own


def fixed_values(kind: Architecture, fixed: Mapping[str, Any]) -> dict[str, Any]:
    """The fixed values, checked; functions of depth-time as modules."""
    found = {}
    for name, value in fixed.items():
        if is_profile(value):
            found[name] = as_module(value)
        else:
            parameters = kind.coordinates.sampled | kind.coordinates.declared
            found[name] = np.asarray(parameters[name].checked(value), float)
            if found[name].ndim:
                raise InputError(f"fixed: {name}: a number or a function of depth-time is needed")
    return found


def _groups(kind: Architecture, names: list[str], given: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """The free coordinates by name, where names that are given may mean several."""
    groups = {}
    for name in dict.fromkeys(given):
        members = tuple(each for each in parts_named(kind, name) if each in names)
        if members and name not in names:
            groups[name] = members
    grouped = {member: name for name, members in groups.items() for member in members}
    for name in given:
        if name in grouped:
            raise InputError(f"{name}: it has the value of {grouped[name]}, which is given as well")
    # In the layer's order.
    found = [grouped.get(name, name) for name in names]
    return {name: groups.get(name, (name,)) for name in dict.fromkeys(found)}


def _free(
    name: str,
    members: tuple[str, ...],
    parameter: Parameter,
    start: Mapping[str, float],
    bounds: Mapping[str, tuple[float, float]],
    knots: int,
) -> Free:
    bijection = parameter.bijection
    box = BOX_OF_STRENGTH if parameter is STRENGTH else BOX[bijection]
    pair, range_of = bounds.get(name, box), BIJECTIONS[bijection]
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not pair[0] < pair[1]:
        raise InputError(f"bounds: {name}: an increasing pair is needed, got {pair}")
    if not all(range_of.above < end <= range_of.most for end in pair):
        raise InputError(f"bounds: {name}: values {range_of.range} are needed, got {pair}")
    at_least_one(**{f"knots: {name}": knots})
    # The upper end of γ is at infinity on the real line.
    low, high = (min(float(end), BOX[bijection][1]) if bijection == "logit" else float(end) for end in pair)
    return Free(
        name, members, bijection, low, high, float(np.clip(start.get(name, START[bijection]), low, high)), knots
    )


def _check_fixed(kind: Architecture, settled: set[str], profiled: Iterable[str]) -> None:
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


def _is_settled(kind: Architecture, name: str, settled: set[str]) -> bool:
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
