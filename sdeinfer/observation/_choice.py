"""The tokens of prompts that are observed, or taken from what was observed, and the pattern that is theirs."""

import dataclasses
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Int

from sdeinfer._arguments import at_least_one, checked, given, shown
from sdeinfer._files import InputError, first_line
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._pattern import PATTERN_ATTRIBUTES
from sdeinfer.observation._dataset import INCOMPLETE, TOKENS


def choose(
    count: int, each: int, *, tokens: Any = None, prompts: Any = None, pattern: Pattern
) -> tuple[Int[np.ndarray, " m"], dict[str, Any]]:
    """The observed ones among the tokens of all prompts, in their order, and the pattern as attributes of a Dataset."""
    chosen = _indices(prompts, count, "prompts")
    observed = (chosen[:, None] * each + _indices(tokens, each, "tokens")).reshape(-1)
    if count > 1:
        if pattern.rows:
            raise InputError("pattern: prompts are masked by si.CAUSAL or not at all; flatten them for a mask")
        pattern = dataclasses.replace(pattern, prompts=(each,) * count)
    pattern.mask(count * each)
    return observed, _attributes_of(pattern, observed.tolist(), count * each)


@checked
def take(data: xr.Dataset, *, prompts: list[int] | None = None, tokens: int | None = None) -> xr.Dataset:
    """Take some prompts of observed networks, and the first tokens of each.

    Prompts of one network have a law of their own, whatever other prompts pass through it; so have, with a causal mask,
    the first tokens of a prompt. Fewer tokens cost less: m tokens have m(m + 1)/2 covariances.

    Arguments:
        data: observed covariances.
        prompts: numbers of the prompts, in the order of the tokens; None for all.
        tokens: number of the tokens of each prompt to take; None for all.

    Returns:
        The Dataset of these tokens. If tokens are left out to which others attend, the attribute `incomplete` is set,
        and a fit of attention is refused.

    Raises:
        InputError: for prompts that the data do not have, and for less than one token.
    """
    pattern, of = Pattern.in_attributes(data.attrs), data.sizes["token_a"]
    lengths = pattern.prompts or (of,)
    chosen = range(len(lengths)) if prompts is None else sorted(set(prompts))
    if not chosen or chosen[0] < 0 or chosen[-1] >= len(lengths):
        raise InputError(f"prompts: some of 0 to {len(lengths) - 1} are needed, got {list(chosen)}")
    at_least_one(**given(tokens=tokens))
    starts = np.cumsum((0, *lengths))
    kept = [int(token) for prompt in chosen for token in np.arange(starts[prompt], starts[prompt + 1])[:tokens]]
    attributes = {name: value for name, value in data.attrs.items() if name not in PATTERN_ATTRIBUTES}
    part = data.isel(token_a=kept, token_b=kept)
    part.attrs = attributes | _attributes_of(pattern, kept, of) | {TOKENS: len(kept)}
    return part


def _attributes_of(pattern: Pattern, kept: list[int], tokens: int) -> dict[str, Any]:
    """The pattern of some of so many tokens as attributes; `incomplete` if they attend to others."""
    try:
        return pattern.restricted(kept, tokens).attributes()
    except InputError:
        return {INCOMPLETE: 1.0}


def _indices(chosen: Any, count: int, name: str) -> Int[np.ndarray, " chosen"]:
    """The chosen ones of so many; None chooses all."""
    index = slice(None) if chosen is None else chosen
    if not isinstance(index, slice):
        index = np.asarray(index)
        index = index if index.size else index.astype(int)  # an empty list has no type of its own
        if index.dtype.kind not in "iub":
            raise InputError(f"{name}: indices, a mask or a slice are needed, got {shown(chosen)}")
    try:
        indices = np.atleast_1d(np.arange(count)[index])
    except IndexError as error:
        raise InputError(f"{name}: cannot choose among {count} {name} by {chosen!r} ({first_line(error)})") from error
    if indices.ndim != 1 or len(indices) == 0 or len(np.unique(indices)) < len(indices):
        raise InputError(f"{name}: at least one of the {name}, and each only once, is needed, got {indices.tolist()}")
    return indices
