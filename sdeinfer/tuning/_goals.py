"""Goals in words, as on the command line: constraints and objectives that say what `str` of a criterion says."""

import re
from collections.abc import Callable
from decimal import Decimal

from sdeinfer._files import InputError
from sdeinfer.criteria import (
    AbstractCriterion,
    AbstractStatistic,
    Constraint,
    EffectiveRank,
    Expectation,
    GradientFactor,
    LargestCorrelation,
    LogGradientNorm,
    LogNorm,
    MeanCorrelation,
    NormFactor,
    Probability,
    Quantile,
    RangeMargin,
    Spread,
)

NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"

STATISTICS: dict[str, Callable[..., AbstractStatistic]] = {
    "mean correlation": MeanCorrelation,
    "largest correlation": LargestCorrelation,
    "effective rank": EffectiveRank,
    "log norm of token K": lambda token: LogNorm(int(token)),
    "norm factor": NormFactor,
    "margin in [A, B]": lambda lowest, highest: RangeMargin(float(lowest), float(highest)),
    "log gradient norm": LogGradientNorm,
    "log gradient norm of token K": lambda token: LogGradientNorm(int(token)),
    "gradient factor": GradientFactor,
    "gradient factor of token K": lambda token: GradientFactor(int(token)),
}
"""Statistics by name: K is the number of a token, A and B are the ends of a range."""

CRITERIA: dict[str, Callable[..., AbstractCriterion]] = {
    r"E\[(.+)\]": lambda name: Expectation(_statistic(name)),
    r"sd\[(.+)\]": lambda name: Spread(_statistic(name)),
    rf"q{NUMBER}\((.+)\)": lambda percent, name: Quantile(_statistic(name), _share(percent)),
    rf"{NUMBER} ?% quantile of (.+)": lambda percent, name: Quantile(_statistic(name), _share(percent)),
    rf"P\((.+?) ?< ?{NUMBER} ?\)": lambda name, value: Probability(_statistic(name), below=float(value)),
    rf"P\((.+?) ?> ?{NUMBER} ?\)": lambda name, value: Probability(_statistic(name), above=float(value)),
}
"""Criteria by the form of their text."""

FORMS = "E[…], sd[…], q95(…), 95% quantile of …, P(… < 2) or P(… > 2)"


def parse_constraint(text: str) -> Constraint:
    """The constraint that a text says, such as `P(norm factor < 2) >= 0.95` or `q95(largest correlation) <= 0.9`.

    It reads what `str` of a constraint prints, of the package's own statistics.

    Raises:
        InputError: for a text that is not understood.
    """
    found = re.fullmatch(rf"(.+?) ?(<=|>=|≤|≥|<|>) ?{NUMBER}", _spaced(text))
    if found is None:
        raise InputError(
            f"constraint: {text!r} is not understood; {FORMS} is needed, then <= or >= and a number; {_listed()}"
        )
    criterion, sense, bound = found.groups()
    read = _criterion(criterion)
    return read <= float(bound) if sense in ("<=", "≤", "<") else read >= float(bound)


def parse_criterion(text: str) -> AbstractCriterion | str:
    """The criterion that a text says, such as `E[effective rank]`; a single word is the name of a parameter.

    Raises:
        InputError: for a text that is not understood.
    """
    return text.strip() if text.strip().isidentifier() else _criterion(_spaced(text))


def _criterion(text: str) -> AbstractCriterion:
    for form, make in CRITERIA.items():
        found = re.fullmatch(form, text)
        if found is not None:
            return make(*found.groups())
    raise InputError(f"criterion: {text!r} is not understood; {FORMS} is needed; {_listed()}")


def _statistic(text: str) -> AbstractStatistic:
    for name, make in STATISTICS.items():
        form = re.escape(name).replace("K", r"(\d+)").replace("A", NUMBER).replace("B", NUMBER)
        found = re.fullmatch(form, text.strip())
        if found is not None:
            return make(*found.groups())
    raise InputError(f"statistic: {text!r} is not understood; {_listed()}")


def _share(percent: str) -> float:
    """A percentage as a share, rounded once: 99.9/100 in floating point is not 0.999."""
    return float(Decimal(percent) / 100)


def _spaced(text: str) -> str:
    return " ".join(text.split())


def _listed() -> str:
    return f"statistics are {', '.join(STATISTICS)}"
