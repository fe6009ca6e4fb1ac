"""Is a network initialised as it claims?"""

import copy
import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sdeinfer._files import InputError
from sdeinfer.auditing._account import Account
from sdeinfer.auditing._auto import automatic, configured_sd
from sdeinfer.auditing._causes import explained
from sdeinfer.auditing._dependences import Dependences, changed, dependences_of
from sdeinfer.auditing._findings import FAILS, findings_of
from sdeinfer.auditing._graph import Graph
from sdeinfer.auditing._inputs import PACKED, candidates, needed
from sdeinfer.auditing._law import Law, law_of
from sdeinfer.auditing._recipe import Recipe, applies, of_rules
from sdeinfer.auditing._recipes import RECIPES
from sdeinfer.auditing._record import Record
from sdeinfer.auditing._result import Audit
from sdeinfer.auditing._roles import account_of
from sdeinfer.auditing._tests import Test, rows_of, tests_of
from sdeinfer.auditing._words import words_of


@dataclasses.dataclass(frozen=True, eq=False)
class Books:
    """All that is read of a network: the accounts of a pass, laws of parameters, dependences."""

    account: Account
    laws: dict[str, Law]
    dependences: Dependences
    name: str
    inputs: Any = None


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

    Returns:
        The `Audit`: its `passed` (None where nothing is declared), `verdict` and `to_frame()`.

    Raises:
        InputError: if the model cannot be run, for an unknown recipe, or for a rule that matches no parameter.
    """
    unknown = [each for each in allow if each not in FAILS]
    if unknown:
        raise InputError(f"allow: findings are {', '.join(FAILS)}, got {unknown[0]!r}")
    network = made(model, seed)
    books = books_of(network, inputs)
    if isinstance(recipe, Mapping):
        _require_matches(recipe, books.account)
    other = None if like is None else books_of(made(like, seed), inputs)
    rule = recipe_of(recipe, network) if other is None else _as_found(other)
    if rule is not None:
        given = {"causal": causal, "norm": norm}
        rule = dataclasses.replace(rule, **{key: value for key, value in given.items() if value is not None})
        causal = rule.causal
    found = judged(books, rule, network, causal=causal, allow=tuple(allow))
    if other is None:
        return found
    more = [*_other_roles(books, other), *_other_outputs(made(like, seed), books, other)]
    return dataclasses.replace(found, tests=(*more, *found.tests))


def _require_matches(rules: Mapping[str, Any], account: Account) -> None:
    """Every key has to match a parameter: a mistyped one would leave parameters undeclared."""
    matrices = account.matrices.values()
    for key in rules:
        if not any(applies(key, matrix) for matrix in matrices):
            roles = ", ".join(sorted({role for matrix in matrices for role in matrix.role.split("/")}))
            raise InputError(f"recipe: {key!r} is no role and matches no name of a parameter; the roles are {roles}")


def _other_roles(books: Books, other: Books) -> list[Test]:
    """Roles, and numbers of layers, of two models that differ."""
    own, theirs = (
        {matrix.role for matrix in each.account.matrices.values() if matrix.linear} for each in (books, other)
    )
    tests = []
    for role in sorted(theirs - own):
        tests.append(Test("roles", role, passed=False, says=f"no matrix is a {role}, where {other.name} has one"))
    if books.account.layers != other.account.layers:
        says = f"{books.account.layers} layers, where {other.name} has {other.account.layers}"
        tests.append(Test("roles", "layers", passed=False, says=says))
    return tests


def _other_outputs(like: Any, books: Books, other: Books) -> list[Test]:
    """Whether the other model returns the same values with the weights of this one, by equal names of parameters."""
    own, theirs = (each.account.graph.record.parameters for each in (books, other))
    if {name: each.shape for name, each in own.items()} != {name: each.shape for name, each in theirs.items()}:
        return []
    if any("[" in name and name.endswith("]") for name in own) and not is_torch(like):
        return []  # layers that a scan cuts out of one array
    values = {name: each.read(slice(None)).reshape(each.shape) for name, each in own.items()}
    record = _tap(like)[0](filled(copy.deepcopy(like) if is_torch(like) else like, values), books.inputs)
    ends = zip(*([c[-1].sum.rows for c in a.streams] for a in (books.account, account_of(Graph(record)))), strict=False)
    far = max((float(np.abs(a / b - 1).max()) for a, b in ends if a.shape == b.shape and b.all()), default=0.0)
    says = f"with the same weights {other.name} returns other values (rows of the stream differ by {100 * far:.2g} %)"
    return [Test("outputs", "outputs", far < SAME, says)]


SAME = 3e-5
"""Relative difference of mean squares below which two implementations differ by rounding."""


def filled(network: Any, new: Mapping[str, np.ndarray]) -> Any:
    """A model with these arrays in its parameters: of PyTorch the same object, of JAX a new one."""
    if not is_torch(network):
        from sdeinfer.auditing._jax_models import replaced

        return replaced(network, new)
    torch = sys.modules["torch"]
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        for name, values in new.items():
            parameters[name].copy_(torch.from_numpy(np.ascontiguousarray(values)).reshape(parameters[name].shape))
    return network


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


def books_of(network: Any, inputs: Any = None) -> Books:
    """Read the books: a pass, a second one with a token changed, and the laws of all parameters."""
    record, given = first_pass(network, inputs)
    account = account_of(Graph(record))
    other = changed(given) if isinstance(given, dict) and not PACKED & {*given} else None
    found = Dependences()
    if other is not None:
        second = _tap(network)[0](network, other[0])
        found = dependences_of(account, second, other[1], next(iter(given.values())).shape[0])
    laws = {name: law_of(each) for name, each in record.parameters.items()}
    return Books(account, laws, found, record.name, given)


def _tap(network: Any) -> tuple[Callable[..., Record], Callable[..., Any]]:
    """What runs a model and records it, and what makes its inputs."""
    if is_torch(network):
        from sdeinfer.auditing._torch import as_tensors, record_of
    else:
        from sdeinfer.auditing._jax import record_of
        from sdeinfer.auditing._jax_models import as_tensors, require_model

        require_model(network)
    return record_of, as_tensors


def first_pass(network: Any, inputs: Any) -> tuple[Record, Any]:
    """The record of a pass, with the inputs given, or with the first ones that fit."""
    record_of, as_tensors = _tap(network)
    name = type(network).__name__
    if inputs is not None:
        given = as_tensors(inputs, network)
        try:
            return record_of(network, given), given
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"inputs: {name} cannot be run with them ({_line(error)})") from error
    if not is_torch(network):
        raise InputError(f"inputs: needed for {name}: its argument, or a dict of keyword arguments")
    tried, errors = candidates(network), []
    given = next(tried, None)
    while given is not None:
        try:
            return record_of(network, given), given
        except InputError:
            raise
        except Exception as error:
            errors.append(_line(error))
        try:
            given = tried.send(errors[-1])
        except StopIteration:
            break
    names = ", ".join(needed(network)) or "its argument"
    why = f" ({errors[0]})" if errors else ""
    raise InputError(f"inputs: needed for {name}: {names}, as a dict of keyword arguments{why}")


def _line(error: Exception) -> str:
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0][:120]}"


def made(model: Any, seed: int) -> Any:
    """A model, or what a function makes of a seed; of JAX of a `key`, of Flax of `rngs`."""
    if is_torch(model) or not (inspect.isroutine(model) or isinstance(model, type)):
        return model
    names = inspect.signature(model).parameters
    if "key" in names:
        return model(key=sys.modules["jax"].random.key(seed))
    if "rngs" in names:
        return model(rngs=sys.modules["flax.nnx"].Rngs(seed))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)
    return model(seed)


def is_torch(model: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(model, torch.nn.Module)


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


def _as_found(books: Books) -> Recipe:
    """What another model is, as a recipe: σ and laws by role and layer, factors, logits."""
    account, laws = books.account, books.laws
    exact: dict[tuple, tuple[float, str]] = {}
    for name, matrix in account.matrices.items():
        law = laws[name]
        for key in ((matrix.role, matrix.of, matrix.layer), (matrix.role, matrix.of, None)):
            exact.setdefault(key, (law.sd, law.name))

    def found(matrix: Any) -> tuple[float | None, str | None]:
        own = exact.get((matrix.role, matrix.of, matrix.layer)) or exact.get((matrix.role, matrix.of, None))
        return own or (None, None)

    logits = {each.layer: each.factor for each in account.logits}
    writers = [source for each in account.writers.values() for _, source in each if source.plain]
    skips = [link.skip.factor for chain in account.streams for link in chain[1:]]
    return Recipe(
        f"like {books.name}",
        "another model",
        lambda matrix: found(matrix)[0],
        lambda matrix: found(matrix)[0],
        lambda matrix: law if (law := found(matrix)[1]) in ("normal", "uniform", "orthogonal") else None,
        multiplier=lambda layers: abs(writers[0].factor) if writers else None,
        skip=lambda layers: skips[0] if skips else None,
        logits=lambda each: logits.get(each.layer),
        causal=books.dependences.causal,
    )
