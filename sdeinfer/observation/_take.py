"""Parts of observed covariances: some of the prompts, or some of the tokens."""

import numpy as np
import xarray as xr

from sdeinfer._arguments import at_least_one, checked, given
from sdeinfer._files import InputError
from sdeinfer.covariance import PATTERN_ATTRIBUTES, Pattern
from sdeinfer.observation._choice import attributes_of
from sdeinfer.observation._dataset import TOKENS


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
    part.attrs = attributes | attributes_of(pattern, kept, of) | {TOKENS: len(kept)}
    return part
