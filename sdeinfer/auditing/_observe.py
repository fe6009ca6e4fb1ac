"""One pass of a model, seen by an audit: branches, the residual stream of PyTorch's layers, and its gradients."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import Float, PRNGKeyArray

from sdeinfer._files import InputError
from sdeinfer.auditing._describe import Description
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.observation import observe_branches
from sdeinfer.observation._arrays import first_array, library
from sdeinfer.observation._capture import evaluated, torch_called


@dataclasses.dataclass(frozen=True, eq=False)
class Seen:
    """Observed networks: their branches, whose increments have the factors of the sums, and the residual stream."""

    data: xr.Dataset
    stream: Float[np.ndarray, "networks layers m m"] | None = None


def observed(
    model: Any,
    inputs: Any,
    described: Description,
    *,
    networks: int,
    tokens: slice | None,
    seed: int,
    key: PRNGKeyArray | None,
) -> Seen:
    """Run networks, and observe their branches; of PyTorch's also the stream, and factors of branches in its sums."""
    pattern = BlockOrder.of(described.architecture, depth=1).pattern
    settings = {"networks": networks, "tokens": tokens, "pattern": pattern}
    if described.library != "torch":
        run = observe_branches.flax if described.library == "flax" else observe_branches.equinox
        return Seen(run(model, inputs, described.branches, key=jr.key(seed) if key is None else key, **settings))
    streams: list[Stream] = []
    try:
        branches = watched(described.branches, described.layers, tokens or slice(None), streams)
        data = observe_branches.torch(model, inputs, branches, seed=seed, **settings)
    finally:
        for each in streams:
            each.remove()
    factors = [each.factors for each in streams]
    if all(each for each in factors):
        data = scaled(data, np.stack([np.concatenate([layer[1:] for layer in each or ()]) for each in factors]))
    covariances = [each.covariances for each in streams]
    return Seen(data, np.array(covariances) if all(covariances) else None)


def scaled(data: xr.Dataset, factors: Float[np.ndarray, "networks branches"]) -> xr.Dataset:
    """A Dataset of branches whose increments are multiplied by factors."""
    if np.allclose(factors, 1.0, rtol=1e-5):
        return data
    a = xr.DataArray(factors, dims=("network", "branch"))
    other = a.rename(branch="other_branch")
    return data.assign(increment=data["increment"] * a**2, cross=data["cross"] * a, between=data["between"] * a * other)


class Stream:
    """Hooks that see the residual stream before and after every layer, and what its branches add, in one pass.

    A layer computes X′ = αX + Σ a_b D_b of increments D_b. A factor a_b that a model applies outside
    of a branch is found by least squares, since X, X′ and all D_b are seen.
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
        self.factors = [*self.factors, found] if unexplained < 1e-3 else None  # rounding leaves some 10⁻⁶

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


def gradient_growth(model: Any, inputs: Any, layers: Callable[[Any], list[Any]], *, seed: int = 0) -> float:
    """log(‖∂ℓ/∂X₀‖²/‖∂ℓ/∂X_L‖²) for the stream X before the first and after the last layer, and ℓ = ⟨X_L, G⟩, G white.

    The module runs once in evaluation mode; the seed is that of G.
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
