"""The help topics that ship with Python as numbers of characters, and tasks of classification made from them."""

from pydoc_data.topics import topics
from typing import NamedTuple

import numpy as np
from jaxtyping import Int


class Text(NamedTuple):
    """Numbers of characters, and of the topic of each."""

    characters: Int[np.ndarray, " length"]
    topics: Int[np.ndarray, " length"]


def texts() -> tuple[Text, Text, str]:
    """Python's own help topics: those to train on, every eighth to test on, and the characters."""
    names = sorted(topics)
    alphabet = "".join(sorted(set("".join(topics.values()))))
    number = {character: place for place, character in enumerate(alphabet)}

    def joined(chosen):
        characters = [number[character] for name in chosen for character in topics[name]]
        topic = np.repeat(np.arange(len(chosen)), [len(topics[name]) for name in chosen])
        return Text(np.array(characters, np.int32), topic)

    held_out = names[::8]
    return joined([name for name in names if name not in held_out]), joined(held_out), alphabet


def windows(text: Text, starts: Int[np.ndarray, " count"], length: int) -> Int[np.ndarray, "count length"]:
    """The windows of the text that begin at the given places."""
    return text.characters[starts[:, None] + np.arange(length)]


def corruption(text: Text, length: int, labels: Int[np.ndarray, " count"], rng: np.random.Generator) -> np.ndarray:
    """Windows; where the label is 0, two characters are replaced by any of the alphabet. It stands for CoLA."""
    found = windows(text, rng.integers(0, text.characters.size - length + 1, labels.size), length)
    for row in np.flatnonzero(labels == 0):
        found[row, rng.choice(length, 2, replace=False)] = rng.integers(0, text.characters.max() + 1, 2)
    return found


def paraphrase(text: Text, length: int, labels: Int[np.ndarray, " count"], rng: np.random.Generator) -> np.ndarray:
    """Two windows side by side; where the label is 1, the second repeats three quarters of the first. For MRPC."""
    half = length // 2
    first, second = (
        windows(text, starts, half) for starts in rng.integers(0, text.characters.size - half + 1, (2, labels.size))
    )
    repeated = (labels[:, None] == 1) & (rng.random(first.shape) < 0.75)
    return np.hstack([first, np.where(repeated, first, second)])


def continuation(text: Text, length: int, labels: Int[np.ndarray, " count"], rng: np.random.Generator) -> np.ndarray:
    """Two windows side by side; the second follows the first in the text where the label is 1. It stands for RTE."""
    half = length // 2
    first, other = rng.integers(0, text.characters.size - length + 1, (2, labels.size))
    return np.hstack([windows(text, first, half), windows(text, np.where(labels == 1, first + half, other), half)])


TASKS = {"corruption": corruption, "paraphrase": paraphrase, "continuation": continuation}
