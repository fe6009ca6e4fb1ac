"""Design of data: the tokens and the number of networks that determine a parameter to a given precision.

The information on τ0 grows with the fourth power of V/τ0², but so do the omitted terms of the softmax expansion
(`infer.in_range`): small tokens need many networks, and large tokens put most layers outside the range of the law. For
some shapes and sizes of tokens, networks are sampled, and the precision of a fit to them is computed; the tokens that
need the fewest networks win. Tokens from a search by gradients of the information need as many, up to 10 %.
"""

import dataclasses
import math
from typing import NamedTuple

import jax.random as jr
import numpy as np
import pandas as pd
from jaxtyping import Float, PRNGKeyArray

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer._progress import phase, with_progress_line
from sdeinfer.infer import LARGEST_LOGIT, innovations, law_at, logit_spread, require_identifiable, transitions_allowed
from sdeinfer.layers import AbstractLayer, Architecture, architecture_of_layer
from sdeinfer.likelihood import any_transitions, used_of, with_used
from sdeinfer.networks import sample_networks

SLOPES_INFORMATION = 0.5
"""Information of the default prior on (c₊ + c₋)/2; networks of one width determine only q."""

SPREAD = 0.3
"""Spread of the logits at the start of networks of tokens of size 1."""

SIZES = np.geomspace(0.5, 1.6, 7)
"""Multiples of V0 that are compared."""

CORRELATION = 0.5
"""Absolute correlation of the tokens that are not uncorrelated. Nearly collinear tokens are more informative under the
limit's law, but attention to their small differences is outside the range of the law of finite width."""

LAYERS, SEARCHED = 8192, 2048
"""Numbers of layers that are sampled: at the tokens of the plan, and at each of those among which they are chosen."""

NUMBERS = np.geomspace(1, 1e8, 769)
"""Candidate numbers of networks, in steps of 2.4 %."""


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
    """Find informative tokens for a parameter, and the number of networks for a given relative sd.

    The tokens have equal norms and are uncorrelated, or have correlations of ±½.

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
    require_identifiable(architecture, tokens)
    sizes = SIZES if "tau0" in names else (1.0,)
    candidates = [size * V for V in _shapes(layer, tokens, width) for size in sizes]
    found = []
    for number, V0 in enumerate(candidates):
        phase(f"searching for tokens, {number} of {len(candidates)}")
        # With one key for all candidates and calls, the tokens do not depend on the key of the networks.
        sampled = _sample(layer, architecture, V0, jr.key(0), width=width, depth=depth, layers=SEARCHED)
        networks = _networks(sampled, names, parameter, relative_sd)
        found.append((math.inf if networks is None else networks, number))
    phase("counting networks")
    V0 = candidates[min(found)[1]]
    sampled = _sample(layer, architecture, V0, key, width=width, depth=depth)
    networks = _networks(sampled, names, parameter, relative_sd)
    if networks is None:
        raise InputError(
            f"relative_sd: no number of networks of width {width} determines {parameter} to {relative_sd:g}"
        )
    expected = pd.Series(_expected(sampled, names, np.array([float(networks)]))[0], index=list(names)).drop(
        "c_mean", errors="ignore"
    )
    return Design(V0, width, depth, networks, expected)


def _shapes(layer: AbstractLayer, tokens: int, width: int) -> list[Float[np.ndarray, "m m"]]:
    """Tokens of equal norms: uncorrelated; or correlated, with none, one or half of them turned round."""
    turned = [np.where(np.arange(tokens) < number, -1.0, 1.0) for number in sorted({0, 1, tokens // 2})]
    unit = np.eye(tokens)
    shapes = [unit, *((1 - CORRELATION) * unit + CORRELATION * np.outer(s, s) for s in turned)]
    if "tau0" not in layer.parameters():
        return shapes
    largest = SPREAD * float(layer.parameters()["tau0"])
    spreads = logit_spread(np.stack(shapes), np.full(len(shapes), width))
    return [V * largest / spread for V, spread in zip(shapes, spreads, strict=True)]


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
    layer: AbstractLayer,
    architecture: Architecture,
    V0: np.ndarray,
    key: PRNGKeyArray,
    *,
    width: int,
    depth: int,
    layers: int = LAYERS,
) -> _Layers:
    networks = math.ceil(layers / depth)
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
    enough = _expected(sampled, names, NUMBERS)[:, names.index(parameter)] <= relative_sd
    first = len(NUMBERS) - int(np.argmin(enough[::-1])) if not enough.all() else 0
    return None if first == len(NUMBERS) else math.ceil(NUMBERS[first])


def _expected(
    sampled: _Layers, names: tuple[str, ...], networks: Float[np.ndarray, " numbers"]
) -> Float[np.ndarray, "numbers k"]:
    """Expected standard deviations of fits to these numbers of networks.

    They are the larger of those by the information and by the scatter of the scores (`infer._sandwich`), for the layers
    that a fit would use; that of τ0 includes the error of the series.
    """
    times, spread = networks[:, None, None] / sampled.networks, sampled.spread
    # Sums over the layers of the smallest spreads, by how many they are.
    information, scatter = (
        np.cumsum(of_layer, axis=0)
        for of_layer in (sampled.information, sampled.score[:, :, None] * sampled.score[:, None])
    )
    last = np.full(len(networks), len(spread) - 1)
    place = names.index("tau0") if "tau0" in names else None
    if place is not None:
        sds = marginal_information(times * information[-1], names)[:, place] ** -0.5
        last = np.array([transitions_allowed(spread, LARGEST_LOGIT, seen=len(spread), sd=sd) for sd in sds]) - 1
    prior = _prior(names)
    inverse = np.linalg.inv(times * information[last] + prior)
    both = inverse, inverse @ (times * scatter[last] + prior) @ inverse
    variance = np.maximum(*(np.diagonal(each, axis1=1, axis2=2) for each in both))
    variance[last < 0] = np.inf
    if place is not None:
        variance[:, place] += ((np.cumsum(spread**8) / np.cumsum(spread**4))[last]) ** 2
    return np.sqrt(variance)


def _prior(names: tuple[str, ...]) -> Float[np.ndarray, "k k"]:
    """Prior information: that of c₊ + c₋ exceeds the data's; that of the other coordinates is negligible."""
    return np.diag([SLOPES_INFORMATION if name == "c_mean" else 1e-9 for name in names])


def marginal_information(
    information: Float[np.ndarray, "*batch k k"], names: tuple[str, ...]
) -> Float[np.ndarray, "*batch k"]:
    """Marginal information on each parameter: the inverse of its variance with the other parameters unknown."""
    return 1 / np.diagonal(np.linalg.inv(information + _prior(names)), axis1=-2, axis2=-1)
