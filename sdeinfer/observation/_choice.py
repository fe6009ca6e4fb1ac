"""The tokens of prompts that are observed, and the pattern that is theirs."""

import dataclasses
from typing import Any

import numpy as np
from jaxtyping import Int

from sdeinfer._files import InputError, first_line
from sdeinfer.covariance import Pattern
from sdeinfer.observation._dataset import INCOMPLETE


def choose(
    count: int, each: int, *, tokens: Any = None, prompts: Any = None, pattern: Pattern
) -> tuple[Int[np.ndarray, " m"], dict[str, Any]]:
    """The observed ones among the tokens of all prompts, in their order, and the pattern as attributes of a Dataset.

    Arguments:
        count: number of prompts.
        each: number of tokens of each prompt.
        tokens: the tokens of each prompt to observe, as indices, a mask or a slice; None for all.
        prompts: the prompts to observe, likewise.
        pattern: which tokens each token attends to, before a choice; several prompts are added to it.

    Raises:
        InputError: for a choice or a pattern that these prompts do not have.
    """
    chosen = _indices(prompts, count, "prompts")
    observed = (chosen[:, None] * each + _indices(tokens, each, "tokens")).reshape(-1)
    if count > 1:
        if pattern.rows:
            raise InputError("pattern: prompts are masked by si.CAUSAL or not at all; flatten them for a mask")
        pattern = dataclasses.replace(pattern, prompts=(each,) * count)
    pattern.mask(count * each)
    return observed, attributes_of(pattern, observed.tolist(), count * each)


def attributes_of(pattern: Pattern, kept: list[int], tokens: int) -> dict[str, Any]:
    """The pattern of some of so many tokens as attributes; `incomplete` if they attend to others."""
    try:
        return pattern.restricted(kept, tokens).attributes()
    except InputError:
        return {INCOMPLETE: 1.0}


def _indices(chosen: Any, count: int, name: str) -> Int[np.ndarray, " chosen"]:
    """The chosen ones of so many; None chooses all."""
    try:
        indices = np.atleast_1d(np.arange(count)[... if chosen is None else chosen])
    except (IndexError, TypeError, ValueError) as error:
        raise InputError(f"{name}: cannot choose among {count} {name} by {chosen!r} ({first_line(error)})") from error
    if indices.ndim != 1 or len(indices) == 0 or len(np.unique(indices)) < len(indices):
        raise InputError(f"{name}: at least one of the {name}, and each only once, is needed, got {indices.tolist()}")
    return indices
