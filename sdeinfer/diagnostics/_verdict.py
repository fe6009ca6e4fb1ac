"""Result of a check: single verdicts and the overall verdict."""

import dataclasses
from typing import Any, Literal

import pandas as pd

Topic = Literal["converged", "identified", "calibrated", "agrees with the theory", "true"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The outcome of one test of a fit.

    Attributes:
        topic: topic of the test.
        name: name of the tested quantity.
        value: value of the quantity.
        threshold: threshold for the value.
        passed: whether the value is on the right side of the threshold.
        advice: diagnosis and remedy for a failed test.
    """

    topic: Topic
    name: str
    value: float
    threshold: float
    passed: bool
    advice: str


@dataclasses.dataclass(frozen=True)
class Check:
    """Every verdict on a fit.

    Attributes:
        verdicts: all verdicts, causes before consequences: a law that does not hold affects sampler and posterior, and
            these affect predictions.
        skipped: the tests that could not be made, with reasons.
    """

    verdicts: tuple[Verdict, ...]
    skipped: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether all tests passed."""
        return all(verdict.passed for verdict in self.verdicts)

    @property
    def cause(self) -> Verdict | None:
        """The first failed verdict, to be resolved before the others."""
        return next((verdict for verdict in self.verdicts if not verdict.passed), None)

    @property
    def verdict(self) -> str:
        """The overall verdict in one line."""
        if self.cause is None:
            return "good"
        others = [verdict.name for verdict in self.verdicts if not verdict.passed and verdict is not self.cause]
        also = f" (also: {', '.join(others)})" if others else ""
        return f"do not trust yet: {self.cause.name}: {self.cause.advice}{also}"

    def failed(self, topic: Topic) -> bool:
        """Whether a test of this topic failed."""
        return any(verdict.topic == topic and not verdict.passed for verdict in self.verdicts)

    def to_frame(self) -> pd.DataFrame:
        """A table with one row per verdict."""
        return pd.DataFrame([dataclasses.asdict(verdict) for verdict in self.verdicts]).set_index("name")


def at_most(topic: Topic, name: str, value: Any, threshold: float, advice: str, *, strict: bool = False) -> Verdict:
    """A verdict that passes if the value is at most the threshold (`strict`: below it); NaN fails."""
    value = float(value)
    return Verdict(topic, name, value, threshold, value < threshold if strict else value <= threshold, advice)


def at_least(topic: Topic, name: str, value: Any, threshold: float, advice: str) -> Verdict:
    """A verdict that passes if the value is at least the threshold; NaN fails."""
    value = float(value)
    return Verdict(topic, name, value, threshold, value >= threshold, advice)
