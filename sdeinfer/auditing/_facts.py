"""Findings that need no recipe: facts of the parameters, and all others; mistakes, and notes.

Tests: `tests/auditing/test_kinds.py`.
"""

import math
from collections.abc import Iterator, Mapping

import numpy as np

from sdeinfer.auditing._books import Books, Dependences
from sdeinfer.auditing._graph_facts import facts_of_graph, parameter_near
from sdeinfer.auditing._law import Law, copies, repeated_slices
from sdeinfer.auditing._stream_facts import facts_of_streams, in_layer
from sdeinfer.auditing._tests import Test, critical, differs, failed, first_names, pattern_of
from sdeinfer.passes._account import Account, columns_of
from sdeinfer.passes._graph import Source
from sdeinfer.passes._operations import is_a
from sdeinfer.passes._readings import LOG_SD_TOLERANCE, Reading
from sdeinfer.passes._record import Node


def facts_of(books: Books, *, has_recipe: bool) -> list[Test]:
    """All findings; notes are passed."""
    account, laws, readings = books.account, books.laws, books.readings
    return [
        *facts_of_graph(account, laws, readings),
        *facts_of_streams(account, books.norms),
        *_not_finite(account, laws),
        *_outliers(account, laws),
        *_copies(account, laws),
        *_dropout(account),
        *_items(account, books.dependences),
        *_zeros(account, laws, has_recipe=has_recipe),
        *([] if has_recipe else _unlike(account, laws, readings)),
        *_unused(account),
        *_unused_outputs(account),
        *_unregistered(account),
    ]


def _not_finite(account: Account, laws: Mapping[str, Law]) -> Iterator[Test]:
    record = account.graph.record
    masks = {name for name, matrix in account.matrices.items() if matrix.role == "mask"}
    bad = [name for name in record.parameters if laws[name].name == "not finite" and name not in masks]
    used = {node.operation for node in record.nodes if node.kind == "buffer"}
    # A mask is −∞ where it is added to logits, and bounds of one entry may be infinite.
    bad += [n for n, b in record.buffers.items() if n in used and not b.finite and not b.masks and b.size > 1]
    if bad:
        yield failed("not finite", bad[0], f"NaN or infinity in {first_names(bad)}", *bad)
    zero = [n for n, b in record.buffers.items() if n in used and "inv_freq" in n and not b.least and not b.largest]
    if zero:
        yield failed("not finite", zero[0], f"{first_names(zero)} is 0: positions do not rotate", *zero)
    for link in [] if bad else account.links:
        if link.sum.rows is not None and not np.isfinite(link.sum.rows).all():
            says = f"the stream is not finite from layer {link.layer} ({link.kind}) on"
            yield failed("not finite", f"layer {link.layer}", says)
            return


def _random(account: Account, laws: Mapping[str, Law]) -> dict[str, Law]:
    """Laws of matrices and tables, whose entries are drawn."""
    roles = ("embedding", "position")
    return {name: laws[name] for name, m in account.matrices.items() if m.linear or m.role in roles}


def _outliers(account: Account, laws: Mapping[str, Law]) -> Iterator[Test]:
    far = {name: law.outlier for name, law in _random(account, laws).items() if law.outlier}
    if far:
        name = max(far, key=far.__getitem__)
        yield failed("outliers", name, f"entries of {first_names([*far])} are up to {far[name]:.3g} σ away", *far)


