"""Is a network initialised as it claims?"""

import dataclasses
import fnmatch
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

from sdeinfer._files import InputError
from sdeinfer._progress import phase, with_progress_line
from sdeinfer.auditing._auto import automatic, configured_sd, twin_of
from sdeinfer.auditing._books import Books, books_from, books_of
from sdeinfer.auditing._causes import explained
from sdeinfer.auditing._facts import facts_of
from sdeinfer.auditing._like import as_found, other_outputs, other_roles
from sdeinfer.auditing._pass_tests import NORMS, tests_of_mask, tests_of_norms, tests_of_pass
from sdeinfer.auditing._recipe import Recipe, of_rules, unmatched
from sdeinfer.auditing._recipes import RECIPES
from sdeinfer.auditing._result import Audit
from sdeinfer.auditing._tests import Test, first_names, rows_by_name, rows_of, tests_of_rows
from sdeinfer.auditing._topics import FAILS, TOPICS
from sdeinfer.auditing._words import words_of
from sdeinfer.passes._models import made
from sdeinfer.passes._passes import record_of


@with_progress_line
def audit(
    model: Any,
    inputs: Any = None,
    *,
    recipe: str | Recipe | Mapping[str, Any] | None = None,
    like: Any = None,
    causal: bool | None = None,
    norm: str | None = None,
    allow: Sequence[str] = (),
    seed: int = 0,
    progress: bool = True,
) -> Audit:
    """Compare a network at initialisation with what is declared of it, by its weights and a few forward passes.

    `audit.recipes` has the recipes, `audit.initialise` draws weights by them; `audit.scaling` is for models of several
    sizes, `audit.Monitor` for training, `audit.assert_initialised` for test suites.

    Arguments:
        model: a module of PyTorch, Flax or Equinox; a function of a seed, or without arguments, that makes one; or a
            pair of a function of parameters and inputs, and its parameters (a pytree of arrays, as of Haiku or Linen).
        inputs: the model's input: one positional argument, or a mapping of keyword arguments, nested or not; with a few
            tokens dependences are checked, too. None for tokens, images or vectors that fit.
        recipe: the declaration: "auto" for what a Hugging Face model says, a name of `audit.recipes.RECIPES`,
            a `Recipe`, or a mapping of roles or globs of names to standard deviations; None to say what is.
        like: another model, compared with role by role, as an older implementation; where parameters have the same
            names or roles, its outputs with the weights of this one are compared, too.
        causal: whether tokens are declared not to see later ones.
        norm: "pre", "post", "sandwich" or "qk", if norms are declared to be before branches, after sums, before and
            after branches, or of queries and keys; several as "pre+qk".
        allow: findings that are as declared, of `audit.FAILS`; "untested", or globs of what may be left untested.
        seed: seed of the weights, if `model` is a function.
        progress: whether a line on a terminal or in a notebook says what is done, after two seconds.

    Returns:
        The `Audit`: its `passed` (None where nothing is declared, or something declared was not tested), `verdict`,
        `untested` and `to_frame()`.

    Raises:
        InputError: if the model cannot be run, for an unknown recipe, or for a rule that matches no parameter.
    """
    del progress  # for `with_progress_line`
    _require_words(causal, norm)
    phase("running the model")
    network = made(model, seed)
    books = books_of(network, inputs)
    _require_allowed(allow, books)
    phase("comparing with what is declared")
    reference = None if like is None else made(like, seed)
    peer = None if reference is None else books_of(reference, inputs)
    rule = recipe_of(recipe, network) if peer is None else as_found(peer, books.account)
    if isinstance(recipe, Mapping) and (key := unmatched(recipe, books.account)) is not None:
        roles = ", ".join(sorted({matrix.role for matrix in books.account.matrices.values()}))
        raise InputError(f"recipe: {key!r} is no role and matches no name of a parameter; the roles are {roles}")
    comparisons = [] if peer is None else [*other_roles(books, peer), *other_outputs(reference, books, peer)]
    return audit_of_books(books, rule, network, causal=causal, norm=norm, allow=allow, comparisons=comparisons)


def _require_words(causal: Any, norm: Any) -> None:
    if causal is not None and not isinstance(causal, bool):
        raise InputError(f"causal: True, False or None is needed, got {causal!r}")
    for word in [] if norm is None else str(norm).split("+"):
        if word not in NORMS:
            raise InputError(f"norm: one of {', '.join(NORMS)} is needed, or several with + between, got {norm!r}")


def _require_allowed(allow: Sequence[str], books: Books) -> None:
    if isinstance(allow, str):
        raise InputError(f"allow: a list is needed, got {allow!r}")
    known = {*FAILS, "untested", "causal", "norm", *books.account.graph.record.parameters, *books.account.matrices}
    for word in allow:
        if not any(fnmatch.fnmatchcase(name, word) for name in known):
            raise InputError(f"allow: findings are {', '.join(FAILS)}, untested or a name, got {word!r}")


