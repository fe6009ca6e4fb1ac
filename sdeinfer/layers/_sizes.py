"""Sizes of a layer: settings, besides its parameters, on which its limit depends."""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx


def size(default: Any, in_words: Callable[[Any], str]) -> Any:
    """A field of a layer for a size.

    Arguments:
        default: its default.
        in_words: function from a value to words for messages, such as "4 heads".
    """
    return eqx.field(default=default, static=True, metadata={"in_words": in_words})


def sizes_of(layer: Any) -> dict[str, dataclasses.Field]:
    """The fields of a layer, or of a type of layer, that are sizes, by name."""
    return {field.name: field for field in dataclasses.fields(layer) if "in_words" in field.metadata}


def heads_in_words(heads: int) -> str:
    """A number of heads."""
    return f"{heads} head{'s' if heads > 1 else ''}"


def projection_in_words(projects: bool) -> str:  # noqa: FBT001
    """Whether there is an output projection."""
    return "an output projection" if projects else "no output projection"


def expansion_in_words(expansion: float) -> str:
    """A hidden width as a multiple of n."""
    return f"expansion {expansion:g}"