def _copies(account: Account, laws: Mapping[str, Law]) -> Iterator[Test]:
    parameters, random = account.parameters, _random(account, laws)
    by_first: dict[str, list[tuple[str, float]]] = {}
    for first, second, correlation in copies(parameters, random):
        by_first.setdefault(first, []).append((second, correlation))
    for first, pairs in by_first.items():
        names = [name for name, _ in pairs]
        equal = all(abs(c) > 0.999 for _, c in pairs)
        same = parameters[first].shape == parameters[names[0]].shape and math.isfinite(pairs[0][1])
        scaled = equal and not math.isclose(random[first].sd, random[names[0]].sd, rel_tol=1e-4)
        how = f"are correlated ({pairs[0][1]:.2f})"
        if equal:
            how = "are equal" if same and not scaled else "have the same random numbers"
        yield failed("copies", first, f"{first} and {first_names(names)} {how}", first, *names)
    in_layers = dict.fromkeys(matrix.array for matrix in account.matrices.values() if matrix.layer is not None)
    # A loop over one module uses a parameter of one name; a list that has the module several times, of several.
    shared = [name for name in in_layers if 0 < len(parameters[name].other_names) < len(account.uses.get(name, ()))]
    if shared:
        others = parameters[shared[0]].other_names
        yield failed("copies", shared[0], f"{shared[0]} and {first_names(list(others))} are one parameter", *shared)
    wholes = [m.array for m in account.matrices.values() if m.linear]
    counts = {name: repeated_slices(parameters[name]) for name in dict.fromkeys((*random, *wholes))}
    repeated = [name for name, count in counts.items() if count > 1]
    if repeated:
        has = f"{first_names(repeated)} {'has' if len(repeated) == 1 else 'have'}"
        says = f"{has} {counts[repeated[0]]} equal slices, as of ranks or heads that share a seed"
        yield failed("shards", repeated[0], says, *repeated)


def _dropout(account: Account) -> Iterator[Test]:
    nodes = account.graph.record.nodes
    for node in nodes:
        if node.about.get("dropout") is True or (node.operation == "native_dropout" and node.kind == "random"):
            says = f"dropout runs in evaluation mode ({parameter_near(account, node.number)})"
            yield failed("dropout", node.operation, says)
            return
    if any(node.kind == "random" for node in nodes):
        yield Test("random", "", passed=True, says="random numbers are drawn in evaluation mode")


def _items(account: Account, dependences: Dependences) -> Iterator[Test]:
    if dependences.leaks:
        yield failed("items", "batch", "an item of the batch changes another one")
    axis, axes = dependences.axis, {*_axes_of_positions(account)}
    if axis is not None and axes == {1 - axis}:
        along, seen = ("second", "first") if axis == 0 else ("first", "second")
        says = f"positions are added along the {along} axis, and tokens see each other along the {seen} one"
        yield failed("axes", "positions", f"{says}: is it that of the batch?")
    elif axis == 0:
        says = "tokens see each other along the first axis: is it that of the batch?"
        yield Test("first axis", "batch", passed=True, says=says)


def _axes_of_positions(account: Account) -> Iterator[int]:
    """Axes of states, of three, along which what follows from no input is added to the stream before its first sum."""
    graph = account.graph
    for first, *_ in account.streams:
        for node in graph.nodes(graph.reach[first.stream(graph).number]):
            for added in node.about.get("fixed", ()) if len(node.shape) == 3 else ():
                along = [axis for axis, size in enumerate((1, 1, *added.shape)[-3:-1]) if size > 1]
                if len(along) == 1:
                    yield along[0]


def _zeros(account: Account, laws: Mapping[str, Law], *, has_recipe: bool) -> Iterator[Test]:
    names = [n for n, m in account.matrices.items() if m.linear and laws[n].name == "zeros" and not has_recipe]
    if names:
        yield Test("zeros", names[0], passed=True, says=f"{first_names(names)} start from 0", names=tuple(names))


def _unlike(account: Account, laws: Mapping[str, Law], readings: list[Reading]) -> Iterator[Test]:
    """Single matrices whose σ or reading differs from the others of their role, where these are alike."""
    groups: dict[tuple, list[str]] = {}
    for name, matrix in account.matrices.items():
        if matrix.layer is not None and matrix.linear and laws[name].sd > 0:
            groups.setdefault((matrix.role, matrix.shape, matrix.layers), []).append(name)
    z = critical(2 * len(laws))
    factors = {reading.name: reading for reading in readings if reading.factor > 0}
    for (role, *_), names in groups.items():
        if len(names) < 3:
            continue
        logs = np.array([math.log(laws[n].sd * abs(account.writer_factor(account.matrices[n].array))) for n in names])
        errors = np.array([laws[name].error for name in names])
        away = logs - np.median(logs)
        odd = [k for k in range(len(names)) if differs(away[k], errors[k], z)]
        if 0 < len(odd) <= len(names) // 4:
            says = f"σ of {role} {names[odd[0]]} is {math.exp(away[odd[0]]):.3g} times that of other layers"
            yield failed("unlike", names[odd[0]], says, *[names[k] for k in odd])
        known = [name for name in names if name in factors]
        if len(known) == len(names):
            away = np.log([factors[name].factor for name in names])
            away -= np.median(away)
            most = 2 * LOG_SD_TOLERANCE - math.log(min(factors[name].least for name in names))
            odd = np.flatnonzero(np.abs(away) > most).tolist()
            if 0 < len(odd) <= len(names) // 4:
                ratio = math.exp(away[odd[0]])
                says = f"what {role} {names[odd[0]]} reads is {ratio:.3g} times that of other layers"
                yield failed("unlike", names[odd[0]], says, *[names[k] for k in odd])


