"""Findings that need no recipe: mistakes, and notes. Tests: `tests/auditing/test_audit.py`."""

import math
from collections.abc import Iterator

import numpy as np

from sdeinfer.auditing._account import Account
from sdeinfer.auditing._dependences import Dependences
from sdeinfer.auditing._law import Law, copies, laws_of_parts, repeated_blocks
from sdeinfer.auditing._tests import Test, critical, writer_factor

FAILS = {
    "not finite": "NaN or infinity in a parameter, a buffer or a sum of the stream",
    "copies": "tensors with equal or correlated entries that are not tied",
    "shards": "a matrix of equal blocks, as of ranks that share a seed",
    "dropout": "a dropout that runs in evaluation mode",
    "items": "an item of the batch that depends on another one",
    "norm": "a norm that multiplies by what it should divide by",
    "probabilities": "a factor of the probabilities after softmax",
    "unlike": "one layer unlike the others of its role",
    "dead": "a matrix of zeros whose branch, or whose later layers, get no gradient through it",
    "queries": "keys or values that read the stream itself where queries read its norm",
}
"""Findings that fail an audit without a recipe; `allow=` takes each off. Others are notes."""


def findings_of(
    account: Account,
    laws: dict[str, Law],
    dependences: Dependences,
    *,
    allow: tuple[str, ...],
    causal: bool | None,
    judged: bool,
) -> list[Test]:
    """All findings; notes are passed."""
    found = [
        *_not_finite(account, laws),
        *_copies(account, laws),
        *_dropout(account),
        *_norms(account),
        *_attentions(account),
        *_dependences(dependences, causal=causal),
        *_zeros(account, laws, judged=judged),
        *([] if judged else _unlike(account, laws)),
        *_unused(account, laws),
    ]
    return [test for test in found if test.passed or test.topic not in allow]


def _fail(topic: str, what: str, says: str, *names: str) -> Test:
    return Test(topic, what, topic not in FAILS and topic != "mask", says, names=names)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _not_finite(account: Account, laws: dict[str, Law]) -> Iterator[Test]:
    record = account.graph.record
    bad = [name for name in record.parameters if laws[name].name == "not finite"]
    used = {node.operation for node in record.nodes if node.kind == "buffer"}
    # Bounds of one entry may be infinite.
    bad += [name for name, each in record.buffers.items() if name in used and not each.finite and each.size > 1]
    if bad:
        yield _fail("not finite", bad[0], f"NaN or infinity in {_some(bad)}", *bad)
    zero = [
        name
        for name, each in record.buffers.items()
        if name in used and "inv_freq" in name and each.size > 1 and not each.entries().any()
    ]
    if zero:
        yield _fail("not finite", zero[0], f"{_some(zero)} is 0: positions do not rotate", *zero)
    if bad:
        return
    for chain in account.streams:
        for link in chain:
            if link.sum.rows is not None and not np.isfinite(link.sum.rows).all():
                says = f"the stream is not finite from layer {link.layer} ({link.kind}) on"
                yield _fail("not finite", f"layer {link.layer}", says)
                return


def _copies(account: Account, laws: dict[str, Law]) -> Iterator[Test]:
    parameters, random = dict(account.graph.record.parameters), {}
    for name, matrix in account.matrices.items():
        experts = matrix.linear and len(matrix.shape) == 3
        parts = laws_of_parts(parameters[name], matrix, laws) if experts else {}
        parameters |= {each: part for each, (part, _) in parts.items()}
        if matrix.linear or matrix.role in ("embedding", "position"):
            random |= {each: law for each, (_, law) in parts.items()} or {name: laws[name]}
    by_first: dict[str, list[tuple[str, float]]] = {}
    for first, second, correlation in copies(parameters, random):
        by_first.setdefault(first, []).append((second, correlation))
    for first, pairs in by_first.items():
        names = [name for name, _ in pairs]
        equal = all(abs(c) > 0.999 for _, c in pairs)
        same = parameters[first].shape == parameters[names[0]].shape
        scaled = equal and not math.isclose(random[first].sd, random[names[0]].sd, rel_tol=1e-4)
        how = (
            "are equal"
            if equal and same and not scaled
            else "have the same random numbers"
            if equal
            else f"are correlated ({pairs[0][1]:.2f})"
        )
        yield _fail("copies", first, f"{first} and {_some(names)} {how}", first, *names)
    wholes = [name for name in laws if name in account.matrices and account.matrices[name].linear]
    blocks = {name: repeated_blocks(parameters[name]) for name in dict.fromkeys((*random, *wholes))}
    repeated = [name for name, count in blocks.items() if count > 1]
    if repeated:
        says = f"{_some(repeated)} consist of {blocks[repeated[0]]} equal blocks, as of ranks that share a seed"
        yield _fail("shards", repeated[0], says, *repeated)


def _dropout(account: Account) -> Iterator[Test]:
    nodes = account.graph.record.nodes
    fused = next((each.dropout for each in account.logits if each.dropout > 0), 0.0)
    for node in nodes:
        if node.about.get("dropout") is True or (node.operation == "native_dropout" and node.kind == "random"):
            says = f"dropout runs in evaluation mode (after {_before(account, node.number)})"
            yield _fail("dropout", node.operation, says)
            return
    if fused:
        yield _fail("dropout", "attention", f"dropout of attention ({fused:g}) runs in evaluation mode")
    elif any(node.kind == "random" for node in nodes):
        yield Test("random", "", passed=True, says="random numbers are drawn in evaluation mode")


