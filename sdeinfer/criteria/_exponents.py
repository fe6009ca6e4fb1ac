"""Growth rates of the angle between near tokens and of gradients, with their fluctuations over networks.

They are the criteria of trainability of Cowsik et al. (2024, arXiv:2403.02579).
"""

from typing import NamedTuple

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, PRNGKeyArray

from sdeinfer._files import InputError
from sdeinfer.covariance import validate_covariance
from sdeinfer.criteria._gradients import squared_jacobian_norm
from sdeinfer.layers import AbstractLayer
from sdeinfer.solve import STEP, tangents


class Exponents(NamedTuple):
    """Growth rates per unit of depth-time, of each path.

    Attributes:
        angle: of 1 − ρ for two tokens that nearly coincide: negative where tokens merge; shape (paths,).
        gradient: of tr D from random directions at all tokens, and of the squared norm of the gradients of all tokens
            from one white gradient of the outputs: negative where gradients vanish; shape (paths,).
    """

    angle: Float[Array, " paths"]
    gradient: Float[Array, " paths"]

    def summary(self) -> pd.DataFrame:
        """Mean and spread over networks, of the paths that do not explode; and the fraction that does."""
        rows = {}
        for name, rate in zip(self._fields, map(np.asarray, self), strict=True):
            finite = rate[np.isfinite(rate)]
            low, high = np.quantile(finite, [0.05, 0.95]) if len(finite) else (np.nan, np.nan)
            mean, sd = (finite.mean(), finite.std(ddof=1)) if len(finite) > 1 else (np.nan, np.nan)
            rows[name] = {"mean": mean, "sd": sd, "5%": low, "95%": high, "exploded": 1 - len(finite) / len(rate)}
        return pd.DataFrame.from_dict(rows, orient="index")


def exponents(
    layer: AbstractLayer,
    V0: Float[Array | np.ndarray, "m m"],
    time: float,
    *,
    token: int = 0,
    paths: int,
    step: float = STEP,
    key: PRNGKeyArray,
) -> Exponents:
    """The angle and the gradient exponent over [0, time].

    Let x and x + εu be two near tokens of one prompt, with a tangent u. 1 − ρ between them is ε²/2 times
    (‖u‖² − (x·u)²/‖x‖²)/‖x‖²; its growth is the angle exponent. The gradient exponent is
    log(tr D_time/tr D_0)/time from D_0 = I. Both are differentiable in the layer's parameters.

    Arguments:
        layer: the architecture, with its parameters.
        V0: covariance of the tokens at time 0, shape (m, m).
        time: depth-time.
        token: the token that is repeated, and parted from its copy.
        paths: number of independent paths.
        step: longest step in depth-time.
        key: PRNG key.

    Raises:
        InputError: as `simulate`, for a token that V0 does not have, and for attention with a pattern: a token and its
            copy would attend to different tokens, and part however near they start.
    """
    if not layer.limit().pattern.everything:
        raise InputError("layer: a token and its copy must attend to the same tokens; only without a mask they do")
    key_angle, key_gradient = jr.split(key)
    repeated, directions = repeated_token(V0, token)
    near = tangents(layer, repeated, [time], directions, paths=paths, step=step, key=key_angle)
    every = jnp.eye(len(V0), dtype=repeated.dtype)
    all_tokens = tangents(layer, V0, [time], every, paths=paths, step=step, key=key_gradient)
    x = near.covariance[:, 0, token, token]
    u = near.tangent[:, 0, token, token] + near.tangent[:, 0, -1, -1] - 2 * near.tangent[:, 0, token, -1]
    along = near.cross[:, 0, token, token] - near.cross[:, 0, token, -1]
    angle = (u - along**2 / x) / x
    start = 1 / jnp.asarray(V0)[token, token]
    jacobian = squared_jacobian_norm(all_tokens)[:, 0] / len(V0)
    return Exponents(_rate(angle / start, near.time, time), _rate(jacobian, all_tokens.time, time))


def _rate(growth: Float[Array, " paths"], stopped: Float[Array, " paths"], time: float) -> Float[Array, " paths"]:
    """log(growth)/time; NaN for paths that explode, whose value must not enter a derivative."""
    runs = jnp.isposinf(jnp.asarray(stopped))
    return jnp.where(runs, jnp.log(jnp.where(runs, growth, 1.0)) / time, jnp.nan)


def repeated_token(
    V0: Float[Array | np.ndarray, "m m"], token: int
) -> tuple[Float[Array | np.ndarray, "m+1 m+1"], Float[np.ndarray, "m+1 m+1"]]:
    """V0 with a copy of a token as the last one, and the `directions` of a tangent that parts the two.

    The token and its copy move by u/2 and −u/2, in a random direction with ‖u‖² = n.
    """
    V = validate_covariance(V0)
    if not 0 <= token < len(V):
        raise InputError(f"token: 0 to {len(V) - 1} is needed, got {token}")
    index = [*range(len(V)), token]
    apart = np.zeros(len(index), V.dtype)
    apart[token], apart[-1] = 0.5, -0.5
    return V[np.ix_(index, index)], np.outer(apart, apart)