def _unregistered(account: Account) -> Iterator[Test]:
    """Tensors with gradients that are no parameters, as of modules in a Python list."""
    shapes = [node.shape for node in account.graph.record.nodes if node.kind == "constant" and node.about.get("trains")]
    if shapes:
        says = f"tensors that train are no parameters of the model, as of modules in a list ({len(shapes)} of them, "
        yield failed("unregistered", str(shapes[0]), f"{says}the first of shape {shapes[0]})")


def _unused_outputs(account: Account) -> Iterator[Test]:
    """Products of which some outputs are cut off, and used by nothing."""
    record = account.graph.record
    inside = {matrix.array for matrix in account.matrices.values() if matrix.layer is not None}
    unused: dict[str, str] = {}
    for name in (name for name in record.parameters if name in inside):
        product, *other_uses = account.uses.get(name, [Node("none", (), ())])
        pieces = _pieces(product, record.readers) if product.kind == "product" and not other_uses else None
        columns = [columns_of(record, Source(product, moves=(moves,))) for moves in pieces or ()]
        known = [indices for indices in columns if indices is not None]
        outputs = product.about.get("fan_out", 0)
        used = len(np.unique(np.concatenate(known))) if known and len(known) == len(columns) else outputs
        if used < outputs:
            unused[name] = f"{outputs - used} of {outputs} outputs"
    if unused:
        first, *names = unused
        also = f" (and {len(names)} more)" if names else ""
        yield failed("unused", first, f"{unused[first]} of {first} are not used{also}", *unused)


def _pieces(product: Node, readers: Mapping[int, list[Node]]) -> list[tuple[Node, ...]] | None:
    """The moves to each piece of a product's outputs; None if a use of them all is among them."""
    pieces: list[tuple[Node, ...]] = []
    stack: list[tuple[Node, tuple[Node, ...]]] = [(product, ())]
    while stack:
        node, moves = stack.pop()
        for reader in readers.get(node.number, []):
            if reader.kind != "view" or reader.moved is None:
                return None
            if is_a(reader.operation, "piece"):
                pieces.append((*moves, reader))
            else:
                stack.append((reader, (*moves, reader)))
    return pieces or None


def _unused(account: Account) -> Iterator[Test]:
    """Parameters without use: mistakes inside of layers, unless others of their kind are used, as of experts."""
    layers, unreached = account.layer_names, account.unreached
    reached = {*account.graph.record.parameters} - {*unreached}
    used = {(layer, pattern_of(name)) for layer, name in (in_layer(parameter, layers) for parameter in reached)}
    # A router may choose none of a layer's experts for these inputs.
    chosen = {in_layer(m.array, layers)[0] for m in account.matrices.values() if m.role == "router"}
    inside = []
    for name in unreached:
        layer, suffix = in_layer(name, layers)
        expert = layer in chosen and len(account.graph.record.parameters[name].shape) > 1
        if layer and not expert and (layer, pattern_of(suffix)) not in used:
            inside.append(name)
    outside = [name for name in unreached if name not in inside]
    if inside:
        yield failed("unused", inside[0], f"no output follows from {first_names(inside)}", *inside)
    if outside:
        says = f"no output follows from {first_names(outside)}"
        yield Test("left", outside[0], passed=True, says=says, names=tuple(outside))
