"""Bugs in initialisations from public threads: what has them, what an audit should say, and the verdicts on them."""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch_models import torch

import sdeinfer as si
from sdeinfer.auditing import Recipe

GITHUB = "https://github.com/"


@dataclasses.dataclass(frozen=True)
class Bug:
    """A bug: `make` draws the network of a seed, fixed or not; `says` names the bug, and the verdict has the `cause`.

    The thread where it was reported is below `GITHUB`; `arguments` are others of `audit`.
    """

    model: str
    thread: str
    recipe: Recipe
    cause: str
    make: Callable[[bool, int], Any]
    arguments: dict[str, Any]

    @property
    def says(self) -> str:
        return str(self.make.__doc__)

    def verdicts(self, seeds: range, *, fixed: bool) -> list[str]:
        """The verdicts of audits, or the messages of refusals."""
        return [self._verdict(seed, fixed=fixed) for seed in seeds]

    def _verdict(self, seed: int, *, fixed: bool) -> str:
        torch.manual_seed(seed)
        try:
            return si.audit(self.make(fixed, seed), recipe=self.recipe, **self.arguments).verdict
        except si.InputError as error:
            return f"failed: {error}"

    def row(self, before: list[str], after: list[str]) -> list[str]:
        """The row of the table, without its name."""
        found = sum(not each.startswith("passed") for each in before)
        named = sum(self.cause in each for each in before)
        alarms = sum(not each.startswith("passed") for each in after)
        thread = f"[{self.thread}]({GITHUB}{self.thread})" if self.thread else ""
        return [self.model, thread, str(found), str(named), str(alarms)]


BUGS: dict[str, Bug] = {}


def bug(model: str, thread: str, recipe: Recipe, cause: str, **arguments: Any) -> Callable[[Callable], Callable]:
    """Register the function that makes a network."""

    def registered(make: Callable[[bool, int], Any]) -> Callable:
        BUGS[make.__name__] = Bug(model, thread, recipe, cause, make, arguments)
        return make

    return registered
