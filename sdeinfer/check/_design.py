"""Which tokens, and how many networks, tell a parameter to a given precision.

One layer from V tells of parameters u, by which its mean and variance in the coordinates L⁻¹ dV L⁻ᵀ depend on four
coefficients θ₁, θ₂, a and κ²,

    I(V) = h b′ᵀ Ω⁻¹ b′ + ½ tr(Ω⁻¹ Ω′ Ω⁻¹ Ω′),    ⟨S, Ω T⟩ = 2a⟨S, T⟩ + 2κ²⟨S, MT + TM⟩,    M = (LᵀHL)²/m²,

and a network the sum over its layers, whose mean over networks is that over paths of the SDE. All of it is a smooth
function of V0. That of τ0 grows with the fourth power of V/τ0²; what bounds V0 is the range of the law.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, PRNGKeyArray
from scipy.optimize import minimize

from sdeinfer._files import InputError
from sdeinfer.covariance import centre, pairs, vech
from sdeinfer.infer import LARGEST_LOGIT
from sdeinfer.layers import AbstractLayer, Architecture, architecture_of_layer, attention_drift, relu_drift
from sdeinfer.likelihood import constrained, unconstrained
from sdeinfer.solve import simulate

SPREAD = 0.45
"""Spread of the logits at V0: below `infer.LARGEST_LOGIT`, which later layers should not reach."""

TIMES, PATHS = 4, 32
"""Depth-times at which the information is taken, and paths over which it is averaged."""

RIDGE = 1e-3
"""Information of a prior, a network: some directions, as that of c₊ + c₋ in the limit, have no other."""

CLOSEST = 0.02
"""Part of the mean variance that is added to each token's own: no two tokens become one."""


@dataclasses.dataclass(frozen=True)
class Design:
    """Data to ask for.

    Attributes:
        V0: covariance of the initial tokens, shape (m, m).
        width: n.
        depth: d.
        networks: how many.
        expected: for each parameter the standard deviation that they allow, relative for τ0 and the gap; of logit γ.
    """

    V0: Float[np.ndarray, "m m"]
    width: int
    depth: int
    networks: int
    expected: pd.Series

    @property
    def norms(self) -> Float[np.ndarray, " m"]:
        """‖x_α‖/√n."""
        return np.sqrt(np.diag(self.V0))

    @property
    def correlations(self) -> Float[np.ndarray, "m m"]:
        """Between the tokens."""
        return self.V0 / np.outer(self.norms, self.norms)


def design(
    layer: AbstractLayer,
    *,
    tokens: int,
    width: int,
    depth: int,
    parameter: str = "tau0",
    relative_sd: float = 0.05,
    key: PRNGKeyArray,
) -> Design:
    """Find the tokens that tell most of a parameter, and the number of networks that tell it to a relative sd.

    Arguments:
        layer: the architecture, with the parameters at which the data are to be made: a guess.
        tokens: m.
        width: n.
        depth: d.
        parameter: "gamma", "tau0" or "c_gap"; of γ it is the sd of logit γ.
        relative_sd: to which it should be known.
        key: for the paths of the SDE.

    Returns:
        The `Design`.

    Raises:
        InputError: for a layer without a name, a parameter that it has not, or one that no tokens tell.
    """
    architecture = architecture_of_layer(layer)
    if architecture is None:
        raise InputError("layer: must be one of the named architectures")
    names = coordinates_of(architecture)
    if parameter not in names:
        raise InputError(f"parameter: must be one of {', '.join(names[:3])}, got {parameter!r}")
    if not relative_sd > 0:
        raise InputError(f"relative_sd: must be positive, got {relative_sd:g}")
    place = names.index(parameter)

    def of_network(x: Array) -> tuple[Array, Array]:
        V0 = _tokens_at(x, layer, tokens, width)
        return V0, network_information(layer, V0, width=width, depth=depth, key=key)

    @jax.jit
    def objective(x: Array) -> Array:
        return -jnp.log(told(of_network(x)[1])[place])

    start = np.asarray(vech(jnp.eye(tokens) + 0.1 * jnp.tri(tokens)))
    value_and_slope = jax.jit(jax.value_and_grad(objective))
    found = minimize(lambda x: tuple(np.asarray(part, np.float64) for part in value_and_slope(x)), start, jac=True)
    V0, information = of_network(jnp.asarray(found.x))
    each = np.asarray(told(information))
    if not each[place] > 10 * RIDGE:
        raise InputError(f"parameter: no {tokens} tokens tell {parameter} of this architecture")
    networks = math.ceil(1 / (relative_sd**2 * each[place]))
    expected = pd.Series(1 / np.sqrt(networks * each), index=list(names)).drop("c_mean", errors="ignore")
    return Design(np.asarray(V0), width, depth, networks, expected)


