"""Which tokens, and how many networks, tell a parameter to a given precision.

One layer from V tells of parameters u, by which its mean and variance in the coordinates L⁻¹ dV L⁻ᵀ depend on four
coefficients θ₁, θ₂, a and κ²,

    I(V) = h b′ᵀ Ω⁻¹ b′ + ½ tr(Ω⁻¹ Ω′ Ω⁻¹ Ω′),    ⟨S, Ω T⟩ = 2a⟨S, T⟩ + 2κ²⟨S, MT + TM⟩,    M = (LᵀHL)²/m²,

and a network the sum over its layers, whose mean over networks is that over paths of the SDE. All of it is a smooth
function of V0. That of τ0 grows with the fourth power of V/τ0², but so does what the law leaves out of the softmax
(`infer.in_range`): small tokens take many networks, and of large ones most layers cannot be used. So tokens get their
shape by the gradient of I, and their size and number by drawing networks and asking what a fit would know from them.
"""

import dataclasses
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, PRNGKeyArray
from scipy.optimize import minimize

from sdeinfer._files import InputError
from sdeinfer.covariance import centre, pairs, vech
from sdeinfer.diagnostics._identification import SLOPES_KNOWN
from sdeinfer.infer import LARGEST_LOGIT, innovations, law_at, logit_spread, transitions_allowed
from sdeinfer.layers import AbstractLayer, Architecture, architecture_of_layer, attention_drift, relu_drift
from sdeinfer.likelihood import transitions, used_of, with_used
from sdeinfer.networks import sample_networks
from sdeinfer.solve import simulate

SPREAD = 0.3
"""Spread of the logits at V0 for which the tokens' shape is found."""

SIZES = np.geomspace(0.5, 1.6, 7)
"""By what V0 is multiplied to find the best size."""

LAYERS = 4096
"""Drawn at each size, to see what a fit would know from them."""

TIMES, PATHS = 4, 64
"""Depth-times at which the information is taken, and paths over which it is averaged."""

NUMBERS = np.geomspace(1, 1e8, 769)
"""Of networks, in steps of 2.4 %."""

NOMINAL = 100
"""Networks for which the tokens' shape is found."""

LEAST = 1e-3
"""Information of a network below which it tells nothing."""

