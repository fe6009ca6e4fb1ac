"""Observed tokens as the argument of NumPyro programs."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import xarray as xr
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from sdeinfer.likelihood import Assumptions
from sdeinfer.meanfield._flow import SelfAttentionFlow
from sdeinfer.observation import validate_tokens


class TokenPath(eqx.Module):
    """Tokens of networks over layers, and what a program assumes of them.

    Attributes:
        initial: tokens at the first observed layer, shape (networks, n, D).
        observed: tokens at the layers after it; None to sample them.
        layers: numbers of the layers after the first one, counted from it.
        flow: the flow with its known matrices; its β is ignored.
        assumptions: priors that replace the defaults.
    """

    initial: Float[Array, "networks n D"]
    observed: Float[Array, "networks layers n D"] | None
    flow: SelfAttentionFlow
    layers: tuple[int, ...] = eqx.field(static=True)
    assumptions: Assumptions = eqx.field(static=True, default=Assumptions())

    @property
    def every_layer(self) -> bool:
        """Whether no layer between the first and the last is left out."""
        return self.layers == tuple(range(1, len(self.layers) + 1))

    def flow_at(self, beta: ArrayLike, **changes: ArrayLike) -> SelfAttentionFlow:
        """The flow with this β, and with changed matrices Q, K or V, shape (D, D) or (heads, D, D)."""
        flow = self.flow
        matrices = {name: changes.get(name, getattr(flow, name)) for name in ("Q", "K", "V")}
        return SelfAttentionFlow(beta, **matrices, heads=flow.heads, normalised=flow.normalised, mlp=flow.mlp)

    def unobserved(self) -> "TokenPath":
        """The same without the tokens after the first layer, for NumPyro's `Predictive`."""
        return eqx.tree_at(lambda path: path.observed, self, None, is_leaf=lambda leaf: leaf is None)


def token_path(
    data: xr.Dataset, *, flow: SelfAttentionFlow | None = None, assumptions: Assumptions | None = None
) -> TokenPath:
    """Observed tokens as the argument of a program.

    Arguments:
        data: observed tokens, see `tokens_dataset`.
        flow: the flow with its known matrices; None for the identity in all places.
        assumptions: priors that replace the defaults.

    Raises:
        InputError: for a Dataset without tokens, see `observation.validate_tokens`.
    """
    tokens = validate_tokens(data)["tokens"]
    x = jnp.asarray(tokens.values, jnp.result_type(float))
    numbers = np.asarray(data["layer"].values if "layer" in data.coords else np.arange(x.shape[1]))
    return TokenPath(
        x[:, 0],
        x[:, 1:],
        SelfAttentionFlow(1.0) if flow is None else flow,
        tuple(int(number) for number in numbers[1:] - numbers[0]),
        assumptions or Assumptions(),
    )
