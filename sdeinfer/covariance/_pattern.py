"""Attention patterns: which tokens each token attends to, and the matrices that follow from it.

Row α of attention averages over the set S_α of the m_α tokens to which α attends, and centres by
H_α = diag(1_{S_α}) − 1_{S_α}1_{S_α}ᵀ/m_α. Every H_α is a sum of projections that do not depend on α,

    H_α = Σ_{ν ∈ N_α} r_ν r_νᵀ,    r_ν = √(j/(j + 1)) (1_token − mean of the j tokens before it in its set),

because each further token of a set adds its difference from the mean of the previous ones, and a set that contains
another adds to the differences of that one. Sums over α of products with H_α thereby become products of matrices. Let k
be the number of differences r_ν: k = m − 1 without a mask and with a causal one, and m − P for P prompts, so that
everything is O(m³); k can reach the sum of the sizes of all different sets, and the cost is O(k² m) then.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int
from numpy.typing import ArrayLike

from sdeinfer._arguments import NEEDED, shown
from sdeinfer._files import InputError

PATTERN_ATTRIBUTES = ("causal", "prompts", "mask")
"""Attributes of a Dataset that say its pattern."""


@dataclasses.dataclass(frozen=True)
class Pattern:
    """Which tokens each token attends to; hashable, compared by value.

    Without arguments every token attends to all tokens. Several prompts that pass through one network share its
    weights: their tokens form one V, and each token attends to tokens of its own prompt only.

    Attributes:
        causal: whether a token attends only to itself and earlier tokens (of its prompt).
        prompts: numbers of tokens of the prompts, in the order of the tokens; empty for one prompt, of any length.
        rows: the rows of any other pattern, see `of_mask`; empty if the other attributes define the pattern.
    """

    causal: bool = False
    prompts: tuple[int, ...] = ()
    rows: tuple[tuple[bool, ...], ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "causal", bool(self.causal))
        try:
            prompts = tuple(map(int, self.prompts))
        except (TypeError, ValueError) as error:
            raise InputError(
                f"prompts: their numbers of tokens, as (3, 5), are needed, got {self.prompts!r}"
            ) from error
        object.__setattr__(self, "prompts", prompts if len(prompts) > 1 else ())
        if self.rows and (self.causal or self.prompts):
            raise InputError("pattern: either rows of a mask, or causal and prompts")
        if any(length < 1 for length in self.prompts):
            raise InputError(f"prompts: each needs at least one token, got {', '.join(map(str, self.prompts))}")

    @classmethod
    def of_mask(cls, mask: ArrayLike) -> "Pattern":
        """The pattern of a boolean matrix of shape (m, m), true where the row's token attends to the column's token.

        Raises:
            InputError: for another shape, and for a token that attends to nothing.
        """
        M = np.asarray(mask)
        if M.ndim != 2 or M.shape[0] != M.shape[1] or M.shape[0] == 0 or not np.isin(M, (0, 1)).all():
            raise InputError(f"pattern: a boolean matrix (tokens, tokens) is needed, got shape {M.shape} of {M.dtype}")
        if not M.any(axis=1).all():
            raise InputError(f"pattern: token {int(np.argmin(M.any(axis=1)))} attends to no token")
        if M.all():
            return EVERY_TOKEN
        return cls(rows=tuple(tuple(map(bool, row)) for row in M))

    @property
    def everything(self) -> bool:
        """Whether every token attends to all tokens."""
        return not (self.causal or self.rows or self.prompts)

    def mask(self, tokens: int) -> Bool[np.ndarray, "m m"]:
        """M_αν, true where token α attends to token ν.

        Raises:
            InputError: if the pattern is one of another number of tokens.
        """
        if self.rows:
            mask, words = np.array(self.rows), f"a mask of {len(self.rows)} tokens"
        else:
            lengths = self.prompts or (tokens,)
            prompt, words = _prompt_of(lengths), f"prompts of {' + '.join(map(str, lengths))} tokens"
            mask = prompt[:, None] == prompt
        if len(mask) != tokens:
            raise InputError(f"pattern: {words} for {tokens} tokens")
        return np.tril(mask) if self.causal else mask

    def restricted(self, tokens: Sequence[int], of: int) -> "Pattern":
        """The pattern of some of so many tokens, by ascending indices; an error where one attends to others."""
        if self.everything and len(tokens) == of:
            return self
        mask = self.mask(of)
        left_out = np.setdiff1d(np.arange(of), tokens)
        for token in tokens:
            if mask[token, left_out].any():
                raise InputError(
                    f"tokens: token {token} attends to token {left_out[np.argmax(mask[token, left_out])]}, which is "
                    "left out; with attention, take whole prompts, or the first tokens of each with a causal mask"
                )
        if self.rows:
            return Pattern.of_mask(mask[np.ix_(tokens, tokens)])
        prompt = _prompt_of(self.prompts or (of,))[list(tokens)]
        _, lengths = np.unique(prompt, return_counts=True)
        return Pattern(causal=self.causal, prompts=tuple(lengths.tolist()))

    def __str__(self) -> str:
        """The pattern in words."""
        if self.rows:
            return "a mask of its own"
        if not self.prompts:
            return "a causal mask" if self.causal else "no mask"
        different = self.prompts[:1] if len(set(self.prompts)) == 1 else self.prompts
        prompts = f"{len(self.prompts)} prompts of {', '.join(map(str, different))} tokens"
        return prompts + (", a causal mask" if self.causal else "")

    def attributes(self) -> dict[str, Any]:
        """The pattern as attributes of a Dataset; empty if every token attends to all tokens."""
        if self.rows:
            return {"mask": ";".join("".join(str(int(seen)) for seen in row) for row in self.rows)}
        prompts = {"prompts": ",".join(map(str, self.prompts))} if self.prompts else {}
        return ({"causal": 1.0} if self.causal else {}) | prompts

    @classmethod
    def in_attributes(cls, attributes: Mapping[Any, Any]) -> "Pattern":
        """The pattern in the attributes of a Dataset, the inverse of `attributes`."""
        try:
            if "mask" in attributes:
                return cls.of_mask([[int(seen) for seen in row] for row in str(attributes["mask"]).split(";")])
            prompts = str(attributes.get("prompts", ""))
            lengths = tuple(map(int, filter(None, prompts.split(","))))
            return cls(causal=bool(float(attributes.get("causal", 0))), prompts=lengths)
        except InputError:
            raise
        except (TypeError, ValueError) as error:
            raise InputError(f"causal, prompts, mask: numbers are needed ({error})") from error


def require_pattern(pattern: Any) -> None:
    """An InputError for anything but a `Pattern`, such as a name or a matrix."""
    if not isinstance(pattern, Pattern):
        raise InputError(f"pattern: {NEEDED['Pattern']} is needed, got {shown(pattern)}")


def _prompt_of(lengths: Sequence[int]) -> Int[np.ndarray, " m"]:
    """The number of each token's prompt."""
    return np.repeat(np.arange(len(lengths)), lengths)


