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


def torch_called(torch: Any, model: Any, inputs: Any) -> Any:
    """The output of a module of PyTorch, of arrays of NumPy and numbers as tensors where its weights are.

    A compiled module runs as it is without: its graph would have the hooks in it.
    """

    def tensor(value: Any) -> Any:
        if isinstance(value, torch.Tensor) or not (isinstance(value, np.ndarray) or _numbers(value)):
            return value
        weights = next((each for each in model.parameters() if each.is_floating_point()), torch.zeros(()))
        found = torch.as_tensor(value, device=weights.device)
        return found.to(weights.dtype) if found.is_floating_point() else found

    given = isinstance(inputs, Mapping)
    with torch.compiler.set_stance("force_eager"):
        return called(model, {name: tensor(each) for name, each in inputs.items()} if given else tensor(inputs))


def _numbers(value: Any) -> bool:
    """Whether a value is a list of numbers, or of such lists."""
    return isinstance(value, list) and all(_numbers(each) or type(each) in (int, float) for each in value)