def told(information: Float[Array, "k k"]) -> Float[Array, " k"]:
    """What is told of each parameter when none is known."""
    return 1 / jnp.diagonal(jnp.linalg.inv(information + RIDGE * jnp.eye(len(information))))


def coordinates_of(architecture: Architecture) -> tuple[str, ...]:
    """The parameters in the order of `likelihood.unconstrained`."""
    slopes = ("c_gap", "c_mean") if "c_plus" in architecture.parameters else ()
    return (*(name for name in architecture.parameters if name in ("gamma", "tau0")), *slopes)


def network_information(
    layer: AbstractLayer, V0: Float[Array, "m m"], *, width: int, depth: int, key: PRNGKeyArray
) -> Float[Array, "k k"]:
    """Expected Fisher information of a network of which every layer is observed, by the limit's law; differentiable.

    Arguments:
        layer: a named architecture, with its parameters.
        V0: covariance of the initial tokens.
        width: n.
        depth: d.
        key: for the paths.

    Returns:
        In the coordinates of `likelihood.unconstrained`, shape (k, k).
    """
    times = (np.arange(TIMES) + 0.5) / TIMES * depth / width
    paths = simulate(layer, V0, times, paths=PATHS, step=float(times[0]), key=key).reshape(-1, *V0.shape)
    # Where a path has left the range of the law, its layers will be left out.
    within = jnp.isfinite(paths).all(axis=(1, 2))
    if "tau0" in layer.parameters():
        spread = jnp.where(within, jax.vmap(_spread)(jnp.where(within[:, None, None], paths, V0)), jnp.inf)
        within &= spread / jnp.sqrt(width) < LARGEST_LOGIT * layer.parameters()["tau0"]
    safe = jnp.where(within[:, None, None], paths, V0)
    each = jax.vmap(lambda V: layer_information(layer, V, width))(safe)
    return depth * jnp.mean(jnp.where(within[:, None, None], each, 0.0), axis=0)


def layer_information(layer: AbstractLayer, V: Float[Array, "m m"], width: int) -> Float[Array, "k k"]:
    """Fisher information of one layer from V, by the limit's law."""
    architecture = architecture_of_layer(layer)
    assert architecture is not None

    def coefficients(u: Array) -> Array:
        limit = architecture.layer(**constrained(architecture.parameters, u)).limit()
        return jnp.stack([limit.attention_drift, limit.relu_drift, limit.linear_noise, limit.attention_noise])

    u = unconstrained(layer.parameters())
    (_, _, a, kappa2), slopes = coefficients(u), jax.jacfwd(coefficients)(u)
    tokens, (rows, columns) = len(V), pairs(len(V))
    unit = jnp.eye(tokens)
    basis = (unit[rows][:, :, None] * unit[columns][:, None] + unit[columns][:, :, None] * unit[rows][:, None]) / 2
    L = jnp.linalg.cholesky(V)
    half = L - jnp.mean(L, axis=0)
    M = half.T @ half
    M = M @ M / tokens**2
    linear = 2 * jnp.einsum("pij,qij->pq", basis, basis)
    mixing = 2 * jnp.einsum("pij,qij->pq", basis, M @ basis + basis @ M)
    R = jnp.linalg.inv(L)
    drift = jnp.stack([vech(R @ B @ R.T) for B in (attention_drift(V), relu_drift(V))])
    inverse = jnp.linalg.inv(a * linear + kappa2 * mixing)
    of_mean = slopes[:2].T @ (drift @ inverse @ drift.T) @ slopes[:2] / width
    scaled = jnp.stack([inverse @ linear, inverse @ mixing])
    of_variance = slopes[2:].T @ jnp.einsum("apq,bqp->ab", scaled, scaled) @ slopes[2:] / 2
    return of_mean + of_variance


def _tokens_at(x: Float[Array, " p"], layer: AbstractLayer, tokens: int, width: int) -> Float[Array, "m m"]:
    """A covariance, of any shape and of the size that the range of the law allows."""
    rows, columns = pairs(tokens)
    L = jnp.zeros((tokens, tokens)).at[columns, rows].set(x)
    V = L @ L.T
    V = V + CLOSEST * jnp.trace(V) / tokens * jnp.eye(tokens)
    if "tau0" not in layer.parameters():
        return V * tokens / jnp.trace(V)
    return V * (SPREAD * layer.parameters()["tau0"] * math.sqrt(width) / _spread(V))


def _spread(V: Float[Array, "m m"]) -> Float[Array, ""]:
    """The spread of the logits for n = τ0 = 1 (see `infer.logit_spread`)."""
    tokens = len(V)
    return jnp.sqrt(jnp.max(jnp.diagonal(V)) * jnp.trace(centre(V)) / max(tokens - 1, 1))
