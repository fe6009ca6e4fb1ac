"""An initialisation in words, and the clauses of a verdict. Tests: `tests/auditing/test_audit.py`."""

import math
from collections.abc import Mapping, Sequence

from sdeinfer.auditing._books import Dependences
from sdeinfer.auditing._law import Law
from sdeinfer.auditing._tests import Test
from sdeinfer.passes._account import IN_BLOCKS, Account
from sdeinfer.passes._readings import LOG_SD_TOLERANCE, BranchNorms

TOGETHER = ("norm", "norms", "law", "bias", "factor", "logits", "stream", "value", "reading")
"""Topics whose failed tests are one clause."""


def words_of(account: Account, laws: Mapping[str, Law], dependences: Dependences, norms: Sequence[BranchNorms]) -> str:
    """σ of each role, scaled with depth or not; the logits' factor; multipliers of the stream; the mask."""
    parts = [_size(account, norms), *_sds(account, laws), *_logits(account), *_stream(account)]
    if dependences.causal is not None and account.logits:
        parts.append("causal" if dependences.causal else "not causal")
    return "; ".join(parts)


def _size(account: Account, norms: Sequence[BranchNorms]) -> str:
    if not account.streams:
        return "no residual stream"
    layers = " and ".join(f"{chain[-1].layer + 1} layers" for chain in account.streams)
    return f"{layers} of width {account.width}, {_places(norms)}"


def _places(norms: Sequence[BranchNorms]) -> str:
    if any(branch.link.normed for branch in norms):
        return "norms after sums"
    known = [branch.before for branch in norms if branch.before is not None]
    if known and all(known):
        return f"norms before{' and after' if all(branch.of_branch for branch in norms) else ''} branches"
    if norms and all(branch.of_branch for branch in norms):
        return "norms after branches"
    return "norms before some branches" if any(known) else "no norms of the stream"


def _sds(account: Account, laws: Mapping[str, Law]) -> list[str]:
    by_role: dict[str, list[float]] = {}
    for name, matrix in account.matrices.items():
        if (matrix.linear or matrix.role == "embedding") and math.isfinite(laws[name].sd):
            by_role.setdefault(matrix.role, []).append(laws[name].sd)
    by_text: dict[str, list[str]] = {}
    for role in (role for role in ("embedding", *IN_BLOCKS, "head") if role in by_role):
        low, *_, high = [*sorted(by_role[role]), max(by_role[role])]
        middle = sorted(by_role[role])[len(by_role[role]) // 2]
        text = f"{middle:.2g}" if high <= 1.15 * low or high == 0 else f"{low:.2g} to {high:.2g}"
        by_text.setdefault(text, []).append(role)
    sds = [f"{text} ({', '.join(roles)})" for text, roles in by_text.items()]
    return (["σ " + ", ".join(sds)] if sds else []) + _depth(account, by_role)


def _depth(account: Account, by_role: Mapping[str, list[float]]) -> list[str]:
    last, first = (by_role.get(role, []) for role in ("mlp output", "up"))
    if account.layers < 2 or not last or not first or not min(*last, *first) > 0:
        return []
    ratio = sum(last) / len(last) / (sum(first) / len(first))
    if abs(math.log(ratio * math.sqrt(2 * account.layers))) < 0.05:
        return ["scaled with depth, by 1/√(2L)"]
    return ["not scaled with depth" if abs(math.log(ratio)) < 0.05 else f"mlp output over up {ratio:.2g}"]


def _logits(account: Account) -> list[str]:
    factors = dict.fromkeys(
        _factor(logits.factor, logits.head_size) + (" (q, k normed)" if logits.normed else "")
        for logits in account.logits
    )
    return [f"logits × {', '.join(list(factors)[:3])}"] if factors else []


def _factor(factor: float, size: int) -> str:
    if math.isclose(factor, size**-0.5, rel_tol=0.01):
        return "1/√d_k"
    return "1/d_k" if math.isclose(factor, 1 / size, rel_tol=0.01) else f"{factor:.3g}"


def _stream(account: Account) -> list[str]:
    links = [link for chain in account.streams for link in chain]
    sources = [source for link in links for source in link.writers]
    factors = {
        "branches": {f"{abs(source.factor):.3g}" for source in sources if source.plain},
        "stream": {f"{link.skip.factor:.3g}" for chain in account.streams for link in chain[1:]},
        "embedding": {f"{chain[0].skip.factor:.3g}" for chain in account.streams},
    }
    clauses = [f"{operand} × {', '.join(sorted(values))}" for operand, values in factors.items() if values - {"1"}]
    scales = any(source.scales and not source.normed for source in sources)
    return clauses + (["branches × parameters (LayerScale)"] if scales else [])


def clauses_of(failed: tuple[Test, ...]) -> list[str]:
    """Sentences of failed tests; those with one cause, or of one topic for several tensors, become one."""
    groups: dict[tuple[str, str], list[Test]] = {}
    for test in failed:
        alone = test.says if test.topic not in TOGETHER else ""
        key = test.cause.split(": ", 1)[-1].split(" of the ")[0] if test.cause else alone
        groups.setdefault((test.topic, key), []).append(test)
    clauses = []
    for group in groups.values():
        first = group[0]
        roles = list(dict.fromkeys(test.what for test in group))
        if first.topic == "σ" and first.cause and len(roles) > 1:
            alike = [test for test in group if abs(math.log(test.ratio / first.ratio)) < LOG_SD_TOLERANCE]
            same = list(dict.fromkeys(test.what for test in alike))
            other_clauses = [test.says for test in group if test not in alike]
            says = "; ".join([first.says.replace(first.what, " and ".join(same), 1), *other_clauses[:2]])
            causes = dict.fromkeys(test.cause for test in group)
            clauses.append(f"{says} the declared: {'; '.join(list(causes)[:2])}")
            continue
        remainder = f" (and {len(group) - 1} more)" if len(group) > 1 else ""
        tail = " the declared" if first.says.endswith("times") else ""
        clauses.append(f"{first.says}{tail}{f': {first.cause}' if first.cause else ''}{remainder}")
    return clauses