CLOSEST = 1.0
"""Part of the mean variance that is added to each token's own. Nearly collinear tokens would tell more by the limit's
law; but by then attention in the direction that they share little of is beyond the law of finite width."""


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
        InputError: for a layer without a name, a parameter that it has not, or one that no tokens tell so well.
    """
    architecture = architecture_of_layer(layer)
    if architecture is None:
        raise InputError("layer: must be one of the named architectures")
    if architecture.causal:
        raise InputError("layer: designs need the law of finite width, which is not known with a causal mask")
    names = tuple(architecture.coordinates.sampled)
    if parameter not in names:
        raise InputError(f"parameter: must be one of {', '.join(names[:3])}, got {parameter!r}")
    if not relative_sd > 0:
        raise InputError(f"relative_sd: must be positive, got {relative_sd:g}")
    place = names.index(parameter)

    def of_network(x: Array) -> tuple[Array, Array]:
        V0 = _tokens_at(x, layer, tokens, width)
        return V0, network_information(layer, V0, width=width, depth=depth, key=key)

    @jax.jit
    @partial(jax.value_and_grad, has_aux=True)
    def objective(x: Array) -> tuple[Array, tuple[Array, Array]]:
        V0, information = of_network(x)
        return -jnp.log(told(NOMINAL * information, names)[place]), (V0, information)

    def value_and_slope(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        (value, _), slope = objective(np.asarray(x, jnp.result_type(float)))
        return np.asarray(value, np.float64), np.asarray(slope, np.float64)

    found = minimize(value_and_slope, vech(np.eye(tokens) + 0.1 * np.tri(tokens)), jac=True)
    (_, (V0, information)), _ = objective(np.asarray(found.x, jnp.result_type(float)))
    V0, information = np.asarray(V0), np.asarray(information)
    if not told(NOMINAL * information, names)[place] > NOMINAL * LEAST:
        raise InputError(f"parameter: no {tokens} tokens tell {parameter} of this architecture")
    best = None
    for size in SIZES if "tau0" in names else (1.0,):
        sampled = _sample(layer, architecture, size * V0, key, width=width, depth=depth)
        networks = _networks(sampled, names, parameter, relative_sd)
        if networks is not None and (best is None or networks < best.networks):
            expected = pd.Series(_expected(sampled, names, networks), index=list(names)).drop("c_mean", errors="ignore")
            best = Design(np.asarray(size * V0), width, depth, networks, expected)
    if best is None:
        raise InputError(f"relative_sd: no number of networks of width {width} tells {parameter} to {relative_sd:g}")
    return best


class _Layers(NamedTuple):
    """Layers of networks, and what a fit would make of them.

    Attributes:
        networks: how many there are.
        information: of each layer in range, by the law of finite width, shape (layers, k, k).
        score: of each, shape (layers, k).
        spread: of the logits of each, ascending; 0 without attention.
    """

    networks: int
    information: Float[np.ndarray, "layers k k"]
    score: Float[np.ndarray, "layers k"]
    spread: Float[np.ndarray, " layers"]


def _sample(
    layer: AbstractLayer, architecture: Architecture, V0: np.ndarray, key: PRNGKeyArray, *, width: int, depth: int
) -> _Layers:
    networks = math.ceil(LAYERS / depth)
    data = sample_networks(layer, V0, width=width, depth=depth, networks=networks, key=key)
    every, tau0 = slice(None), float(getattr(layer, "tau0", np.inf))
    path = transitions(with_used(data, used_of(data)))
    spread = logit_spread(path.starts(every), np.asarray(width)) / tau0
    # Beyond the range the law is absurd.
    order = np.argsort(spread)[: max(int((spread <= LARGEST_LOGIT).sum()), 1)]
    path, spread = path.take(order), spread[order]
    centre = path.terms(every).variance.mean(axis=0)
    law = law_at(
        architecture, layer.coordinates.unconstrained(layer.parameters()), widths=np.array([width]), centre=centre
    )
    parts = list(innovations(path, law))
    back = np.argsort(np.concatenate([here.transitions for here in parts]))
    information, score = (
        np.concatenate([getattr(here, name) for here in parts])[back] for name in ("information_of_each", "score")
    )
    return _Layers(networks, information, score, spread)


def _networks(sampled: _Layers, names: tuple[str, ...], parameter: str, relative_sd: float) -> int | None:
    """The fewest networks from which on all numbers tell a parameter to a relative sd; None where none does.

    Few networks would make a fit use layers at the edge of the range, of which the law believes too much.
    """
    place = names.index(parameter)
    enough = [_expected(sampled, names, number)[place] <= relative_sd for number in NUMBERS]
    first = len(NUMBERS) - int(np.argmin(enough[::-1])) if not all(enough) else 0
    return None if first == len(NUMBERS) else math.ceil(NUMBERS[first])


def _expected(sampled: _Layers, names: tuple[str, ...], networks: float) -> Float[np.ndarray, " k"]:
    """Standard deviations that so many networks allow, from the layers that a fit would use: by the information or by
    the scatter of scores (`infer._sandwich`), the larger; for τ0 with the error of the series as well.
    """  # noqa: D205
    times, spread, used = networks / sampled.networks, sampled.spread, len(sampled.spread)
    prior = _prior(names)
    place = names.index("tau0") if "tau0" in names else None
    if place is not None:
        sd = float(told(times * sampled.information.sum(axis=0), names)[place] ** -0.5)
        used = transitions_allowed(spread, LARGEST_LOGIT, seen=used, sd=sd)
    score = sampled.score[:used]
    inverse = np.linalg.inv(times * sampled.information[:used].sum(axis=0) + prior)
    variance = np.maximum(np.diag(inverse), np.diag(inverse @ (times * score.T @ score + prior) @ inverse))
    if place is not None:
        variance[place] += ((spread[:used] ** 8).sum() / (spread[:used] ** 4).sum()) ** 2
    return np.sqrt(variance)


def _prior(names: tuple[str, ...]) -> Float[np.ndarray, "k k"]:
    """Of c₊ + c₋ the prior tells more than data do."""
    return np.diag([SLOPES_KNOWN if name == "c_mean" else 1e-9 for name in names])


def told[T: (Array, np.ndarray)](information: Float[T, "k k"], names: tuple[str, ...]) -> Float[T, " k"]:
    """What is told of each parameter where no other is known."""
    xp = information.__array_namespace__()
    return 1 / xp.diagonal(xp.linalg.inv(information + _prior(names)))


def network_information(
    layer: AbstractLayer, V0: Float[Array, "m m"], *, width: int, depth: int, key: PRNGKeyArray
) -> Float[Array, "k k"]:
    """Expected Fisher information of a network of which every layer is observed, by the limit's law; differentiable.

    Of the slopes, networks of one width know less than the gap: as much as they do at this width.

    Arguments:
        layer: a named architecture, with its parameters.
        V0: covariance of the initial tokens.
        width: n.
        depth: d.
        key: for the paths.

    Returns:
        In the coordinates `Coordinates.unconstrained`, shape (k, k).
    """
    times = (np.arange(TIMES) + 0.5) / TIMES * depth / width
    paths = simulate(layer, V0, times, paths=PATHS, step=float(times[0]), key=key).reshape(-1, *V0.shape)
    # What leaves the range of the law will not be used.
    within = jnp.isfinite(paths).all(axis=(1, 2))
    if "tau0" in layer.parameters():
        spread = jnp.where(within, jax.vmap(_spread)(jnp.where(within[:, None, None], paths, V0)), jnp.inf)
        within &= spread / jnp.sqrt(width) < LARGEST_LOGIT * layer.parameters()["tau0"]
    safe = jnp.where(within[:, None, None], paths, V0)
    each = jax.vmap(lambda V: layer_information(layer, V, width))(safe)
    slopes = _slopes_at_width(layer, width)
    return depth * slopes.T @ jnp.mean(jnp.where(within[:, None, None], each, 0.0), axis=0) @ slopes


def _slopes_at_width(layer: AbstractLayer, width: int) -> Float[Array, "k k"]:
    """Derivatives of the limit's parameters by those of networks, which know q of `sdeinfer.parameters` for the gap."""
    names = tuple(layer.parameters())

    def of_limit(u: Array) -> Array:
        values = layer.coordinates.constrained(u)
        half_sum, half_difference = ((values["c_plus"] + sign * values["c_minus"]) / 2 for sign in (1, -1))
        squares = (1 + half_sum / math.sqrt(width)) ** 2 + half_difference**2 / width
        return u.at[-2].add(-jnp.log(squares) / 2)

    u = layer.coordinates.unconstrained(layer.parameters())
    return jax.jacfwd(of_limit)(u) if "c_plus" in names else jnp.eye(len(u))


def layer_information(layer: AbstractLayer, V: Float[Array, "m m"], width: int) -> Float[Array, "k k"]:
    """Fisher information of one layer from V, by the limit's law."""
    architecture = architecture_of_layer(layer)
    assert architecture is not None

    def coefficients(u: Array) -> Array:
        limit = architecture.layer_at(u).limit()
        return jnp.stack([limit.attention_drift, limit.relu_drift, limit.linear_noise, limit.attention_noise])

    u = layer.coordinates.unconstrained(layer.parameters())
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
