"""One pass of a model, seen by an audit."""

import dataclasses
from typing import Any

import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import Float, PRNGKeyArray

from sdeinfer.auditing._describe import Description
from sdeinfer.auditing._stream import Stream, watched
from sdeinfer.blocks import BlockOrder
from sdeinfer.observation import observe_branches


@dataclasses.dataclass(frozen=True, eq=False)
class Seen:
    """Observed networks.

    Attributes:
        data: their Dataset of branches; increments have the factors of the sums.
        stream: covariances of the residual stream before the first and after each layer, or None.
    """

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
    """Run networks, and observe their branches; of PyTorch's also the stream and the factors of branches in its sums.

    The seed is that of the weights of PyTorch's networks, and the key that of others, by default the one of the seed.
    """
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
