"""Facts of the graph and of the parameters that need no recipe: mistakes, and notes.

Tests: `tests/auditing/test_audit.py`, `tests/auditing/test_torch_kinds.py`.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

from sdeinfer.auditing._account import Account
from sdeinfer.auditing._dependences import Dependences
from sdeinfer.auditing._law import Law, copies, repeated_blocks
from sdeinfer.auditing._readings import BranchNorms, Reading
from sdeinfer.auditing._record import Node
from sdeinfer.auditing._tests import ALIKE, Test, critical, differs, pattern_of, writer_factor

FAILS = {
    "not finite": "NaN or infinity in a parameter, a buffer or a sum of the stream",
    "outliers": "entries of a matrix that are many standard deviations away",
    "copies": "tensors with equal or correlated entries that are not tied",
    "shards": "a matrix of equal blocks, as of ranks that share a seed",
    "dropout": "a dropout that runs in evaluation mode",
    "items": "an item of the batch that depends on another one",
    "norm": "a norm that multiplies by what it should divide by, or that is not over features",
    "softmax": "probabilities of attention that sum to 1 over queries",
    "probabilities": "a factor of the probabilities after softmax",
    "series": "branches that are not added to one stream, one after the other",
    "unlike": "one layer unlike the others of its role",
    "unused": "a parameter of a layer that no operation uses",
    "dead": "a matrix that reads zeros, or zeros through which no gradient passes",
    "queries": "keys or values that read the stream itself where queries read its norm",
}
"""Findings that fail an audit without a recipe; `allow=` takes each off. Others are notes."""


def facts_of(
    account: Account,
    laws: Mapping[str, Law],
    dependences: Dependences,
    readings: list[Reading],
    norms: list[BranchNorms],
    *,
    judged: bool,
) -> list[Test]:
    """All findings; notes are passed."""
    return [
        *_not_finite(account, laws),
        *_outliers(account, laws),
        *_copies(account, laws),
        *_dropout(account),
        *_inverse_norms(account),
        *_uneven_norms(readings),
        *_attentions(account),
        *_queries(readings),
        *_series(account),
        *_dependences(dependences),
        *_dead(account, laws, readings),
        *_zeros(account, laws, judged=judged),
        *_unlike_norms(norms),
        *([] if judged else _unlike(account, laws, readings)),
        *_unused(account),
    ]


def _fail(topic: str, what: str, says: str, *names: str) -> Test:
    return Test(topic, what, passed=False, says=says, names=names)


def some(names: list[str]) -> str:
    """At most three names."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _not_finite(account: Account, laws: Mapping[str, Law]) -> Iterator[Test]:
    record = account.graph.record
    masks = {name for name, matrix in account.matrices.items() if matrix.role == "mask"}
    bad = [name for name in record.parameters if laws[name].name == "not finite" and name not in masks]
    used = {node.operation for node in record.nodes if node.kind == "buffer"}
    # A mask is −∞ where it is added to logits, and bounds of one entry may be infinite.
    bad += [n for n, b in record.buffers.items() if n in used and not b.finite and not b.masks and b.size > 1]
    if bad:
        yield _fail("not finite", bad[0], f"NaN or infinity in {some(bad)}", *bad)
    zero = [n for n, b in record.buffers.items() if n in used and "inv_freq" in n and not b.least and not b.largest]
    if zero:
        yield _fail("not finite", zero[0], f"{some(zero)} is 0: positions do not rotate", *zero)
    for chain in [] if bad else account.streams:
        for link in chain:
            if link.sum.rows is not None and not np.isfinite(link.sum.rows).all():
                says = f"the stream is not finite from layer {link.layer} ({link.kind}) on"
                yield _fail("not finite", f"layer {link.layer}", says)
                return


def _random(account: Account, laws: Mapping[str, Law]) -> dict[str, Law]:
    """Laws of matrices and tables, whose entries are drawn."""
    roles = ("embedding", "position")
    return {name: laws[name] for name, m in account.matrices.items() if m.linear or m.role in roles}


def _outliers(account: Account, laws: Mapping[str, Law]) -> Iterator[Test]:
    far = {name: law.outlier for name, law in _random(account, laws).items() if law.outlier}
    if far:
        name = max(far, key=far.__getitem__)
        yield _fail("outliers", name, f"entries of {some([*far])} are up to {far[name]:.3g} σ away", *far)


