"""When does a network leave its initial law?"""

from typing import Any

import pandas as pd

from sdeinfer._arguments import at_least_one
from sdeinfer._files import InputError
from sdeinfer.auditing._audit import audit
from sdeinfer.auditing._result import Audit

LEVEL = 1e-4
"""False-alarm probability of all branches at one step."""


class Monitor:
    """Audits of a network in training: `monitor(step)` runs one at every k-th step, on a few tokens.

    A call costs one forward pass of the few tokens, in evaluation mode and without gradients, and the audit of its
    increments, which takes some tenths of a second once it is compiled. The model's state does not change.

    Arguments:
        model: the module in training.
        inputs: a short prompt, see `audit`; the same at all steps.
        every: k.
        settings: other arguments of `audit`.

    Attributes:
        audits: the audit of each step.
        refused: the steps whose increments have no density, as of collapsed tokens, with the reason. Nothing is raised,
            so that training goes on; a first audit raises.

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
        at_least_one(every=every)
        self.model, self.inputs, self.every, self.settings = model, inputs, every, settings
        self.audits: dict[int, Audit] = {}
        self.refused: dict[int, str] = {}

    def __call__(self, step: int) -> Audit | None:
        """Audit the network if `step` is a multiple of k."""
        if step % self.every:
            return None
        try:
            self.audits[step] = audit(self.model, self.inputs, **self.settings)
        except InputError as error:
            if not self.audits:
                raise
            self.refused[step] = str(error)
        return self.audits.get(step)

    def to_frame(self) -> pd.DataFrame:
        """The p-value of each branch (rows) at each step (columns), see `Audit.branches`."""
        return pd.DataFrame({step: each.branches["p"] for step, each in self.audits.items()}).rename_axis(
            columns="step"
        )

    @property
    def left(self) -> dict[str, int]:
        """The branches that have left the law, with the first step at which each had; the earliest first."""
        frame = self.to_frame()
        beyond = frame < LEVEL / max(len(frame), 1)
        steps = {
            str(branch): list(self.audits)[int(row.argmax())]
            for branch, row in zip(beyond.index, beyond.to_numpy(), strict=True)
            if row.any()
        }
        return dict(sorted(steps.items(), key=lambda item: item[1]))

    @property
    def verdict(self) -> str:
        """From which step on the network is not that of its initialisation, and where first, in one sentence."""
        if not self.audits:
            return "no step was audited"
        first, refused = (min(steps, default=None) for steps in (self.left.values(), self.refused))
        if refused is not None and (first is None or refused < first):
            return f"not at initialisation from step {refused} on: {self.refused[refused]}"
        if first is None:
            return f"at initialisation up to step {max(self.audits)}"
        names = [name for name, step in self.left.items() if step == first]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return f"not at initialisation from step {first} on, in {', '.join(names[:3])}{more}"

    def __repr__(self) -> str:
        """The verdict."""
        return self.verdict
