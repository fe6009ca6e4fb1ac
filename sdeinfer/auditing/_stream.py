"""The residual stream of a PyTorch model between its layers, and the factors of branches in its sums."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from sdeinfer.observation import first_array

EXACT = 1e-3
"""Largest share of a layer's change that its branches may leave unexplained; rounding of float32 leaves some 10⁻⁶."""


class Stream:
    """Hooks that see the residual stream before and after every layer, and what its branches add, in one pass.

    A layer computes X′ = αX + Σ a_b D_b of increments D_b. A factor a_b that a model applies outside
    of a branch is found by least squares, since X, X′ and all D_b are seen.

    Arguments:
        branches: (kind, reader, writer) of every branch.
        layers: the modules of the layers.
        tokens: the tokens of each prompt to observe, a slice.
    """

    def __init__(self, branches: Sequence[tuple], layers: Sequence[Any], tokens: slice):
        self._tokens = tokens
        self._before: np.ndarray | None = None
        self._added: list[np.ndarray] = []
        self.covariances: list[np.ndarray] = []
        self.factors: list[np.ndarray] | None = []
        self._handles = []
        for layer in layers:
            self._handles.append(layer.register_forward_pre_hook(self._layer_reads, with_kwargs=True))
        for _, _, *writers in branches:
            self._handles.append(writers[-1].register_forward_hook(self._branch_adds))
        for layer in layers:  # after the hook of a writer that is the layer's last module
            self._handles.append(layer.register_forward_hook(self._layer_returns))

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def _layer_reads(self, module: Any, arguments: tuple, keywords: dict) -> None:
        del module
        place = first_array(arguments, keywords)
        X = self._array(keywords[place] if isinstance(place, str) else arguments[place or 0])
        if not self.covariances:
            self.covariances.append(X @ X.T / X.shape[1])
        self._before, self._added = X, []

    def _branch_adds(self, module: Any, arguments: tuple, output: Any) -> None:
        del module, arguments
        self._added.append(self._array(output[0] if isinstance(output, tuple) else output))

    def _layer_returns(self, module: Any, arguments: tuple, output: Any) -> None:
        del module, arguments
        X = self._array(output[0] if isinstance(output, tuple) else output)
        self.covariances.append(X @ X.T / X.shape[1])
        if self.factors is None or self._before is None:
            return
        parts = np.stack([self._before, *self._added]).reshape(1 + len(self._added), -1)
        found, *_ = np.linalg.lstsq(parts.T, X.reshape(-1), rcond=None)
        change = X.reshape(-1) - parts[0]
        unexplained = np.linalg.norm(X.reshape(-1) - found @ parts) / max(np.linalg.norm(change), 1e-300)
        self.factors = [*self.factors, found] if unexplained < EXACT else None

    def _array(self, values: Any) -> Float[np.ndarray, "m n"]:
        array = np.array(values.detach().double().cpu().numpy())  # a copy: layers may add in place
        return array[..., self._tokens, :].reshape(-1, array.shape[-1])


def watched(
    branches: Callable[[Any], list[tuple]], layers: Callable[[Any], list[Any]], tokens: slice, streams: list[Stream]
) -> Callable[[Any], list[tuple]]:
    """The function `branches`, which also watches the stream of each model that it is called with."""

    @functools.wraps(branches)
    def with_stream(model: Any) -> list[tuple]:
        found = branches(model)
        streams.append(Stream(found, layers(model), tokens))
        return found

    return with_stream