def audit_of_books(
    books: Books,
    rule: Recipe | None,
    network: Any,
    *,
    causal: bool | None = None,
    norm: str | None = None,
    allow: Sequence[str] = (),
    comparisons: Sequence[Test] = (),
) -> Audit:
    """The audit of books by a recipe, and by what else is declared of the network."""
    account, laws = books.account, books.laws
    causal = rule.causal if causal is None and rule is not None else causal
    norm = rule.norm if norm is None and rule is not None else norm
    rows = rows_of(account, laws, rule)
    of_pass = _in_its_code(network, books, rule, _of_pass(books, rule))
    tests, hint = [*comparisons, *of_pass], ""
    if rule is not None:
        declared = [*rows, *rows_by_name(account, laws, rule)]
        of_rows = explained(tests_of_rows(declared, account, rule), declared, rule)
        tests += [*of_rows, *_unreached(books, rule)]
        if all(row.by is None for row in declared):
            tests.append(Test("untested", "parameters", None, f"{rule.name} speaks of no parameter that was found"))
        if any(test.passed is False and test.topic in ("σ", "bias", "law") for test in of_rows):
            hint = _hint(books, rule, network)
    tests += tests_of_norms(books, norm)
    tests += tests_of_mask(books, causal=causal)
    tests = [test for test in tests if test.passed is True or not _allowed(test, allow)]
    declared = rule is not None or causal is not None or norm is not None
    words = words_of(account, laws, books.dependences, books.norms)
    return Audit(books.name, rule, tuple(rows), tuple(tests), words, account, hint, declared)


def _allowed(test: Test, allow: Sequence[str]) -> bool:
    names = (test.topic, test.what, *test.names)
    if test.passed is False:
        return test.topic in allow
    return any(fnmatch.fnmatchcase(name, word) for word in allow for name in names)


def _of_pass(books: Books, rule: Recipe | None) -> list[Test]:
    """Findings, and the tests of the pass against a recipe."""
    findings = facts_of(books, has_recipe=rule is not None)
    return findings + ([] if rule is None else tests_of_pass(books, rule))


def _in_its_code(network: Any, books: Books, rule: Recipe | None, tests: list[Test]) -> list[Test]:
    """Tests of the pass of a library's model; a failure that a fresh twin also shows is its code, and passes."""
    failed = [test for test in tests if test.passed is False and TOPICS[test.topic].of_code]
    if not failed or not hasattr(getattr(network, "config", None), "model_type"):
        return tests
    try:
        fresh_model = twin_of(network)
        twin = books_from(fresh_model, record_of(fresh_model, books.inputs), books.inputs)
    except Exception:
        return tests
    ratios: dict[tuple[str, str], list[float]] = {}
    for test in _of_pass(twin, rule):
        if test.passed is False:
            ratios.setdefault((test.topic, test.what), []).append(test.ratio)

    def in_code(test: Test) -> bool:
        twin_ratios = ratios.get((test.topic, test.what), [])
        return test in failed and any(math.isnan(x) or math.isclose(x, test.ratio, rel_tol=0.1) for x in twin_ratios)

    return [dataclasses.replace(test, passed=True, topic="code") if in_code(test) else test for test in tests]


def _unreached(books: Books, rule: Recipe) -> list[Test]:
    """Matrices that the pass did not reach: their roles, factors and places are not tested."""
    parameters = books.account.graph.record.parameters
    names = [name for name in books.account.unreached if rule.declared_by_name(name) is None]
    if not names:
        return []
    matrices = [name for name in names if len(parameters[name].shape) > 1]
    whole = [name for name in parameters if not matrices or len(parameters[name].shape) > 1]
    kind, names = ("matrices", matrices) if matrices else ("parameters", names)
    says = f"{len(names)} of {len(whole)} {kind} are not reached by these inputs, or not used ({first_names(names)})"
    return [Test("untested", "unreached", None, says, names=tuple(names))]


def _hint(books: Books, rule: Recipe, network: Any) -> str:
    """A recipe that all σ would pass."""
    sd = configured_sd(network)
    for name in ("normal", "gpt2", "pytorch", "pytorch_linear", "lecun", "xavier", "kaiming"):
        if name == rule.name:
            continue
        candidate = _named(name, sd)
        tests = tests_of_rows(rows_of(books.account, books.laws, candidate), books.account, candidate)
        sigma = [test for test in tests if test.topic in ("σ", "bias")]
        if any(test.topic == "σ" for test in sigma) and all(test.passed for test in sigma):
            return f"{name!r} would pass"
    return ""


def recipe_of(recipe: Any, network: Any) -> Recipe | None:
    """A recipe from its name, with the σ of the model's configuration, from a mapping of rules, or as it is."""
    match recipe:
        case None | Recipe():
            return recipe
        case "auto":
            if (declared := automatic(network)) is not None:
                return declared
            raise InputError(f"recipe: {type(network).__name__} has no configuration that declares one: name a recipe")
        case str():
            return _named(recipe, configured_sd(network))
        case Mapping():
            return of_rules(recipe)
    kind = type(recipe).__name__
    raise InputError(f"recipe: a name, a Recipe or a dict of standard deviations is needed, got a {kind}")


def _named(name: str, sd: float | None) -> Recipe:
    if name not in RECIPES:
        raise InputError(f"recipe: one of auto, {', '.join(RECIPES)} is needed, got {name!r}")
    known = inspect.signature(RECIPES[name]).parameters
    missing = [parameter.name for parameter in known.values() if parameter.default is parameter.empty]
    if missing:
        examples = {"base_width": 256, "base_layers": 2}
        example = ", ".join(f"{argument}={examples[argument]}" for argument in missing)
        raise InputError(f"recipe: {name} needs {' and '.join(missing)}: pass si.audit.recipes.{name}({example})")
    return RECIPES[name]() if sd is None or "sd" not in known else RECIPES[name](sd=sd)