def _copies(account: Account, laws: Mapping[str, Law]) -> Iterator[Test]:
    parameters, random = account.parameters, _random(account, laws)
    by_first: dict[str, list[tuple[str, float]]] = {}
    for first, second, correlation in copies(parameters, random):
        by_first.setdefault(first, []).append((second, correlation))
    for first, pairs in by_first.items():
        names = [name for name, _ in pairs]
        equal = all(abs(c) > 0.999 for _, c in pairs)
        same = parameters[first].shape == parameters[names[0]].shape
        scaled = equal and not math.isclose(random[first].sd, random[names[0]].sd, rel_tol=1e-4)
        how = f"are correlated ({pairs[0][1]:.2f})"
        if equal:
            how = "are equal" if same and not scaled else "have the same random numbers"
        yield _fail("copies", first, f"{first} and {some(names)} {how}", first, *names)
    wholes = [m.array for m in account.matrices.values() if m.linear]
    blocks = {name: repeated_blocks(parameters[name]) for name in dict.fromkeys((*random, *wholes))}
    repeated = [name for name, count in blocks.items() if count > 1]
    if repeated:
        says = f"{some(repeated)} consist of {blocks[repeated[0]]} equal blocks, as of ranks that share a seed"
        yield _fail("shards", repeated[0], says, *repeated)


def _dropout(account: Account) -> Iterator[Test]:
    nodes = account.graph.record.nodes
    for node in nodes:
        if node.about.get("dropout") is True or (node.operation == "native_dropout" and node.kind == "random"):
            says = f"dropout runs in evaluation mode (after {_before(account, node.number)})"
            yield _fail("dropout", node.operation, says)
            return
    if any(node.kind == "random" for node in nodes):
        yield Test("random", "", passed=True, says="random numbers are drawn in evaluation mode")


def _before(account: Account, number: int) -> str:
    names = [node.parameters[0] for node in account.graph.record.nodes[:number] if node.parameters and not node.fixed]
    return names[-1] if names else "the input"


def _inverse_norms(account: Account) -> Iterator[Test]:
    """Norms that multiply by the root: log mean square out against in has the slope 2 in place of 0."""
    graph, wrong = account.graph, []
    for node in graph.record.nodes:
        if node.kind != "norm" or not node.about.get("inverse") or node.rows is None or node.rows.size < 4:
            continue
        before = graph.term(node.inputs[0]).origin.rows
        if before is None or before.shape != node.rows.shape or not (before > 0).all() or not (node.rows > 0).all():
            continue
        x, y = np.log(before), np.log(node.rows)
        if x.std() > 0.01 and ((x - x.mean()) @ (y - y.mean())) / ((x - x.mean()) ** 2).sum() > 1.5:
            wrong.append(node)
    if wrong:
        name = wrong[0].parameters[0] if wrong[0].parameters else f"before {_after(account, wrong[0].number)}"
        yield _fail("norm", name, f"a norm multiplies by what it should divide by ({name}, {len(wrong)} in all)")


def _after(account: Account, number: int) -> str:
    following = account.graph.record.nodes[number:]
    return next((node.parameters[0] for node in following if node.parameters and not node.fixed), "the output")


def _uneven_norms(readings: list[Reading]) -> Iterator[Test]:
    wrong = [each for each in readings if each.normed and not each.even]
    if wrong:
        says = f"the norm that {wrong[0].role} reads is not over the features of a token: its mean squares differ"
        yield _fail("norm", wrong[0].name, f"{says} ({some([each.name for each in wrong])})")


def _attentions(account: Account) -> Iterator[Test]:
    over = [each for each in account.logits if each.over == "queries"]
    if over:
        says = f"softmax runs over queries, not over keys (layer {over[0].layer}, {len(over)} in all)"
        yield _fail("softmax", f"layer {over[0].layer}", says)
    wrong = [each for each in account.logits if not math.isclose(each.after, 1.0, rel_tol=1e-3) and each.after]
    if wrong:
        first = wrong[0]
        size = "1/√d_k" if math.isclose(first.after, first.head_size**-0.5, rel_tol=1e-2) else f"{first.after:.4g}"
        width = " = 1/√n" if math.isclose(first.after, max(account.width, 1) ** -0.5, rel_tol=1e-2) else ""
        says = f"probabilities of attention are multiplied by {size}{width} after softmax; logits by {first.factor:.4g}"
        yield _fail("probabilities", f"layer {first.layer}", says)


