"""The growth of gradients through the layers of a PyTorch model."""

from collections.abc import Callable
from typing import Any

import numpy as np

from sdeinfer._files import InputError
from sdeinfer.observation import evaluated, first_array, library, torch_called


def gradient_growth(model: Any, inputs: Any, layers: Callable[[Any], list[Any]], *, seed: int = 0) -> float:
    """log(‖∂ℓ/∂X₀‖²/‖∂ℓ/∂X_L‖²) for the stream X before the first and after the last layer, and ℓ = ⟨X_L, G⟩, G white.

    The module runs once in evaluation mode; the seed is that of G.

    Raises:
        InputError: for a module of another library, or without layers.
    """
    torch = library("torch")
    found = layers(model) if isinstance(model, torch.nn.Module) else []
    if not found:
        raise InputError("gradients: need a PyTorch module whose layers are found by their names")
    stream: list[Any] = []

    def reads(module: Any, arguments: tuple, keywords: dict) -> tuple[tuple, dict]:
        del module
        place = first_array(arguments, keywords)
        given = {**dict(enumerate(arguments)), **keywords}
        given[place] = given[place].detach().requires_grad_()  # the caller's own tensor stays as it is
        stream.append(given[place])
        return tuple(given[index] for index in range(len(arguments))), {name: given[name] for name in keywords}

    def returns(module: Any, arguments: tuple, output: Any) -> None:
        del module, arguments
        stream.append(output[0] if isinstance(output, tuple) else output)

    hooks = [found[0].register_forward_pre_hook(reads, with_kwargs=True)]
    hooks.append(found[-1].register_forward_hook(returns))
    try:
        with torch.enable_grad(), evaluated(torch, model):
            torch_called(torch, model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    before, after = stream
    G = torch.as_tensor(np.random.default_rng(seed).standard_normal(tuple(after.shape)), dtype=after.dtype)
    (gradient,) = torch.autograd.grad(after, before, G.to(after.device))
    return float(torch.log(gradient.square().sum() / G.square().sum()))