EVERY_TOKEN = Pattern()
"""Every token attends to all tokens."""

CAUSAL = Pattern(causal=True)
"""Every token attends to itself and earlier tokens."""


class Centring(NamedTuple):
    """The matrices of a pattern of m tokens, with k differences.

    Attributes:
        mean: row α averages over S_α; shape (m, m).
        differences: the rows r_ν; shape (k, m).
        selected: 1/m_α for ν in N_α, otherwise 0, so that H_α/m_α = Σ_ν selected_αν r_ν r_νᵀ; shape (m, k).
        size: m_α; shape (m,).
    """

    mean: Float[np.ndarray, "m m"]
    differences: Float[np.ndarray, "k m"]
    selected: Float[np.ndarray, "m k"]
    size: Float[np.ndarray, " m"]


@functools.lru_cache(maxsize=64)
def centring(pattern: Pattern, tokens: int) -> Centring:
    """The matrices of a pattern."""
    mask = pattern.mask(tokens)
    rows: list[np.ndarray] = []
    numbers: dict[frozenset[int], list[int]] = {}
    sets = {frozenset(np.flatnonzero(row).tolist()) for row in mask}
    for attended in sorted(sets, key=lambda members: (len(members), sorted(members))):
        inside = max((subset for subset in numbers if subset < attended), key=len, default=frozenset())
        seen, row_numbers = sorted(inside), list(numbers.get(inside, ()))
        for token in sorted(attended - inside):
            if seen:
                row_numbers.append(len(rows))
                rows.append(_difference(token, seen, tokens))
            seen.append(token)
        numbers[attended] = row_numbers
    if not rows:  # no token attends to another
        rows.append(np.zeros(tokens))
    size = mask.sum(axis=1).astype(float)
    selected = np.zeros((tokens, len(rows)))
    for token, row in enumerate(mask):
        selected[token, numbers[frozenset(np.flatnonzero(row).tolist())]] = 1 / size[token]
    return Centring(mask / size[:, None], np.stack(rows), selected, size)


def _difference(token: int, before: Sequence[int], tokens: int) -> np.ndarray:
    r = np.zeros(tokens)
    r[token], r[list(before)] = 1.0, -1 / len(before)
    return r * np.sqrt(len(before) / (len(before) + 1))