def _queries(readings: list[Reading]) -> Iterator[Test]:
    """Queries that read the norm of what keys or values read as it is."""
    by_layer: dict[int, dict[str, Reading]] = {}
    for each in readings:
        if each.layer is not None and each.role in ("query", "key", "value"):
            by_layer.setdefault(each.layer, {})[each.role] = each
    for layer, own in by_layer.items():
        query = own.get("query")
        if query is None or not query.normed:
            continue
        plain = [role for role in ("key", "value") if role in own and own[role].origin is query.read]
        if plain:
            says = f"{' and '.join(plain)} read the stream itself, where query reads its norm (layer {layer})"
            yield _fail("queries", plain[0], says)
            return


def _series(account: Account) -> Iterator[Test]:
    """One stream a stack, each sum after the other: no sum left out, no sum of a thing with itself, no difference."""
    graph, record = account.graph, account.graph.record
    links = [link for chain in account.streams for link in chain]
    inner = [node for node in record.nodes if node.kind == "sum" and len(node.inputs) == 2 and not node.fixed]
    numbers = {link.sum.number for link in links}
    for link in links:
        start, branch = link.skip.origin, link.branch.origin
        for node in inner:
            if node.number in numbers or not graph.has(branch, node) or graph.has(start, node):
                continue
            one, other = (graph.term(side).origin for side in node.inputs)
            if start in (one, other) and graph.depends(one if other is start else other, start):
                says = f"the {link.kind} of layer {link.layer} is added to the input of the sum before it, not to it"
                yield _fail("series", f"layer {link.layer}", says)
                return
    for node in inner:
        one, other = (graph.term(side) for side in node.inputs)
        in_stream = any(_alike(node, chain[-1].sum) for chain in account.streams)
        if in_stream and one.origin is other.origin and one.factor == other.factor:
            yield _fail("series", "itself", f"a tensor is added to itself (after {_before(account, node.number)})")
            return
    for link in links:
        if link.branch.factor * link.skip.factor < 0:
            yield _fail("series", f"layer {link.layer}", f"the {link.kind} of layer {link.layer} is subtracted")
            return
    yield from _not_added(account)


def _not_added(account: Account) -> Iterator[Test]:
    """Matrices that write to the stream in some layers and not in others, and attentions that no stream has."""
    layers = _layers_by_name(account)
    written = {_in_layer(name, layers)[1] for name in account.writers} - {""}
    uses = [name for name, nodes in account.uses.items() if nodes[0].kind == "product"]
    left = [name for name in uses if _in_layer(name, layers)[1] in written and name not in account.writers]
    if left:
        says = f"what {some(left)} returns is not added to the stream, as it is in other layers"
        yield _fail("series", left[0], says, *left)
        return
    graph, record = account.graph, account.graph.record
    inside = {id(each) for each in account.logits}
    softmax = [n for n in record.nodes if n.kind == "softmax" and _of_logits(account, n)]
    outside = [node for node in softmax if not _in_a_branch(account, node)]
    ends = [chain[-1].sum for chain in account.streams]
    starts = [chain[0].skip.origin for chain in account.streams]
    series = [
        node
        for node in outside
        if any(graph.depends(node, end) for end in ends)
        and any(graph.depends(start, node) and _alike(start, ends[0]) for start in starts)
    ]
    if not account.streams and len(outside) > 1 and graph.depends(outside[1], outside[0]):
        yield _fail("series", "stream", "no residual stream: what the branches return is not added to what they read")
    elif len(series) > 0 and len(account.streams) > 2:
        yield _fail("series", "attention", f"{len(series)} attentions are not added to the stream: it starts anew")
    elif inside and len(account.streams) > 2:
        yield from _broken(account)


def _alike(node: Node, other: Node) -> bool:
    """Whether two tensors have the same tokens and width."""
    return node.shape[-1:] == other.shape[-1:] and math.prod(node.shape) == math.prod(other.shape)


def _of_logits(account: Account, softmax) -> bool:
    from sdeinfer.auditing._stream import logits_of

    return logits_of(account.graph, softmax) is not None


