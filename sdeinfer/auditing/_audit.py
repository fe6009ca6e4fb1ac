"""Is a network initialised as it claims?"""

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from sdeinfer._files import InputError
from sdeinfer._progress import phase, with_progress_line
from sdeinfer.auditing._account import Account
from sdeinfer.auditing._auto import automatic, configured_sd
from sdeinfer.auditing._books import Books, books_of, made
from sdeinfer.auditing._causes import explained
from sdeinfer.auditing._findings import FAILS, findings_of
from sdeinfer.auditing._like import as_found, other_outputs, other_roles
from sdeinfer.auditing._recipe import Recipe, applies, of_rules
from sdeinfer.auditing._recipes import RECIPES
from sdeinfer.auditing._result import Audit
from sdeinfer.auditing._tests import rows_of, tests_of
from sdeinfer.auditing._words import words_of


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
    """Compare a network at initialisation with what is declared of it, by one forward pass and its weights.

    `audit.recipes` has the recipes, `audit.initialise` draws weights by them; `audit.scaling` is for models of several
    sizes, `audit.Monitor` for training, `audit.assert_initialised` for test suites.

    Arguments:
        model: a module of PyTorch, Flax or Equinox; a function of a seed that makes one; or a pair of a function of
            parameters and inputs, and its parameters (a pytree of arrays, as of Haiku or Linen).
        inputs: the model's input: one positional argument, or a mapping of keyword arguments; with two items and a few
            tokens dependences are checked, too. None for tokens, images or vectors that fit.
        recipe: what is declared: "auto" for what a Hugging Face configuration says, a name of `audit.recipes.RECIPES`,
            a `Recipe`, or a mapping of roles or globs of names to standard deviations; None to say what is.
        like: another model, compared with role by role, as an older implementation; where parameters have the same
            names, its outputs with the weights of this one are compared, too.
        causal: whether tokens are declared not to see later ones.
        norm: "pre" or "post", if norms are declared to be before branches or after sums.
        allow: findings that are as declared, of `audit.FAILS`: "zeros", "copies", …
        seed: seed of the weights, if `model` is a function.
        progress: whether a line on a terminal or in a notebook says what is done, after two seconds.

    Returns:
        The `Audit`: its `passed` (None where nothing is declared), `verdict` and `to_frame()`.

    Raises:
        InputError: if the model cannot be run, for an unknown recipe, or for a rule that matches no parameter.
    """
    unknown = [each for each in allow if each not in FAILS]
    if unknown:
        raise InputError(f"allow: findings are {', '.join(FAILS)}, got {unknown[0]!r}")
    del progress  # for `with_progress_line`
    phase("running the model")
    network = made(model, seed)
    books = books_of(network, inputs)
    phase("comparing with what is declared")
    if isinstance(recipe, Mapping):
        _require_matches(recipe, books.account)
    reference = None if like is None else made(like, seed)
    other = None if reference is None else books_of(reference, inputs)
    rule = recipe_of(recipe, network) if other is None else as_found(other)
    if rule is not None:
        given = {"causal": causal, "norm": norm}
        rule = dataclasses.replace(rule, **{key: value for key, value in given.items() if value is not None})
        causal = rule.causal
    found = judged(books, rule, network, causal=causal, allow=tuple(allow))
    if other is None:
        return found
    more = [*other_roles(books, other), *other_outputs(reference, books, other)]
    return dataclasses.replace(found, tests=(*more, *found.tests))


def _require_matches(rules: Mapping[str, Any], account: Account) -> None:
    """Every key has to match a parameter: a mistyped one would leave parameters undeclared."""
    matrices = account.matrices.values()
    for key in rules:
        if not any(applies(key, matrix) for matrix in matrices):
            roles = ", ".join(sorted({role for matrix in matrices for role in matrix.role.split("/")}))
            raise InputError(f"recipe: {key!r} is no role and matches no name of a parameter; the roles are {roles}")


def judged(
    books: Books, rule: Recipe | None, network: Any = None, *, causal: bool | None = None, allow: tuple[str, ...] = ()
) -> Audit:
    """The audit of books by a recipe."""
    account, laws = books.account, books.laws
    rows = rows_of(account, laws, rule)
    tests = findings_of(account, laws, books.dependences, allow=allow, causal=causal, judged=rule is not None)
    hint = ""
    if rule is not None:
        compared = explained(tests_of(account, rows, rule), rows, rule)
        tests = [*tests, *compared]
        if any(not test.passed and test.topic in ("σ", "bias", "law") for test in compared):
            hint = _hint(books, rule, network)
    return Audit(books.name, rule, tuple(rows), tuple(tests), words_of(account, laws, books.dependences), account, hint)


def _hint(books: Books, rule: Recipe, network: Any) -> str:
    """A recipe that all σ would pass."""
    sd = configured_sd(network) if network is not None else None
    for name in ("normal", "gpt2", "pytorch", "pytorch_linear", "lecun", "xavier", "kaiming"):
        if name == rule.name:
            continue
        other = _named(name, sd)
        tests = tests_of(books.account, rows_of(books.account, books.laws, other), other)
        sigma = [test for test in tests if test.topic in ("σ", "bias")]
        if any(test.topic == "σ" for test in sigma) and all(test.passed for test in sigma):
            return f"{name!r} would pass"
    return ""


def recipe_of(recipe: Any, network: Any = None) -> Recipe | None:
    """A recipe from its name, with the σ of the model's configuration, from a mapping of rules, or as it is."""
    match recipe:
        case None | Recipe():
            return recipe
        case "auto":
            found = automatic(network)
            if found is None:
                raise InputError(
                    f"recipe: {type(network).__name__} has no configuration that declares one: name a recipe"
                )
            return found
        case str():
            return _named(recipe, configured_sd(network) if network is not None else None)
        case Mapping():
            return of_rules(recipe)
    raise InputError(
        f"recipe: a name, a Recipe or a dict of standard deviations is needed, got a {type(recipe).__name__}"
    )


def _named(name: str, sd: float | None) -> Recipe:
    if name not in RECIPES:
        raise InputError(f"recipe: one of auto, {', '.join(RECIPES)} is needed, got {name!r}")
    known = inspect.signature(RECIPES[name]).parameters
    missing = [each.name for each in known.values() if each.default is each.empty]
    if missing:
        examples = {"base_width": 256, "base_layers": 2}
        example = ", ".join(f"{each}={examples[each]}" for each in missing)
        raise InputError(f"recipe: {name} needs {' and '.join(missing)}: pass si.audit.recipes.{name}({example})")
    return RECIPES[name]() if sd is None or "sd" not in known else RECIPES[name](sd=sd)
