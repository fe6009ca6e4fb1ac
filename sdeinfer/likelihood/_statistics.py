"""The data of a full path, reduced to a few hundred numbers a network without loss.

In the log density of a path (see `Transitions`) the data enter through sums over all terms of a feature times a
function of the term's e:

    −½ Σ [ f(θ₁, θ₂) / (a + κ² e) + log(a + κ² e) ],    f = (z − θ₁b₁ − θ₂b₂)², a combination of six products of the
    data.

Both functions of e are interpolated at Chebyshev points in s = log e, so that the sums over terms become sums over some
50 nodes with weights made once, by one pass over the data. In s their singularities, a + κ² e = 0, lie at Im s = ±π for
*every* a and κ²: the interpolation converges like ρ^{−J}, ρ = π/H + √(1 + π²/H²), for data with log e in an interval of
half-width H, uniformly in the parameters. J is chosen for ρ^{−J} ≤ 1e-13, relative to the function's largest value.

One node stands apart, at e = 0: Lᵀ H_m L has an eigenvalue 0, so one term of every transition is there, up to rounding.
"""

import math

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sdeinfer.likelihood._transitions import Transitions

ROUNDING = 64
"""An eigenvalue δ below this multiple of eps times the largest is a zero that was rounded; e goes with its square."""

ACCURACY = 1e-13
NODES = (16, 32, 48, 64, 96, 128, 192)
CHUNK = 2**16


class PathStatistics(eqx.Module):
    """Sufficient statistics of observed paths under every shaped architecture; those of parts of a path add up.

    Attributes:
        weights: sums over a network's terms of 1, z², −2zb₁, −2zb₂, b₁², 2b₁b₂, b₂² at each node; shape (networks, 7,
            nodes).
        nodes: values of e, the first of them 0; shape (nodes,).
        constant: what the log density has beside them: log |∂z/∂dV| − (number of terms) ½ log 2π; shape (networks,).
    """

    weights: Float[Array, "networks 7 nodes"]
    nodes: Float[Array, " nodes"]
    constant: Float[Array, " networks"]

    @property
    def networks(self) -> int:
        """How many networks."""
        return self.weights.shape[0]


def path_statistics(path: Transitions, *, nodes: int | None = None) -> PathStatistics:
    """Reduce transitions to their sufficient statistics, in one pass and in float64.

    Arguments:
        path: the observed transitions.
        nodes: how many nodes beside the one at e = 0; as many as ρ^{−J} ≤ 1e-13 asks for where None.

    Returns:
        The statistics, in the floating-point type of the transitions.
    """
    networks = path.networks
    z, b1, b2, e = (
        np.asarray(term, np.float64).reshape(networks, -1)
        for term in (path.increments, path.attention_drift, path.relu_drift, path.mixing)
    )
    zero = e <= (ROUNDING * jnp.finfo(path.mixing.dtype).eps) ** 2 * e.max()
    lowest, highest = (1.0, 1.0) if zero.all() else (e[~zero].min(), e.max())
    middle, half_width = math.log(lowest * highest) / 2, max(math.log(highest / lowest) / 2, 1e-3)
    count = nodes_needed(half_width) if nodes is None else nodes
    x = np.where(zero, 0.0, (np.log(np.where(zero, 1.0, e)) - middle) / half_width)

    weights = np.zeros((networks, 7, count + 1))
    for network in range(networks):
        for start in range(0, e.shape[1], CHUNK):
            part = (network, slice(start, start + CHUNK))
            features = _features(z[part], b1[part], b2[part])
            at_zero = zero[part]
            weights[network, :, 0] += features[:, at_zero].sum(axis=1)
            weights[network, :, 1:] += features[:, ~at_zero] @ _chebyshev(x[part][~at_zero], count).T
    weights[:, :, 1:] @= _moments_to_nodes(count)
    dtype = path.increments.dtype
    return PathStatistics(
        jnp.asarray(weights, dtype),
        jnp.asarray(np.concatenate([[0.0], np.exp(middle + half_width * np.cos(_angles(count)))]), dtype),
        path.log_jacobian - e.shape[1] * math.log(2 * math.pi) / 2,
    )


def nodes_needed(half_width: float) -> int:
    """The least J in `NODES` with ρ^{−J} ≤ 1e-13, for data with log e in an interval of this half-width."""
    slope = math.pi / half_width
    rho = slope + math.hypot(1.0, slope)
    needed = -math.log(ACCURACY) / math.log(rho)
    return next((count for count in NODES if count >= needed), math.ceil(needed))


def _features(z: np.ndarray, b1: np.ndarray, b2: np.ndarray) -> np.ndarray:
    return np.stack([np.ones_like(z), z * z, -2 * z * b1, -2 * z * b2, b1 * b1, 2 * b1 * b2, b2 * b2])


def _chebyshev(x: np.ndarray, count: int) -> np.ndarray:
    """Chebyshev polynomials T_0, …, T_{count−1} at x in [−1, 1], shape (count, len(x))."""
    T = np.empty((count, len(x)))
    T[0] = 1.0
    T[1:2] = x
    for k in range(2, count):
        T[k] = 2 * x * T[k - 1] - T[k - 2]
    return T


def _moments_to_nodes(count: int) -> np.ndarray:
    """Matrix from sums over T_k to sums over the cardinal functions of interpolation at the Chebyshev points."""
    to_nodes = np.cos(np.arange(count)[:, None] * _angles(count)) * (2 / count)
    to_nodes[0] /= 2
    return to_nodes


def _angles(count: int) -> np.ndarray:
    return (np.arange(count) + 0.5) * math.pi / count