def _before(account: Account, number: int) -> str:
    names = [node.parameters[0] for node in account.graph.record.nodes[:number] if node.parameters and not node.fixed]
    return names[-1] if names else "the input"


def _norms(account: Account) -> Iterator[Test]:
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
    return next(
        (node.parameters[0] for node in account.graph.record.nodes[number:] if node.parameters and not node.fixed),
        "the output",
    )


def _attentions(account: Account) -> Iterator[Test]:
    wrong = [each for each in account.logits if not math.isclose(each.after, 1.0, rel_tol=1e-3) and each.after]
    if wrong:
        each = wrong[0]
        size = "1/√d_k" if math.isclose(each.after, each.head_size**-0.5, rel_tol=1e-2) else f"{each.after:.4g}"
        width = " = 1/√n" if math.isclose(each.after, max(account.width, 1) ** -0.5, rel_tol=1e-2) else ""
        says = f"probabilities of attention are multiplied by {size}{width} after softmax; logits by {each.factor:.4g}"
        yield _fail("probabilities", f"layer {each.layer}", says)
    yield from _queries(account)


def _queries(account: Account) -> Iterator[Test]:
    """Queries that read the norm of what keys or values read as it is."""
    graph = account.graph
    reads: dict[int | None, dict[str, tuple[str, int]]] = {}
    for name, matrix in account.matrices.items():
        for role in {*matrix.role.split("/")} & {"query", "key", "value"} if matrix.layer is not None else ():
            origin = graph.term(account.uses[name][0].inputs[0]).origin
            normed = origin.kind == "norm"
            origin = graph.term(origin.inputs[0]).origin if normed else origin
            reads.setdefault(matrix.layer, {})[role] = ("norm" if normed else "plain", origin.number)
    for layer, own in reads.items():
        if len(own) == 3 and own["query"][0] == "norm" and ("plain", own["query"][1]) in (own["key"], own["value"]):
            plain = " and ".join(role for role in ("key", "value") if own[role] == ("plain", own["query"][1]))
            yield _fail("queries", plain, f"{plain} read the stream itself, where query reads its norm (layer {layer})")
            return


def _dependences(found: Dependences, *, causal: bool | None) -> Iterator[Test]:
    if found.leaks:
        yield _fail("items", "batch", "an item of the batch changes another one")
    if causal and found.causal is False:
        says = f"later tokens change earlier ones from {found.first} on: the causal mask is not there"
        yield Test("mask", "mask", passed=False, says=says)
    if causal is False and found.causal:
        yield Test("mask", "mask", passed=False, says="tokens do not see later ones, where no mask is declared")


def _zeros(account: Account, laws: dict[str, Law], *, judged: bool) -> Iterator[Test]:
    matrices = {name: matrix for name, matrix in account.matrices.items() if laws[name].name == "zeros" and not judged}
    read = {"query", "key", "value", "gate", "up", "embedding"}
    writers = [name for name, matrix in matrices.items() if matrix.last or matrix.role == "head"]
    others = [name for name, matrix in matrices.items() if not matrix.last and {*matrix.role.split("/")} & read]
    if others:
        yield _fail("dead", others[0], f"{_some(others)} {'is' if len(others) == 1 else 'are'} 0", *others)
    if writers:
        yield Test("zeros", writers[0], passed=True, says=f"{_some(writers)} start from 0", names=tuple(writers))


def _unlike(account: Account, laws: dict[str, Law]) -> Iterator[Test]:
    """Single tensors that differ from the others of their role, where the others are alike or follow the depth."""
    groups: dict[tuple, list[str]] = {}
    for name, matrix in account.matrices.items():
        if matrix.layer is not None and matrix.linear and laws[name].sd > 0:
            groups.setdefault((matrix.role, matrix.shape, matrix.layers), []).append(name)
    z = critical(2 * len(laws))
    for (role, *_), names in groups.items():
        logs = np.array([math.log(laws[name].sd * abs(writer_factor(account, name))) for name in names])
        errors = np.array([laws[name].error for name in names])
        if len(names) < 3:
            continue
        away = np.abs(logs - np.median(logs))
        far = np.flatnonzero(away > np.maximum(z * errors, 0.03))
        if 0 < len(far) <= len(names) // 4:
            name = names[far[0]]
            ratio = math.exp(logs[far[0]] - np.median(logs))
            says = f"σ of {role} {name} is {ratio:.3g} times that of other layers"
            yield _fail("unlike", name, says, *[names[k] for k in far])


def _unused(account: Account, laws: dict[str, Law]) -> Iterator[Test]:
    record = account.graph.record
    used = {name for node in record.nodes for name in node.parameters if node.kind != "parameter"}
    unused = [name for name, each in record.parameters.items() if name not in used and each.size]
    if unused:
        says = f"{len(unused)} parameters are in no product ({_some(unused)})"
        yield Test("unused", unused[0], passed=True, says=says, names=tuple(unused))
