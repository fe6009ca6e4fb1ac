"""Result of a check: single verdicts and the overall verdict. Tests: `tests/diagnostics/test_check.py`."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import pandas as pd

from sdeinfer._html import render
from sdeinfer.diagnostics._thresholds import FRACTION_IN_RANGE

IN_RANGE = "transitions in range"

Topic = Literal["converged", "identified", "calibrated", "architecture", "agrees with the theory", "true"]

State = Literal["pass", "unsure", "fail"]

QUESTIONS: dict[Topic, str] = {
    "converged": "Did the sampler converge?",
    "identified": "Do the data identify the parameters?",
    "calibrated": "Do the layers follow the fitted law?",
    "architecture": "Is this architecture among the best compared?",
    "agrees with the theory": "Do the networks agree with the theory?",
    "true": "Is the truth recovered?",
}


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

    @property
    def state(self) -> State:
        """Whether it passed; "unsure" for a parameter that the data do not identify, which is no defect of the fit."""
        return "pass" if self.passed else "unsure" if self.topic == "identified" else "fail"


def at_most(topic: Topic, name: str, value: Any, threshold: float, advice: str) -> Verdict:
    """A verdict that passes if the value is at most the threshold; NaN fails."""
    value = float(value)
    return Verdict(topic, name, value, threshold, value <= threshold, advice)


def at_least(topic: Topic, name: str, value: Any, threshold: float, advice: str) -> Verdict:
    """A verdict that passes if the value is at least the threshold; NaN fails."""
    value = float(value)
    return Verdict(topic, name, value, threshold, value >= threshold, advice)


def if_significant(value: Any, p: Any, level: float, *, null: float = 0.0) -> float:
    """A statistic that is significant at a level; else the value that it has under the law."""
    return float(value) if p < level else null


@dataclasses.dataclass(frozen=True)
class Check:
    """Every verdict on a fit, or those of one test.

    A parameter that the data do not identify is no defect of the fit: `passed` leaves the topic "identified" out, and
    `unidentified` names these parameters.

    Attributes:
        verdicts: all verdicts, causes before consequences: a law that does not hold affects sampler and posterior, and
            these affect predictions.
        skipped: the tests that could not be made, with reasons.
        identified: the identified parameters with their relative precision, such as "gamma ± 1 %".
        unidentified: parameters that the data do not identify.
        notes: misfits that were seen and do not matter, and alternatives that the data do not exclude.
        assumed: what the parameters depend on and the data do not confirm, such as "1 head", each with what the best
            alternative would give, such as "4 heads: tau0 0.86 in place of 1.08".
        conditional: in the place of `identified`, the parameters that depend on the prior of one that the data do not
            identify.
    """

    verdicts: tuple[Verdict, ...] = ()
    skipped: tuple[str, ...] = ()
    identified: tuple[str, ...] = ()
    unidentified: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    assumed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    conditional: str = ""

    @property
    def passed(self) -> bool:
        """Whether no test failed: the state is "good" or "conditional"."""
        return self.cause is None

    @property
    def state(self) -> Literal["good", "conditional", "do not trust"]:
        """Whether the posterior holds; "conditional" if it does for sizes, or by a prior, that the data do not tell."""
        if not self.passed:
            return "do not trust"
        return "conditional" if self.conditional or self.assumed else "good"

    @property
    def cause(self) -> Verdict | None:
        """The first failed verdict, to be resolved before the others."""
        return next(iter(self._failed()), None)

    @property
    def verdict(self) -> str:
        """The overall verdict in one sentence."""
        if self.cause is not None:
            others = ", ".join(verdict.name for verdict in self._failed()[1:])
            return f"{self.state} yet: {self.cause.name}: {self.cause.advice}" + (
                f" (also: {others})" if others else ""
            )
        claim = self.conditional or ", ".join(self.identified)
        if self.assumed:
            assumed = [
                words + (f" ({alternative})" if alternative else "") for words, alternative in self.assumed.items()
            ]
            claim += f", if these are right, which the data do not tell: {', '.join(assumed)}"
        elif claim and self.state == "good":
            claim = f"trust {claim}"
        parts = [claim] if claim else []
        parts += [f"these data do not identify {', '.join(self.unidentified)}"] if self.unidentified else []
        share = next((verdict.value for verdict in self.verdicts if verdict.name == IN_RANGE), 1.0)
        if share < FRACTION_IN_RANGE:
            parts.append(f"only {100 * share:.2g}% of the transitions are in range and were fitted")
        return ": ".join([self.state, "; ".join(parts)]) if parts else self.state

    def by_question(self) -> list[tuple[str, State, list[Verdict]]]:
        """For each topic with verdicts: its question, the state of the answer, and the verdicts."""
        answers: list[tuple[str, State, list[Verdict]]] = []
        for topic, question in QUESTIONS.items():
            verdicts = [verdict for verdict in self.verdicts if verdict.topic == topic]
            failed: list[State] = [verdict.state for verdict in verdicts if not verdict.passed]
            if verdicts:
                answers.append((question, failed[0] if failed else "pass", verdicts))
        return answers

    def to_frame(self) -> pd.DataFrame:
        """A table with one row per verdict."""
        return pd.DataFrame([dataclasses.asdict(verdict) for verdict in self.verdicts]).set_index("name")

    def __str__(self) -> str:
        """The overall verdict, the notes, and the tests that could not be made, on one line each."""
        notes, skipped = (f"note: {note}" for note in self.notes), (f"not tested: {test}" for test in self.skipped)
        return "\n".join([self.verdict, *notes, *skipped])

    def _repr_html_(self) -> str:
        return render("check_cell.html.jinja", check=self)

    def _failed(self) -> list[Verdict]:
        return [verdict for verdict in self.verdicts if not verdict.passed and verdict.topic != "identified"]


def together(checks: Iterable[Check]) -> Check:
    """The verdicts, notes and reasons of several tests in their order."""
    verdicts, skipped, notes, assumed = [], [], [], {}
    for check in checks:
        verdicts += check.verdicts
        skipped += check.skipped
        notes += check.notes
        assumed |= check.assumed
    return Check(tuple(verdicts), skipped=tuple(skipped), notes=tuple(notes), assumed=assumed)
