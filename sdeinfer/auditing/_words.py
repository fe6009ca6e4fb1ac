"""The initialisation of a network in words. Tests: `tests/auditing/test_audit.py`."""

import math

from sdeinfer.auditing._account import Account
from sdeinfer.auditing._dependences import Dependences
from sdeinfer.auditing._law import Law

SHOWN = ("embedding", "query", "key", "value", "query/key/value", "attention output", "gate", "up", "gate/up")
SHOWN += ("mlp output", "mixer output", "head")


def words_of(account: Account, laws: dict[str, Law], dependences: Dependences) -> str:
    """σ of each role, scaled with depth or not; the logits' factor; multipliers of the stream; the mask."""
    parts = [_size(account), *_sds(account, laws), *_logits(account), *_stream(account)]
    if dependences.causal is not None and account.logits:
        parts.append("causal" if dependences.causal else "not causal")
    return "; ".join(parts)


def _size(account: Account) -> str:
    if not account.streams:
        return "no residual stream"
    kinds = [f"{chain[-1].layer + 1} layers" for chain in account.streams]
    post = any(link.normed for chain in account.streams for link in chain)
    return f"{' and '.join(kinds)} of width {account.width}, norms {'after sums' if post else 'before branches'}"


def _sds(account: Account, laws: dict[str, Law]) -> list[str]:
    by_role: dict[str, list[float]] = {}
    for name, matrix in account.matrices.items():
        if matrix.role in SHOWN and math.isfinite(laws[name].sd):
            by_role.setdefault(matrix.role, []).append(laws[name].sd)
    by_text: dict[str, list[str]] = {}
    for role in sorted(by_role, key=SHOWN.index):
        low, high = min(by_role[role]), max(by_role[role])
        middle = sorted(by_role[role])[len(by_role[role]) // 2]
        text = f"{middle:.2g}" if high <= 1.15 * low or high == 0 else f"{low:.2g} to {high:.2g}"
        by_text.setdefault(text, []).append(role)
    sds = [f"{text} ({', '.join(roles)})" for text, roles in by_text.items()]
    found = ["σ " + ", ".join(sds)] if sds else []
    last, first = by_role.get("mlp output"), by_role.get("up") or by_role.get("gate/up")
    if last and first and account.layers > 1 and min(last) > 0:
        ratio = sum(last) / len(last) / (sum(first) / len(first))
        scaled = abs(math.log(ratio * math.sqrt(2 * account.layers))) < 0.05
        found.append(
            "scaled with depth, by 1/√(2L)"
            if scaled
            else "not scaled with depth"
            if abs(math.log(ratio)) < 0.05
            else f"mlp output over up {ratio:.2g}"
        )
    return found


def _logits(account: Account) -> list[str]:
    found = dict.fromkeys(
        _factor(each.factor, each.head_size) + (" (q, k normed)" if each.normed else "") for each in account.logits
    )
    return [f"logits × {', '.join(list(found)[:3])}"] if found else []


def _factor(factor: float, size: int) -> str:
    if math.isclose(factor, size**-0.5, rel_tol=0.01):
        return "1/√d_k"
    return "1/d_k" if math.isclose(factor, 1 / size, rel_tol=0.01) else f"{factor:.3g}"


def _stream(account: Account) -> list[str]:
    branch = {
        f"{abs(source.factor):.3g}"
        for chain in account.streams
        for link in chain
        for source in link.writers
        if source.plain
    }
    stream = {f"{link.skip.factor:.3g}" for chain in account.streams for link in chain[1:]}
    start = {f"{chain[0].skip.factor:.3g}" for chain in account.streams}
    scales = any(
        source.scales and not source.normed for chain in account.streams for link in chain for source in link.writers
    )
    found = [f"branches × {', '.join(sorted(branch))}"] if branch - {"1"} else []
    found += [f"stream × {', '.join(sorted(stream))}"] if stream - {"1"} else []
    found += [f"embedding × {', '.join(sorted(start))}"] if start - {"1"} else []
    return found + (["branches × parameters (LayerScale)"] if scales else [])
