"""Mistakes in an initialisation that explain the factor between what is found and what is declared."""

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Literal

from sdeinfer._files import InputError
from sdeinfer.auditing._recipe import Matrix, Recipe, Role, matrices
from sdeinfer.auditing._recipes import SD
from sdeinfer.blocks import Block, SelfAttention

NEAR, SDS = 0.03, 3.0
"""A factor is explained by one within so much of its logarithm, and within so many of its standard deviations."""

TRUNCATED = 0.87962566
"""Standard deviation of a standard normal variable between −2 and 2."""


ROOT = "1/√(2L)"
"""The factor of GPT-2, by its name in recipes."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """A mistake that makes the factor that was found.

    Attributes:
        factor: what it makes of the declared value.
        sentence: the factor and the mistake: "√(2L) = 4.90: the factor 1/√(2L) of the mlp output is missing".
    """

    factor: float
    sentence: str


@dataclasses.dataclass(frozen=True)
class _Mistake:
    """A mistake in the initialisation of matrices.

    Attributes:
        symbol: the factor in symbols, of one matrix; and of two, where both have it. Empty if it has none.
        of: the standard deviation that it gives a matrix over that of the recipe.
        says: a sentence, with a place for the matrices.
    """

    symbol: tuple[str, str]
    of: Callable[[Matrix], float]
    says: str


def causes(
    ratio: float,
    sd_log: float,
    *,
    parameter: Literal["strength", "gain", "temperature"],
    block: Block,
    recipe: Recipe,
    width: int,
    layers: int,
) -> list[Cause]:
    """The mistakes that explain a factor, likely ones first; none if the factor agrees with 1.

    A mistake explains it if its own factor is within three standard deviations and 3 %.

    Arguments:
        ratio: found over declared value.
        sd_log: standard deviation of its logarithm.
        parameter: which parameter of the block.
        block: the block; only its structure counts.
        recipe: what declares the value.
        width: n.
        layers: L.

    Raises:
        InputError: for a factor that is not positive, and a gain of attention.
    """
    if not (0 < ratio < math.inf and 0 <= sd_log < math.inf):
        raise InputError(f"ratio: a positive number and its error are needed, got {ratio} and {sd_log}")
    if parameter == "gain" and isinstance(block.branch, SelfAttention):
        raise InputError("parameter: the gain of attention is a factor of the strength and the temperature")
    tolerance = min(SDS * sd_log, NEAR)
    if abs(math.log(ratio)) <= SDS * sd_log:
        return []
    known = candidates(parameter=parameter, block=block, recipe=recipe, width=width, layers=layers)
    return [each for each in known if abs(math.log(ratio / each.factor)) <= tolerance]


def candidates(
    *,
    parameter: Literal["strength", "gain", "temperature"],
    block: Block,
    recipe: Recipe,
    width: int,
    layers: int,
) -> Iterator[Cause]:
    """Every cause that `causes` compares with, likely ones first.

    A mistake in both matrices of a plain MLP makes the product of their factors where its activation is nearly linear,
    as GELU and SiLU at small gains, or homogeneous, as ReLU.
    """
    of_role = matrices(block, width=width, layers=layers)
    *_, last = of_role.values()
    first = of_role["value"] if "value" in of_role else of_role["up"]
    heads = groups = 1
    if isinstance(block.branch, SelfAttention):
        heads, groups = block.branch.heads, block.branch.groups
    if parameter == "temperature":
        yield from _of_logits(recipe, last.fan_in // heads, width)
    mistakes = [*_of_recipe(recipe, last, first), *_of_laws(recipe), *_of_fans(recipe, of_role, heads, groups)]
    for mistake in mistakes:
        match parameter:
            case "temperature":
                factor = 1 / (mistake.of(of_role["query"]) * mistake.of(of_role["key"]))
                yield from _cause(factor, "", mistake.says, "the query and key matrices")
            case "gain":
                role: Role = "gate" if "gate" in of_role else "up"
                yield from _cause(mistake.of(of_role[role]) ** 2, mistake.symbol[1], mistake.says, f"the {role} matrix")
            case "strength":
                alone, both = mistake.of(last), mistake.of(last) * mistake.of(first)
                yield from _cause(alone, mistake.symbol[0], mistake.says, f"the {last.role} matrix")
                if not math.isclose(both, alone):
                    symbol = mistake.symbol[0 if math.isclose(alone, 1) else 1]
                    yield from _cause(both, symbol, mistake.says, f"the {first.role} and {last.role} matrices")


def _cause(factor: float, symbol: str, says: str, where: str) -> Iterator[Cause]:
    """The cause, if it makes a factor other than 1."""
    if not math.isclose(factor, 1.0, rel_tol=1e-3):
        symbol = f"{symbol} = " if symbol else ""
        yield Cause(factor, f"{symbol}{in_digits(factor)}: {says.format(where=where)}")


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
    )
    # Otherwise it is the factors that are missing.
    if not math.isclose(recipe.sd(first), SD * math.prod(recipe.factors(first).values())):
        yield _Mistake(
            (f"{SD}/σ", f"{SD}²/(σσ′)"),
            lambda matrix: SD / recipe.sd(matrix),
            f"{{where}}: a standard deviation of {SD}, the default of many configurations",
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
    yield _Mistake(("", ""), lambda _: TRUNCATED, cut)


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
    if ROOT in recipe.factors(last):
        yield mistake("√2", math.sqrt(2), "1/√L in place of 1/√(2L) in {where}")
    elif math.isclose(scale(L), scale(4 * L)):
        yield mistake(ROOT, 1 / math.sqrt(2 * L), "{where}: a scale of 1/√(2L) that the recipe has not")
        yield mistake("1/√L", 1 / math.sqrt(L), "{where}: a scale of 1/√L that the recipe has not")


def _of_fans(recipe: Recipe, of_role: dict[Role, Matrix], heads: int, groups: int) -> Iterator[_Mistake]:
    """Mistakes in fan_in and fan_out, of recipes that depend on them."""

    def mistake(symbol: str, says: str, change: Callable[[Matrix], tuple[int, int]]) -> _Mistake:
        def of(matrix: Matrix) -> float:
            fan_in, fan_out = change(matrix)
            return recipe.sd(dataclasses.replace(matrix, fan_in=fan_in, fan_out=fan_out)) / recipe.sd(matrix)

        return _Mistake((symbol, symbol), of, says)

    exchanged = "{where}: fan_in and fan_out are exchanged"
    yield mistake("σ of exchanged fans/σ", exchanged, lambda matrix: (matrix.fan_out, matrix.fan_in))
    if "value" not in of_role:
        return
    together = sum(of_role[role].fan_out for role in ("query", "key", "value"))

    def fused(matrix: Matrix) -> tuple[int, int]:
        return matrix.fan_in, matrix.fan_out if matrix.last else together

    def of_last(share: int) -> Callable[[Matrix], tuple[int, int]]:
        return lambda matrix: (matrix.fan_in // share if matrix.last else matrix.fan_in, matrix.fan_out)

    yield mistake("σ of one matrix/σ", "queries, keys and values are initialised as one matrix", fused)
    yield mistake("σ of d_k/σ", "{where}: fan_in is that of one head", of_last(heads))
    if 1 < groups < heads:
        yield mistake("σ of grouped heads/σ", "{where}: fan_in is that of the keys", of_last(heads // groups))


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
        over = symbol if declared == 1 else f"{symbol}/{in_digits(declared)}"
        yield from _cause(temperature / declared, over, says, "")


def in_digits(value: float) -> str:
    """A number with three significant digits."""
    return f"{value:#.3g}".removesuffix(".")