def _in_a_branch(account: Account, node) -> bool:
    graph = account.graph
    return any(
        graph.has(link.branch.origin, node) and not graph.has(link.skip.origin, node)
        for chain in account.streams
        for link in chain
    )


def _broken(account: Account) -> Iterator[Test]:
    """Streams of one shape in series, each of which starts with what a matrix of one name returns."""
    graph = account.graph
    first = account.streams[0]
    starts = {}
    for before, chain in zip(account.streams, account.streams[1:], strict=False):
        start = chain[0].skip.origin
        if start.kind == "product" and _alike(start, before[-1].sum) and _alike(start, first[-1].sum):
            if graph.depends(start, before[-1].sum):
                starts.setdefault(pattern_of(start.parameters[0]), []).append(start.parameters[0])
    for names in starts.values():
        if len(names) > 1:
            says = f"what {some(names)} returns is not added to the stream: each layer starts anew"
            yield _fail("series", names[0], says, *names)
            return


def _dependences(found: Dependences) -> Iterator[Test]:
    if found.leaks:
        yield _fail("items", "batch", "an item of the batch changes another one")


def _dead(account: Account, laws: Mapping[str, Law], readings: list[Reading]) -> Iterator[Test]:
    """Matrices that read zeros, by a factor of 0 or behind zeros, and branches whose factor is a buffer of zeros."""
    zero = [each for each in readings if each.square == 0]
    by_factor = [each for each in zero if each.zeros]
    if by_factor:
        first = by_factor[0]
        says = f"what {some([each.name for each in by_factor])} reads is multiplied by 0 ({first.zeros[0]})"
        yield _fail("dead", first.name, says, *[each.name for each in by_factor])
    if embeddings := [n for n, m in account.matrices.items() if m.role == "embedding" and laws[n].name == "zeros"]:
        yield _fail("dead", embeddings[0], f"{some(embeddings)} is 0", *embeddings)
    for chain in account.streams:
        for link in chain:
            for source in link.writers:
                if source.factor == 0 and not source.scales:
                    says = f"the {link.kind} of layer {link.layer} is multiplied by 0"
                    yield _fail("dead", f"layer {link.layer}", says)
                    return
    zeros = {name for name, m in account.matrices.items() if m.linear and laws[name].name == "zeros"}
    for pair in _pairs(account, zeros):
        says = f"{' and '.join(pair)} are both 0: no gradient passes"
        yield _fail("dead", pair[0], says, *pair)
        return


def _pairs(account: Account, zeros: set[str]) -> Iterator[tuple[str, str]]:
    """Matrices of zeros of one layer that are multiplied with, or follow, each other."""
    by_layer: dict[int | None, dict[str, str]] = {}
    for name in zeros:
        matrix = account.matrices[name]
        by_layer.setdefault(matrix.layer, {}).setdefault(matrix.role, name)
    together = [("query", "key"), ("value", "attention output"), ("up", "mlp output"), ("gate", "mlp output")]
    together += [("gate", "up")]
    for layer, own in by_layer.items():
        for first, second in together:
            if layer is not None and first in own and second in own:
                yield own[first], own[second]


def _zeros(account: Account, laws: Mapping[str, Law], *, judged: bool) -> Iterator[Test]:
    names = [n for n, m in account.matrices.items() if m.linear and laws[n].name == "zeros" and not judged]
    if names:
        yield Test("zeros", names[0], passed=True, says=f"{some(names)} start from 0", names=tuple(names))


def _unlike_norms(norms: list[BranchNorms]) -> Iterator[Test]:
    """Branches that read the stream itself, where those of other layers read its norm, or the other way round."""
    by_kind: dict[tuple, list[BranchNorms]] = {}
    for each in norms:
        if each.before is not None:
            by_kind.setdefault((each.link.kind, each.link.sum.shape), []).append(each)
    for (kind, _), own in by_kind.items():
        after_first = own[1:] if own[0].link.before is None and own[0].before is False else own
        for value in (False, True):
            odd = [each for each in after_first if each.before is value]
            if 0 < len(odd) <= len(after_first) // 3:
                word = "the norm of the stream" if value else "the stream without a norm"
                says = f"{kind} of layer {odd[0].link.layer} reads {word}, unlike that of other layers"
                yield _fail("unlike", f"layer {odd[0].link.layer}", says)


