"""Tests of a pass against what is declared of it: norms, factors of branches and of the stream, logits, the mask.

Tests: `tests/auditing/test_kinds.py`.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from sdeinfer.auditing._books import Books
from sdeinfer.auditing._causes import cause_of_logits
from sdeinfer.auditing._law import Law
from sdeinfer.auditing._recipe import Recipe
from sdeinfer.auditing._tests import Test, failed, value_in_words
from sdeinfer.passes._account import Account
from sdeinfer.passes._readings import LOG_SD_TOLERANCE, Reading


def tests_of_pass(books: Books, recipe: Recipe) -> list[Test]:
    """All tests of the pass against a recipe."""
    account, laws = books.account, books.laws
    return [
        *_gains(account, laws, books.readings, recipe),
        *_offsets(account, laws, recipe),
        *_factors(account, laws, recipe),
        *_stream(account, recipe),
        *_logits(account, recipe),
        *_unseen(account, recipe),
    ]


def _near(value: float, declared: float) -> bool:
    return math.isclose(value, declared, rel_tol=LOG_SD_TOLERANCE / 2)


def _gains(account: Account, laws: Mapping[str, Law], readings: Sequence[Reading], recipe: Recipe) -> Iterator[Test]:
    """The factor of each norm, its gain and later factors together, at the matrices that read it."""
    read = {}
    for reading in readings:
        free = recipe.free_readout and reading.role == "head"
        if math.isfinite(reading.factor) and not free:
            read.setdefault(reading.norms[0] if reading.norms else reading.origin.number, []).append(reading)
    for name, matrix in account.matrices.items():
        declared = recipe.gain(matrix) if matrix.role == "norm" else None
        if declared is None:
            continue
        law, group = laws[name], read.pop(name, [])
        mean, sd = account.gains.get(name, [(law.mean, law.sd)])[0]
        if declared != 1.0 and law.sd == 0 and abs(law.mean - declared) < 1e-6:
            continue  # the code fills it with this number, and multiplies by it or by 1 + w
        declared = declared or 1.0
        as_declared = abs(mean - declared) < LOG_SD_TOLERANCE and sd < LOG_SD_TOLERANCE
        wrong = [reading for reading in group if not reading.multiplies_by(declared)]
        if as_declared and wrong:
            yield _of_reading(wrong, declared)
        else:
            passed = as_declared or bool(group and not wrong and sd < LOG_SD_TOLERANCE)
            says = f"norm {name} multiplies by {mean:.3g}{f' ± {sd:.2g}' if sd else ''}, declared {declared:g}"
            yield Test("norm", name, passed, says, names=(name,), ratio=mean)
    for group in (group for key, group in read.items() if isinstance(key, int)):
        matrix = dataclasses.replace(account.matrices[group[0].name], role="norm", name="", array="")
        if (declared := recipe.gain(matrix)) is None:
            continue
        if wrong := [reading for reading in group if not reading.multiplies_by(declared)]:
            yield _of_reading(wrong, declared)


def _of_reading(wrong: list[Reading], declared: float) -> Test:
    first = wrong[0]
    says = f"what {first.role} {first.name} reads is {first.factor:.3g} times a unit norm, declared {declared:g}"
    return Test("reading", first.name, False, says, names=tuple(reading.name for reading in wrong), ratio=first.factor)  # noqa: FBT003


def _offsets(account: Account, laws: Mapping[str, Law], recipe: Recipe) -> Iterator[Test]:
    """Offsets of norms, and parameters that scale branches."""
    scales = {name for sources in account.writers.values() for source in sources for name in source.scales}
    for name, matrix in account.matrices.items():
        law = laws[name]
        if matrix.role == "norm bias" and (declared := recipe.gain(matrix)) is not None:
            passed = law.sd == 0 and abs(law.mean - declared) < 1e-6
            says = f"norm offset {name} is {value_in_words(law)}, declared {declared:g}"
            yield Test("norm", name, passed, says, names=(name,))
        elif name in scales and matrix.role != "norm" and (scale := recipe.layer_scale(matrix)):
            passed = law.sd == 0 and math.isclose(law.mean, scale, rel_tol=1e-2)
            says = f"LayerScale {name} is {value_in_words(law)}, declared {scale:g}"
            yield Test("factor", name, passed, says, names=(name,), ratio=law.mean / scale)


def _factors(account: Account, laws: Mapping[str, Law], recipe: Recipe) -> Iterator[Test]:
    """Factors of branches, beside those of constant parameters."""
    known = {name: laws[name].mean for name in account.matrices if laws[name].sd == 0}
    known |= {name: gains[0][0] for name, gains in account.gains.items() if gains[0][1] < LOG_SD_TOLERANCE}
    for chain in account.streams:
        multiplier = recipe.multiplier(chain[-1].layer + 1)
        if multiplier is None:
            continue
        for link in chain:
            for source in link.writers:
                scales = math.prod(known.get(name, math.nan) for name in source.scales)
                if source.gated or not math.isfinite(scales) or not scales:
                    continue
                factor = abs(source.factor / scales)
                clause = f"the branch of {link.place} is multiplied by"
                yield _of_factor("factor", link.place, clause, factor, multiplier, source.node.parameters[:1])


def _of_factor(
    topic: str, place: str, clause: str, factor: float, declared: float, names: tuple[str, ...] = ()
) -> Test:
    says = f"{clause} {factor:.4g}, declared {declared:.4g}"
    ratio = factor / declared if declared else math.inf
    return Test(topic, place, _near(factor, declared), says, names=names, ratio=ratio)


def _stream(account: Account, recipe: Recipe) -> Iterator[Test]:
    """Factors of the stream in every sum, and of the embedding."""
    for chain in account.streams:
        skip = recipe.skip(chain[-1].layer + 1)
        for link in chain[1:] if skip is not None else ():
            clause = f"at {link.place} the stream is multiplied by"
            yield _of_factor("stream", link.place, clause, link.skip.factor, skip or 0.0)
        for source in account.graph.sources(chain[0].skip.origin) if recipe.embedding else ():
            matrix = account.matrices.get(source.node.parameters[0]) if source.node.parameters else None
            if matrix and matrix.role == "embedding" and not source.normed:
                factor = abs(source.factor * chain[0].skip.factor)
                clause = "the embedding is multiplied by"
                yield _of_factor("stream", "embedding", clause, factor, recipe.embedding or 0.0)


def _logits(account: Account, recipe: Recipe) -> Iterator[Test]:
    pairs = [(logits, recipe.logits_factor(logits)) for logits in account.logits]
    known = [(logits, declared) for logits, declared in pairs if declared is not None]
    wrong = [pair for pair in known if not _near(abs(pair[0].factor), pair[1])]
    cause = cause_of_logits([(logits, logits.factor / declared) for logits, declared in wrong], account.width)
    for logits, declared in known:
        says = f"logits of layer {logits.layer} are multiplied by {logits.factor:.4g}, declared {declared:.4g}"
        ratio, passed = logits.factor / declared, (logits, declared) not in wrong
        own_cause = "" if passed else cause
        yield Test("logits", f"layer {logits.layer}", passed, says, own_cause, ratio=ratio, mistake=own_cause)


def _unseen(account: Account, recipe: Recipe) -> Iterator[Test]:
    """Declared factors for which the pass has no place."""
    if not account.streams and (recipe.changes("multiplier") or recipe.changes("skip")):
        if recipe.multiplier(1) is not None or recipe.skip(1) is not None:
            yield Test("untested", "factors", None, "factors of branches: no residual stream was seen")
    if not account.logits and recipe.changes("temperature") and recipe.temperature(1) is not None:
        yield Test("untested", "logits", None, "the factor of logits: no attention was seen")


def tests_of_mask(books: Books, *, causal: bool | None) -> Iterator[Test]:
    """Whether tokens see later ones, as declared."""
    if causal is None:
        return
    account, dependences = books.account, books.dependences
    if dependences.causal is None:
        why = "these inputs have no tokens that could be changed"
        if not account.streams:
            why = "no residual stream was seen"
        elif dependences.alone:
            why = "no token changes another one, as where branches are 0"
        yield Test("untested", "causal", None, f"causal={causal}: {why}")
        return
    says = "tokens do not see later ones, where no mask is declared"
    if causal:
        says = f"later tokens change earlier ones from {dependences.first} on: the causal mask is not there"
        if any(logits.short for logits in account.logits):
            says += ", or is applied after softmax"
        elif dependences.next_alone:
            says += ", or off by one"
    yield Test("mask", "mask", dependences.causal is causal, says)


def tests_of_norms(books: Books, declared: str | None) -> Iterator[Test]:
    """Whether the norms of each branch are where they are declared."""
    for place in declared.split("+") if declared else ():
        tests = list(NORMS[place](books))
        yield from tests or [Test("untested", "norm", None, f"norm={place!r}: no branch was seen that could have one")]


def _pre(books: Books) -> Iterator[Test]:
    for branch in books.norms:
        place = branch.link.place
        if branch.link.normed and branch.link.before is not None:
            yield failed("stream", place, f"the stream itself is normalised ({place})")
        elif branch.reads_normed is None:
            yield Test("untested", place, None, f"norm='pre': what reads the stream in {place} was not seen")
        else:
            plain = [reader.name for reader in branch.readers if not reader.normed]
            names = ", ".join(plain[:2])
            says = f"{names} {'reads' if len(plain) == 1 else 'read'} the stream without a norm ({place})"
            yield Test("norms", place, branch.reads_normed, says, names=tuple(plain))
    ends = {chain[-1].sum.number for chain in books.account.streams}
    for reading in books.readings:
        if reading.role == "head" and reading.read.number in ends:
            says = f"{reading.name} reads the stream without a norm"
            yield Test("norms", "head", reading.normed, says, names=(reading.name,))


def _post(books: Books) -> Iterator[Test]:
    for branch in books.norms:
        says = f"the stream is not normalised after the sum of {branch.link.place}"
        yield Test("stream", branch.link.place, branch.after_sum, says)


def _sandwich(books: Books) -> Iterator[Test]:
    yield from _pre(books)
    for branch in books.norms:
        says = f"what {branch.link.place} adds is not normalised"
        yield Test("norms", branch.link.place, branch.of_branch, says)


def _qk(books: Books) -> Iterator[Test]:
    for logits in books.account.logits:
        subject = "queries or keys are" if logits.normed else "queries and keys are"
        yield Test("norms", f"layer {logits.layer}", logits.both, f"{subject} not normalised (layer {logits.layer})")


NORMS: dict[str, Callable[[Books], Iterator[Test]]] = {"pre": _pre, "post": _post, "sandwich": _sandwich, "qk": _qk}
"""Places of norms: before branches, after sums, before and after branches, and of queries and keys."""
