"""Networks of a user's, drawn and run one after another."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from tqdm import tqdm

from sdeinfer._arguments import at_least_one


def one_by_one[Part](observed: Callable[[int], Part], networks: int, *, progress: bool) -> list[Part]:
    """Observe each network, by its number, with one network in memory at a time.

    Raises:
        InputError: for fewer than one network.
    """
    at_least_one(networks=networks)
    return [observed(number) for number in tqdm(range(networks), desc="networks", disable=not progress)]


def torch_network(torch: Any, make: Callable[[int], Any], seed: int, number: int) -> Any:
    """Draw a network of PyTorch by a seed of its own; the state of PyTorch's generators is restored."""
    own = int(np.random.SeedSequence(seed).generate_state(number + 1)[number])
    with torch.random.fork_rng():
        torch.manual_seed(own)
        return make(own)


def called(model: Callable[..., Any], inputs: Any) -> Any:
    """The output for one positional argument, or for a mapping of keyword arguments."""
    return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