def _unlike(account: Account, laws: Mapping[str, Law], readings: list[Reading]) -> Iterator[Test]:
    """Single matrices whose σ or reading differs from the others of their role, where these are alike."""
    groups: dict[tuple, list[str]] = {}
    for name, matrix in account.matrices.items():
        if matrix.layer is not None and matrix.linear and laws[name].sd > 0:
            groups.setdefault((matrix.role, matrix.shape, matrix.layers), []).append(name)
    z = critical(2 * len(laws))
    factors = {each.name: each for each in readings if each.factor > 0}
    for (role, *_), names in groups.items():
        if len(names) < 3:
            continue
        logs = np.array([math.log(laws[n].sd * abs(writer_factor(account, account.matrices[n].array))) for n in names])
        errors = np.array([laws[name].error for name in names])
        away = logs - np.median(logs)
        odd = [k for k in range(len(names)) if differs(away[k], errors[k], z)]
        if 0 < len(odd) <= len(names) // 4:
            says = f"σ of {role} {names[odd[0]]} is {math.exp(away[odd[0]]):.3g} times that of other layers"
            yield _fail("unlike", names[odd[0]], says, *[names[k] for k in odd])
        known = [name for name in names if name in factors]
        if len(known) == len(names):
            away = np.log([factors[name].factor for name in names])
            away -= np.median(away)
            most = 2 * ALIKE - math.log(min(factors[name].least for name in names))
            odd = np.flatnonzero(np.abs(away) > most).tolist()
            if 0 < len(odd) <= len(names) // 4:
                ratio = math.exp(away[odd[0]])
                says = f"what {role} {names[odd[0]]} reads is {ratio:.3g} times that of other layers"
                yield _fail("unlike", names[odd[0]], says, *[names[k] for k in odd])


def unreached(account: Account) -> list[str]:
    """Parameters that are in no operation of the pass."""
    record = account.graph.record
    used = {name for node in record.nodes for name in node.parameters if node.kind != "parameter"}
    stacked = {name.split("[")[0] for name in used}
    return [name for name, each in record.parameters.items() if name not in used | stacked and each.size]


def _layers_by_name(account: Account) -> re.Pattern[str] | None:
    """What names of parameters of a layer begin with; None if they have nothing in common."""
    graph, beginnings = account.graph, set()
    for link in (link for chain in account.streams for link in chain):
        own = graph.reach[link.branch.origin.number] & ~graph.reach[link.skip.origin.number]
        names = [name for node in graph.nodes(own) if not node.fixed for name in node.parameters]
        parts = [name.split(".")[:-1] for name in names]
        common = [column[0] for column in itertools.takewhile(lambda c: len({*c}) == 1, zip(*parts, strict=False))]
        places = [place for place, part in enumerate(common) if any(letter.isdigit() for letter in part)]
        if places:
            beginnings.add(".".join(re.sub(r"\d+", r"\\d+", part) for part in common[: places[-1] + 1]) + r"\.")
    return re.compile("|".join(sorted(beginnings))) if beginnings else None


def _in_layer(name: str, layers: re.Pattern[str] | None) -> tuple[str, str]:
    """The beginning that the parameters of a layer have in common, and the name in it; "" outside of layers."""
    if layers is not None and (beginning := layers.match(name)):
        return beginning[0], name[beginning.end() :]
    return "", re.sub(r"\[\d+\]$", "", name) if name.endswith("]") else ""


def _unused(account: Account) -> Iterator[Test]:
    """Parameters without use: mistakes inside of layers, unless others of their kind are used, as of experts."""
    layers, left = _layers_by_name(account), unreached(account)
    used = {
        (layer, pattern_of(name))
        for layer, name in (_in_layer(each, layers) for each in {*account.graph.record.parameters} - {*left})
    }
    places = {name: _in_layer(name, layers) for name in left}
    inside = [name for name, (layer, own) in places.items() if layer and (layer, pattern_of(own)) not in used]
    outside = [name for name in left if name not in inside]
    if inside:
        yield _fail("unused", inside[0], f"no operation uses {some(inside)}", *inside)
    if outside:
        says = f"{len(outside)} parameters are in no operation ({some(outside)})"
        yield Test("left", outside[0], passed=True, says=says, names=tuple(outside))
