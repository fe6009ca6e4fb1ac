"""Goals in words, as on the command line: a criterion and its bound."""

import re
from collections.abc import Callable
from decimal import Decimal

from sdeinfer import criteria as of
from sdeinfer._files import InputError

NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"

STATISTICS: dict[str, Callable[..., of.AbstractStatistic]] = {
    "mean correlation": of.MeanCorrelation,
    "largest correlation": of.LargestCorrelation,
    "effective rank": of.EffectiveRank,
    "log norm of token K": lambda token: of.LogNorm(int(token)),
    "norm factor": of.NormFactor,
    "margin in [A, B]": lambda lowest, highest: of.RangeMargin(float(lowest), float(highest)),
    "log gradient norm": of.LogGradientNorm,
    "gradient factor": of.GradientFactor,
}
"""Statistics by name: K is the number of a token, A and B are the ends of a range."""

FORMS = "E[…], sd[…], q95(…), P(… < 2) or P(… > 2)"


def parse_constraint(text: str) -> of.Constraint:
    """The constraint that a text states, such as `P(norm factor < 2) >= 0.95` or `q95(largest correlation) <= 0.9`.

    Raises:
        InputError: for a text that cannot be parsed.
    """
    match = re.fullmatch(rf"(.+?) ?(<=|>=|≤|≥) ?{NUMBER}", _spaced(text))
    if match is None:
        raise InputError(
            f"constraint: {text!r} is not understood; {FORMS} is needed, then <= or >= and a number; {_listed()}"
        )
    words, sense, bound = match.groups()
    criterion = _criterion(words)
    return criterion <= float(bound) if sense in ("<=", "≤") else criterion >= float(bound)


def parse_criterion(text: str) -> of.AbstractCriterion | str:
    """The criterion that a text names, such as `E[effective rank]`; a single word is the name of a parameter.

    Raises:
        InputError: for a text that cannot be parsed.
    """
    return text.strip() if text.strip().isidentifier() else _criterion(_spaced(text))


def _criterion(text: str) -> of.AbstractCriterion:
    if match := re.fullmatch(r"(E|sd)\[(.+)\]", text):
        return (of.expectation if match[1] == "E" else of.spread)(_statistic(match[2]))
    if match := re.fullmatch(rf"q{NUMBER}\((.+)\)", text):
        # Rounded once: 99.9/100 in floating point is not 0.999.
        return of.quantile(_statistic(match[2]), float(Decimal(match[1]) / 100))
    if match := re.fullmatch(rf"P\((.+?) ?([<>]) ?{NUMBER} ?\)", text):
        value = {"below" if match[2] == "<" else "above": float(match[3])}
        return of.probability(_statistic(match[1]), **value)
    raise InputError(f"criterion: {text!r} is not understood; {FORMS} is needed; {_listed()}")


def _statistic(text: str) -> of.AbstractStatistic:
    for name, make in STATISTICS.items():
        form = re.escape(name).replace("K", r"(\d+)").replace("A", NUMBER).replace("B", NUMBER)
        if match := re.fullmatch(form, text.strip()):
            return make(*match.groups())
    raise InputError(f"statistic: {text!r} is not understood; {_listed()}")


def _spaced(text: str) -> str:
    return " ".join(text.split())


def _listed() -> str:
    return f"statistics are {', '.join(STATISTICS)}"
