"""Mistakes in an initialisation that explain what is found of a block, over what is declared."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator

from sdeinfer.auditing._estimates import Likelihood
from sdeinfer.auditing._recipe import Matrix, Recipe, Role, matrices
from sdeinfer.auditing._recipes import SD
from sdeinfer.blocks import MLP, Block, SelfAttention

NEAR, SDS = 0.03, 3.0
"""A number is explained by one within so much of its logarithm, and within so many of its standard deviations."""

type _Change = Callable[[Matrix], tuple[int, int]]
"""Another fan_in and fan_out of a matrix."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """A mistake, and what it makes of the strength and of the shape (temperature or gain) over the declared ones.

    The factor is what a reader sees: that of the strength, or else that of the shape.
    """

    strength: float
    shape: float
    factor: float
    sentence: str


@dataclasses.dataclass(frozen=True)
class _Mistake:
    """A factor `of` the standard deviations of matrices, in symbols for one and for two of them, and in a sentence.

    If not `anywhere`, only the last matrix, with the one before it, or all may have it.
    """

    symbol: tuple[str, str]
    of: Callable[[Matrix], float]
    says: str
    anywhere: bool = True


def causes(found: Likelihood, *, block: Block, recipe: Recipe, width: int, layers: int) -> list[Cause]:
    """The mistakes that explain the strength and the shape of a block together, likely ones first.

    A mistake explains a shape if its log likelihood is within that of three standard deviations of the largest one;
    and then the strength, if that at this shape is within three standard deviations, and within 3 % or two of them.
    """
    known = candidates(block=block, recipe=recipe, width=width, layers=layers)
    plain = isinstance(block.branch, MLP) and not block.branch.gated
    return [each for each in known if _explains(each, found, plain=plain)]


def _explains(cause: Cause, found: Likelihood, *, plain: bool) -> bool:
    log_shape = found.inside(math.log(cause.shape))
    # Far out an activation is as good as homogeneous, so that a gain is a factor of the strength.
    beyond = (math.log(cause.shape) - log_shape) / 2 if plain else 0.0
    log_strength, sd, below = found.at(log_shape)
    distance = abs(log_strength - math.log(cause.strength) - beyond)
    known = math.isclose(log_shape, math.log(cause.shape), abs_tol=1e-9)
    far = 0.5  # where the shape is so far from the declared one that the likelihood is not known
    return bool(below <= SDS**2 / 2 and distance <= (min(SDS * sd, max(NEAR, 2 * sd)) if known else far))


def candidates(*, block: Block, recipe: Recipe, width: int, layers: int) -> Iterator[Cause]:
    """Every cause that `causes` compares with, likely ones first."""
    of_role = matrices(block, width=width, layers=layers)
    *_, last = of_role.values()
    first = of_role["value"] if "value" in of_role else of_role["up"]
    heads = groups = 1
    if isinstance(block.branch, SelfAttention):
        heads, groups = block.branch.heads, block.branch.groups
        yield from _of_logits(recipe, last.fan_in // heads, width)
    mistakes = [*_of_recipe(recipe, last, first), *_of_fans(recipe, of_role, heads, groups), *_of_laws(recipe)]
    known: set[tuple[float, float, str]] = set()
    for mistake, (roles, where) in itertools.product(mistakes, _places(of_role, last.role, first.role)):
        own = [role for role in roles if not math.isclose(mistake.of(of_role[role]), 1.0, rel_tol=1e-3)]
        if not own or (len(own) < len(roles) < len(of_role)) or not (mistake.anywhere or last.role in roles):
            continue
        of: dict[Role, float] = {role: mistake.of(matrix) if role in own else 1.0 for role, matrix in of_role.items()}
        strength, shape = _parameters(of)
        if (strength, shape, mistake.says) not in known:
            known.add((strength, shape, mistake.says))
            both = first.role in own and last.role in own
            yield _cause(strength, shape, of[first.role] * of[last.role], mistake.symbol[both], mistake.says, where)


def _places(of_role: dict[Role, Matrix], last: Role, first: Role) -> Iterator[tuple[tuple[Role, ...], str]]:
    """Sets of matrices that may have a mistake, and their names."""
    roles = tuple(of_role)
    yield (last,), f"the {last} matrix"
    yield (first, last), f"the {first} and {last} matrices"
    yield roles, "all matrices"
    if "value" in of_role:
        yield ("query", "key"), "the query and key matrices"
        yield ("query", "key", "value"), "the query, key and value matrices"
    elif "gate" in of_role:
        yield ("gate", "up"), "the gate and up matrices"
        yield ("gate",), "the gate matrix"
    yield (first,), f"the {first} matrix"


def _parameters(of: dict[Role, float]) -> tuple[float, float]:
    """Factors of the strength and the shape of a block whose matrices have other standard deviations."""
    if "value" in of:
        return of["value"] * of["attention output"], 1 / (of["query"] * of["key"])
    if "gate" in of:
        return of["mlp output"] * of["up"] / of["gate"], of["gate"] ** 2
    return of["mlp output"], of["up"] ** 2


def _cause(strength: float, shape: float, together: float, symbol: str, says: str, where: str = "") -> Cause:
    if math.isclose(together, 1.0, rel_tol=1e-3):
        together, symbol = shape, symbol if not where else ""
    symbol = f"{symbol} = " if symbol else ""
    return Cause(strength, shape, together, f"{symbol}{in_digits(together)}: {says.format(where=where)}")


def _of_recipe(recipe: Recipe, last: Matrix, first: Matrix) -> Iterator[_Mistake]:
    """A factor of the recipe is missing or there twice, or another recipe is in its place."""
    names = dict.fromkeys([*recipe.factors(last), *recipe.factors(first)])
    for name in names:
        yield from _of_factor(recipe, name)
    yield from _of_depth(recipe, last)
    yield _Mistake(
        ("default/σ", "default²/(σσ′)"),
        lambda matrix: 1 / math.sqrt(3 * matrix.fan_in) / recipe.sd(matrix),
        "{where}: the default 1/√(3 fan_in) of torch.nn.Linear, as if never initialised",
        anywhere=False,
    )
    # Otherwise it is the factors that are missing.
    if not math.isclose(recipe.sd(first), SD * math.prod(recipe.factors(first).values())):
        yield _Mistake(
            (f"{SD}/σ", f"{SD}²/(σσ′)"),
            lambda matrix: SD / recipe.sd(matrix),
            f"{{where}}: a standard deviation of {SD}, the default of many configurations",
            anywhere=False,
        )
    by_fan = not math.isclose(recipe.sd(last), recipe.sd(dataclasses.replace(last, fan_in=4 * last.fan_in)))
    if by_fan and "gain" not in names:
        yield _Mistake(("√2", ""), lambda _: math.sqrt(2), "{where}: a gain √2, as for ReLU, that the recipe has not")


def _of_laws(recipe: Recipe) -> Iterator[_Mistake]:
    """One number of a law is taken for another."""
    variance = "{where}: the variance is taken for the standard deviation"
    yield _Mistake(("σ", "σσ′"), recipe.sd, variance)
    bound = "{where}: the standard deviation is taken for the bound of a uniform law"
    yield _Mistake(("1/√3", "1/3"), lambda _: 1 / math.sqrt(3), bound)
    uniform = "{where}: the bound of a uniform law is taken for the standard deviation"
    yield _Mistake(("√3", ""), lambda _: math.sqrt(3), uniform)
    cut = "{where}: a normal law that is cut off at two standard deviations"
    yield _Mistake(("", ""), lambda _: 0.87962566, cut)


def _of_factor(recipe: Recipe, name: str) -> Iterator[_Mistake]:
    symbol = name.partition(" = ")[0]  # β of β = (8L)^−¼
    inverse = symbol.removeprefix("1/") if symbol.startswith("1/") else f"1/({symbol})"

    def factor(matrix: Matrix) -> float:
        return recipe.factors(matrix).get(name, 1.0)

    missing = f"the factor {name} of {{where}} is missing"
    yield _Mistake((inverse, f"({inverse})²"), lambda matrix: 1 / factor(matrix), missing)
    yield _Mistake((symbol, f"({symbol})²"), factor, f"the factor {name} of {{where}} is there twice, or squared")


def _of_depth(recipe: Recipe, last: Matrix) -> Iterator[_Mistake]:
    """Another scale with depth of the last matrix."""

    def mistake(symbol: str, factor: float, says: str) -> _Mistake:
        return _Mistake((symbol, symbol), lambda matrix: factor if matrix.last else 1.0, says)

    def scale(layers: int) -> float:
        return recipe.multiplier(layers) * recipe.sd(dataclasses.replace(last, layers=layers))

    L = last.layers
    root = "1/√(2L)"
    if root in recipe.factors(last):
        yield mistake("√2", math.sqrt(2), "1/√L in place of 1/√(2L) in {where}")
    elif math.isclose(scale(L), scale(4 * L)):
        yield mistake(root, 1 / math.sqrt(2 * L), "{where}: a scale of 1/√(2L) that the recipe has not")
        yield mistake("1/√L", 1 / math.sqrt(L), "{where}: a scale of 1/√L that the recipe has not")


def _of_fans(recipe: Recipe, of_role: dict[Role, Matrix], heads: int, groups: int) -> Iterator[_Mistake]:
    """Mistakes in fan_in and fan_out, of recipes that depend on them."""

    def mistake(symbol: str, says: str, change: _Change, *, anywhere: bool = True) -> _Mistake:
        def of(matrix: Matrix) -> float:
            fan_in, fan_out = change(matrix)
            return recipe.sd(dataclasses.replace(matrix, fan_in=fan_in, fan_out=fan_out)) / recipe.sd(matrix)

        return _Mistake((symbol, symbol), of, says, anywhere)

    exchanged = "{where}: fan_in and fan_out are exchanged"
    yield mistake("σ of exchanged fans/σ", exchanged, lambda matrix: (matrix.fan_out, matrix.fan_in))
    if "value" not in of_role:
        return
    together = sum(of_role[role].fan_out for role in ("query", "key", "value"))

    def of_first(change: _Change) -> _Change:
        return lambda matrix: (matrix.fan_in, matrix.fan_out) if matrix.last else change(matrix)

    fused = of_first(lambda matrix: (matrix.fan_in, together))
    says = "queries, keys and values are initialised as one matrix"
    yield mistake("σ of one matrix/σ", says, fused, anywhere=False)
    fused = of_first(lambda matrix: (together, matrix.fan_in))
    yield mistake(
        "σ of one exchanged matrix/σ", f"{says}, whose fan_in and fan_out are exchanged", fused, anywhere=False
    )
    of_head = "{where}: fan_in is that of one head"
    yield mistake("σ of d_k/σ", of_head, lambda matrix: (matrix.fan_in // heads, matrix.fan_out))
    if 1 < groups < heads:
        of_keys = "{where}: fan_in is that of the keys"
        share = heads // groups
        yield mistake("σ of grouped heads/σ", of_keys, lambda matrix: (matrix.fan_in // share, matrix.fan_out))


def _of_logits(recipe: Recipe, size: int, width: int) -> Iterator[Cause]:
    """Other scales of the logits than the recipe's, as temperatures over it."""
    declared = recipe.temperature(size)
    scales = {
        "1/√d_k of the logits is missing": ("1/√d_k", 1 / math.sqrt(size)),
        "logits are divided by √d_k": ("1", 1.0),
        "logits are divided by d_k: by √d_k twice": ("√d_k", math.sqrt(size)),
        "logits are divided by √n in place of √d_k": ("√(n/d_k)", math.sqrt(width / size)),
    }
    for says, (symbol, temperature) in scales.items():
        factor = temperature / declared
        if not math.isclose(factor, 1.0, rel_tol=1e-3):
            over = symbol if declared == 1 else f"{symbol}/{in_digits(declared)}"
            yield _cause(1.0, factor, factor, over, says)


def in_digits(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:#.3g}".removesuffix(".")
