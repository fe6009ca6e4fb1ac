"""`si.audit`, with what belongs to it: an assertion, and audits of a network in training.

Tests: `tests/auditing/test_torch_audit.py`.
"""

from typing import Any

from sdeinfer._files import InputError
from sdeinfer.auditing import _recipes
from sdeinfer.auditing._audit import audit as _audit
from sdeinfer.auditing._initialise import initialise
from sdeinfer.auditing._result import Audit
from sdeinfer.auditing._scaling import scaling
from sdeinfer.auditing._tests import critical, first_names
from sdeinfer.auditing._topics import FAILS


def assert_initialised(model: Any, inputs: Any = None, *, recipe: Any = "auto", **settings: Any) -> None:
    """Raise an AssertionError with the verdict and the tensors that failed unless a model passes; see `audit`.

    A declaration that was not tested fails, unless `allow` names it.
    """
    result = _audit(model, inputs, recipe=recipe, **settings)
    if result.passed:
        return
    table = [
        f"  {row['name']}  {row['role']}  σ {row['sd']:.4g}  declared {row['declared']}  {row['failed']}"
        for row in result.table()
        if row["failed"]
    ]
    raise AssertionError("\n".join([result.verdict, *table[:40], *result.untested]))


class Monitor:
    """Audits of a network in training: `monitor(step)` runs one at every k-th step, on a few tokens.

    A call costs up to four forward passes of a short prompt, in evaluation mode and without gradients.

    Arguments:
        model: the module in training.
        inputs: a short prompt, see `audit`; the same at all steps.
        every: k.
        settings: other arguments of `audit`.

    Attributes:
        audits: the audit of each step.
        refused: the steps at which the model could not be audited, with the reason, so that training goes on; a first
            audit raises.

    Example:
        ```python
        monitor = si.audit.Monitor(model, prompt, recipe="gpt2", every=100)
        for step, batch in enumerate(batches):
            monitor(step)
            train(model, batch)
        print(monitor)
        ```
    """

    def __init__(self, model: Any, inputs: Any = None, *, every: int = 100, **settings: Any):
        if not isinstance(every, int) or every < 1:
            raise InputError(f"every: a whole number of at least 1 is needed, got {every!r}")
        self.model, self.inputs, self.every, self.settings = model, inputs, every, settings
        self.audits: dict[int, Audit] = {}
        self.refused: dict[int, str] = {}

    def __call__(self, step: int) -> Audit | None:
        """Audit the network if `step` is a multiple of k."""
        if step % self.every:
            return None
        try:
            self.audits[step] = _audit(self.model, self.inputs, **self.settings)
        except InputError as error:
            if not self.audits:
                raise
            self.refused[step] = str(error)
        return self.audits.get(step)

    def to_frame(self) -> Any:
        """σ of each tensor (rows) at each step (columns), over that of the first step."""
        import pandas as pd

        sds = {step: {row.matrix.name: row.law.sd for row in result.rows} for step, result in self.audits.items()}
        frame = pd.DataFrame(sds).rename_axis(columns="step")
        return frame.div(frame.iloc[:, 0], axis=0) if len(frame.columns) else frame

    @property
    def left(self) -> dict[str, int]:
        """The tensors that are no longer those of their initialisation, with the first step; the earliest first.

        One has left if its σ, or the law of its entries, differs from that of the first step beyond its error.
        """
        if not self.audits:
            return {}
        steps = list(self.audits)
        first = {row.matrix.name: row.law for row in self.audits[steps[0]].rows}
        z = critical(len(first))
        departures: dict[str, int] = {}
        for step in steps[1:]:
            for row in self.audits[step].rows:
                law, before = row.law, first[row.matrix.name]
                # Its entries are the same random numbers at all steps: any change is one of training.
                least = z * 1e-2 * before.error * max(before.sd, 1e-12)
                if abs(law.sd - before.sd) > least or abs(law.mean - before.mean) > 1e-7:
                    departures.setdefault(row.matrix.name, step)
        return dict(sorted(departures.items(), key=lambda item: item[1]))

    @property
    def verdict(self) -> str:
        """From which step on the network is not that of its initialisation, and where first, in one sentence."""
        if not self.audits:
            return "no step was audited"
        failed = next((step for step, result in self.audits.items() if result.passed is False), None)
        refused = min(self.refused, default=None)
        if refused is not None and (failed is None or refused < failed):
            return f"not at initialisation from step {refused} on: {self.refused[refused]}"
        if failed is not None:
            return f"not at initialisation from step {failed} on: {self.audits[failed].verdict}"
        first = min(self.left.values(), default=None)
        if first is None:
            return f"at initialisation up to step {max(self.audits)}"
        names = [name for name, step in self.left.items() if step == first]
        return f"not at initialisation from step {first} on, in {first_names(names)}"

    def __repr__(self) -> str:
        """The verdict."""
        return self.verdict


class Auditing:
    __doc__ = _audit.__doc__
    recipes = _recipes
    FAILS = FAILS
    assert_initialised = staticmethod(assert_initialised)
    initialise = staticmethod(initialise)
    scaling = staticmethod(scaling)
    Monitor = Monitor
    __call__ = staticmethod(_audit)


audit = Auditing()
