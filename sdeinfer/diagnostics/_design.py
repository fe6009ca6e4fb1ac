"""Design of data: the tokens and the number of networks that determine a parameter to a given precision.

The mean and the variance of one layer in the coordinates L⁻¹ dV L⁻ᵀ depend on the parameters u through the four
coefficients θ₁, θ₂, a and κ². The Fisher information of one layer starting from V is

    I(V) = h b′ᵀ Ω⁻¹ b′ + ½ tr(Ω⁻¹ Ω′ Ω⁻¹ Ω′),    ⟨S, Ω T⟩ = 2a⟨S, T⟩ + 2κ²⟨S, MT + TM⟩,    M = (LᵀHL)²/m²,

and that of a network is the sum over its layers, in expectation the mean over paths of the SDE, a smooth function of
V0. The information on τ0 grows with the fourth power of V/τ0², but so do the omitted terms of the softmax expansion
(`infer.in_range`): small tokens need many networks, and large tokens put most layers outside the range of the law. The
shape of the tokens is therefore optimised by gradients of I, and their size and the number of networks are found by
sampling networks and computing the precision of a fit to them.
"""

import dataclasses
import itertools
import math
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, PRNGKeyArray
from scipy.optimize import minimize

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer._progress import phase, with_progress_line
from sdeinfer.covariance import centre, pairs, vech
from sdeinfer.infer import LARGEST_LOGIT, innovations, law_at, logit_spread, transitions_allowed
from sdeinfer.layers import AbstractLayer, Architecture, architecture_of_layer, attention_drift, relu_drift
from sdeinfer.likelihood import any_transitions, used_of, with_used
from sdeinfer.networks import sample_networks
from sdeinfer.solve import PSDEuler, simulate

SLOPES_INFORMATION = 0.5
"""Information of the default prior on (c₊ + c₋)/2; networks of one width determine only q."""

SPREAD = 0.3
"""Spread of the logits at V0 in the optimisation of the tokens' shape."""

SIZES = np.geomspace(0.5, 1.6, 7)
"""Multiples of V0 among which the best size is chosen."""

LAYERS = 8192
"""Number of layers sampled at each size."""

TIMES, PATHS = 4, 64
"""Numbers of depth-times and of paths over which the information is averaged."""

FADING = 16
"""Power of the spread by which transitions fade at the end of the range."""

NUMBERS = np.geomspace(1, 1e8, 769)
"""Candidate numbers of networks, in steps of 2.4 %."""

NOMINAL = 100
"""Number of networks in the optimisation of the tokens' shape."""

LEAST_INFORMATION = 1e-3
"""Information per network, in the units of `Coordinates.unconstrained`, below which a parameter is not identified."""

RIDGE = 1.0
"""Multiple of the mean variance added to the variance of each token. Nearly collinear tokens are more informative under
the limit's law, but attention to their small differences is outside the range of the law of finite width."""


@dataclasses.dataclass(frozen=True)
class Design:
    """A design of data.

    Attributes:
        V0: covariance of the initial tokens, shape (m, m).
        width: n.
        depth: d.
        networks: number of networks.
        expected: expected standard deviation of each parameter: of logit γ, and relative for τ0 and the gap.
    """

    V0: Float[np.ndarray, "m m"]
    width: int
    depth: int
    networks: int
    expected: pd.Series

    @property
    def norms(self) -> Float[np.ndarray, " m"]:
        """Norms ‖x_α‖/√n of the tokens."""
        return np.sqrt(np.diag(self.V0))

    @property
    def correlations(self) -> Float[np.ndarray, "m m"]:
        """Correlations between the tokens."""
        return self.V0 / np.outer(self.norms, self.norms)


