"""What a check says: single verdicts, and all of them together."""

import dataclasses
from typing import Any, Literal

import pandas as pd

Topic = Literal["converged", "identified", "calibrated", "agrees with the theory", "true"]


@dataclasses.dataclass(frozen=True)
class Verdict:
    """One question put to a fit.

    Attributes:
        topic: what it belongs to.
        name: what was looked at.
        value: the number found.
        threshold: what it was compared with.
        passed: whether it stands on the right side.
        advice: what to do where it does not.
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
        verdicts: what may upset others comes before them: a law that does not hold upsets samplers and posteriors, and
            these upset predictions.
        skipped: the tests that could not be made, each with the reason.
    """

    verdicts: tuple[Verdict, ...]
    skipped: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every verdict is good."""
        return all(verdict.passed for verdict in self.verdicts)

    @property
    def cause(self) -> Verdict | None:
        """The first verdict that is bad: what to mend before looking at others."""
        return next((verdict for verdict in self.verdicts if not verdict.passed), None)

    @property
    def verdict(self) -> str:
        """The overall verdict in a line."""
        if self.cause is None:
            return "good"
        others = [verdict.name for verdict in self.verdicts if not verdict.passed and verdict is not self.cause]
        also = f" (also: {', '.join(others)})" if others else ""
        return f"do not trust yet: {self.cause.name}: {self.cause.advice}{also}"

    def failed(self, topic: Topic) -> bool:
        """Whether a verdict of this topic is bad."""
        return any(verdict.topic == topic and not verdict.passed for verdict in self.verdicts)

    def to_frame(self) -> pd.DataFrame:
        """One row a verdict."""
        return pd.DataFrame([dataclasses.asdict(verdict) for verdict in self.verdicts]).set_index("name")


def at_most(topic: Topic, name: str, value: Any, threshold: float, advice: str, *, strict: bool = False) -> Verdict:
    """A verdict on a number that should not be above its threshold; NaN is."""
    value = float(value)
    return Verdict(topic, name, value, threshold, value < threshold if strict else value <= threshold, advice)


def at_least(topic: Topic, name: str, value: Any, threshold: float, advice: str) -> Verdict:
    """A verdict on a number that should not be below its threshold; NaN is."""
    value = float(value)
    return Verdict(topic, name, value, threshold, value >= threshold, advice)