@checked
@with_progress_line
def design(
    layer: AbstractLayer,
    *,
    tokens: int,
    width: int,
    depth: int,
    parameter: str = "tau0",
    relative_sd: float = 0.05,
    progress: bool = False,
    key: PRNGKeyArray,
) -> Design:
    """Find the most informative tokens for a parameter, and the number of networks for a given relative sd.

    Arguments:
        layer: the architecture, with a guess of its parameters.
        tokens: m.
        width: n.
        depth: d.
        parameter: "gamma", "tau0" or "c_gap".
        relative_sd: wanted relative standard deviation; for "gamma", the standard deviation of logit γ.
        progress: show the current phase, on a terminal.
        key: PRNG key of the networks that are sampled to count how many are needed; the tokens do not depend on it.

    Returns:
        The `Design`.

    Raises:
        InputError: for a layer that is not a named architecture, for a parameter that the layer does not have, or if no
            design reaches the wanted precision.
    """
    architecture = architecture_of_layer(layer)
    if architecture is None:
        raise InputError("layer: must be one of the named architectures")
    if not architecture.pattern.everything:
        raise InputError("layer: designs choose tokens that all attend to all; they know no attention pattern")
    names = tuple(architecture.coordinates.sampled)
    if parameter not in names:
        raise InputError(f"parameter: must be one of {', '.join(names[:3])}, got {parameter!r}")
    if not relative_sd > 0:
        raise InputError(f"relative_sd: must be positive, got {relative_sd:g}")
    place = names.index(parameter)

    sizes = {"tokens": tokens, "width": width, "depth": depth, "place": place}

    def objective(x: np.ndarray) -> tuple[tuple[Array, tuple[Array, Array]], Array]:
        return _information_lost(np.asarray(x, jnp.result_type(float)), layer, **sizes)

    steps = itertools.count(1)

    def value_and_slope(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        (value, _), slope = objective(x)
        phase(f"searching for tokens, evaluation {next(steps)}")
        return np.asarray(value, np.float64), np.asarray(slope, np.float64)

    phase("searching for tokens")
    ends = [minimize(value_and_slope, start, jac=True) for start in _starts(tokens)]
    found = min(ends, key=lambda end: end.fun)
    (_, (V0, information)), _ = objective(found.x)
    V0, information = np.asarray(V0), np.asarray(information)
    if not marginal_information(NOMINAL * information, names)[place] > NOMINAL * LEAST_INFORMATION:
        raise InputError(f"parameter: {parameter} of this architecture cannot be identified with tokens={tokens}")
    best = None
    for size in SIZES if "tau0" in names else (1.0,):
        phase(f"counting networks, tokens scaled by {size:.3g}")
        sampled = _sample(layer, architecture, size * V0, key, width=width, depth=depth)
        networks = _networks(sampled, names, parameter, relative_sd)
        if networks is not None and (best is None or networks < best.networks):
            expected = pd.Series(_expected(sampled, names, networks), index=list(names)).drop("c_mean", errors="ignore")
            best = Design(np.asarray(size * V0), width, depth, networks, expected)
    if best is None:
        raise InputError(
            f"relative_sd: no number of networks of width {width} determines {parameter} to {relative_sd:g}"
        )
    return best


class _Layers(NamedTuple):
    """Sampled layers, with their information and scores.

    Attributes:
        networks: number of sampled networks.
        information: information of each layer in range by the law of finite width, shape (layers, k, k).
        score: score of each layer in range, shape (layers, k).
        spread: spread of the logits of each layer in range, ascending; 0 without attention.
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
    path = any_transitions(with_used(data, used_of(data)))
    spread = logit_spread(path.starts(every), np.asarray(width)) / tau0
    # The law is meaningless outside its range.
    order = np.argsort(spread)[: max(int((spread <= LARGEST_LOGIT).sum()), 1)]
    path, spread = path.take(order), spread[order]
    law = law_at(architecture, layer.coordinates.unconstrained(layer.parameters()), widths=np.array([width]))
    parts = list(innovations(path, law))
    back = np.argsort(np.concatenate([here.transitions for here in parts]))
    information, score = (
        np.concatenate([getattr(here, name) for here in parts])[back] for name in ("information_of_each", "score")
    )
    return _Layers(networks, information, score, spread)


def _networks(sampled: _Layers, names: tuple[str, ...], parameter: str, relative_sd: float) -> int | None:
    """Smallest number of networks from which on every number gives the relative sd; None if there is none.

    With few networks a fit would use layers at the edge of the range, where the law overestimates the information.
    """
    place = names.index(parameter)
    enough = [_expected(sampled, names, number)[place] <= relative_sd for number in NUMBERS]
    first = len(NUMBERS) - int(np.argmin(enough[::-1])) if not all(enough) else 0
    return None if first == len(NUMBERS) else math.ceil(NUMBERS[first])


def _expected(sampled: _Layers, names: tuple[str, ...], networks: float) -> Float[np.ndarray, " k"]:
    """Expected standard deviations of a fit to this number of networks.

    They are the larger of those by the information and by the scatter of the scores (`infer._sandwich`), for the layers
    that a fit would use; that of τ0 includes the error of the series.
    """
    times, spread, used = networks / sampled.networks, sampled.spread, len(sampled.spread)
    prior = _prior(names)
    place = names.index("tau0") if "tau0" in names else None
    if place is not None:
        sd = float(marginal_information(times * sampled.information.sum(axis=0), names)[place] ** -0.5)
        used = transitions_allowed(spread, LARGEST_LOGIT, seen=used, sd=sd)
    score = sampled.score[:used]
    inverse = np.linalg.inv(times * sampled.information[:used].sum(axis=0) + prior)
    variance = np.maximum(np.diag(inverse), np.diag(inverse @ (times * score.T @ score + prior) @ inverse))
    if place is not None:
        variance[place] += ((spread[:used] ** 8).sum() / (spread[:used] ** 4).sum()) ** 2
    return np.sqrt(variance)


def _prior(names: tuple[str, ...]) -> Float[np.ndarray, "k k"]:
    """Prior information: that of c₊ + c₋ exceeds the data's; that of the other coordinates is negligible."""
    return np.diag([SLOPES_INFORMATION if name == "c_mean" else 1e-9 for name in names])


def marginal_information[T: (Array, np.ndarray)](
    information: Float[T, "k k"], names: tuple[str, ...]
) -> Float[T, " k"]:
    """Marginal information on each parameter: the inverse of its variance with the other parameters unknown."""
    xp = information.__array_namespace__()
    return 1 / xp.diagonal(xp.linalg.inv(information + _prior(names)))


def network_information(
    layer: AbstractLayer, V0: Float[Array, "m m"], *, width: int, depth: int, key: PRNGKeyArray
) -> Float[Array, "k k"]:
    """Expected Fisher information of a network observed at every layer, by the limit's law; differentiable.

    Networks of one width determine q instead of the gap (see `sdeinfer.parameters`); this is accounted for.

    Arguments:
        layer: a named architecture, with its parameters.
        V0: covariance of the initial tokens, shape (m, m).
        width: n.
        depth: d.
        key: PRNG key of the paths.

    Returns:
        The information in the coordinates `Coordinates.unconstrained`, shape (k, k).
    """
    times = (np.arange(TIMES) + 0.5) / TIMES * depth / width
    # The noise of so few paths exceeds the bias of order 1, whose gradient compiles faster than that of order 2.
    V = simulate(layer, V0, times, paths=PATHS, step=float(times[0]), solver=PSDEuler(), key=key)
    paths = V.reshape(-1, *V0.shape)
    finite = jnp.isfinite(paths).all(axis=(1, 2))
    safe = jnp.where(finite[:, None, None], paths, V0)
    each, used = jax.vmap(lambda V: layer_information(layer, V, width))(safe), finite.astype(V0.dtype)
    if "tau0" in layer.parameters():
        # A fit does not use transitions outside the range of the law; they fade, so that the search is of a smooth one.
        spread = jax.vmap(_spread)(safe) / (LARGEST_LOGIT * layer.parameters()["tau0"] * math.sqrt(width))
        used = used / (1 + spread**FADING)
    slopes = _slopes_at_width(layer, width)
    return depth * slopes.T @ jnp.mean(used[:, None, None] * each, axis=0) @ slopes


def _slopes_at_width(layer: AbstractLayer, width: int) -> Float[Array, "k k"]:
    """Derivatives of the limit's coordinates in those of networks, whose law depends on q instead of the gap."""
    names = tuple(layer.parameters())

    def of_limit(u: Array) -> Array:
        values = layer.coordinates.constrained(u)
        half_sum, half_difference = ((values["c_plus"] + sign * values["c_minus"]) / 2 for sign in (1, -1))
        squares = (1 + half_sum / math.sqrt(width)) ** 2 + half_difference**2 / width
        return u.at[-2].add(-jnp.log(squares) / 2)

    u = layer.coordinates.unconstrained(layer.parameters())
    return jax.jacfwd(of_limit)(u) if "c_plus" in names else jnp.eye(len(u))


def layer_information(layer: AbstractLayer, V: Float[Array, "m m"], width: int) -> Float[Array, "k k"]:
    """Fisher information of one layer starting from V, by the limit's law."""
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


@eqx.filter_jit
def _information_lost(
    x: Float[Array | np.ndarray, " p"], layer: AbstractLayer, *, tokens: int, width: int, depth: int, place: int
) -> tuple[tuple[Array, tuple[Array, Array]], Array]:
    """−log of a parameter's information at tokens of the shape x, with these tokens and all information; its gradient.

    It is one function for all keys, so that the tokens of a design do not depend on the key.
    """

    def lost(x: Array) -> tuple[Array, tuple[Array, Array]]:
        V0 = _tokens_at(x, layer, tokens, width)
        information = network_information(layer, V0, width=width, depth=depth, key=jr.key(0))
        own = marginal_information(NOMINAL * information, tuple(layer.coordinates.sampled))
        return -jnp.log(own[place]), (V0, information)

    return jax.value_and_grad(lost, has_aux=True)(x)


def _starts(tokens: int) -> list[Float[np.ndarray, " p"]]:
    """Where the search for tokens starts: different ones; and copies of one token, of which some are turned round.

    The information has several local maxima. The largest is most often between the last two starts.
    """
    rows, columns = pairs(tokens)
    starts = [vech(np.eye(tokens) + 0.1 * np.tri(tokens))]
    for turned in sorted({0, 1, tokens // 2}):
        L = 0.1 * np.eye(tokens)
        L[:, 0] = np.where(np.arange(tokens) < turned, -1.0, 1.0)
        starts.append(L[columns, rows])
    return starts


def _tokens_at(x: Float[Array, " p"], layer: AbstractLayer, tokens: int, width: int) -> Float[Array, "m m"]:
    """The covariance with shape given by x, scaled to the spread `SPREAD` of the logits."""
    rows, columns = pairs(tokens)
    L = jnp.zeros((tokens, tokens)).at[columns, rows].set(x)
    V = L @ L.T
    V = V + RIDGE * jnp.trace(V) / tokens * jnp.eye(tokens)
    if "tau0" not in layer.parameters():
        return V * tokens / jnp.trace(V)
    return V * (SPREAD * layer.parameters()["tau0"] * math.sqrt(width) / _spread(V))


def _spread(V: Float[Array, "m m"]) -> Float[Array, ""]:
    """Spread of the logits for n = τ0 = 1 (see `infer.logit_spread`)."""
    tokens = len(V)
    return jnp.sqrt(jnp.max(jnp.diagonal(V)) * jnp.trace(centre(V)) / max(tokens - 1, 1))
