"""The reduction of transitions to sufficient statistics, in one pass over the data."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from sdeinfer.layers import drift_count
from sdeinfer.likelihood._assumptions import NOTHING_ASSUMED, Assumptions
from sdeinfer.likelihood._chunked_path import ChunkedPath, added
from sdeinfer.likelihood._kernels import quadratic_pairs, rows_of
from sdeinfer.likelihood._layout import Layout, angles, at_zero, path_layout, require_finite, terms_by_block
from sdeinfer.likelihood._statistics import PathStatistics, repeated_widths
from sdeinfer.likelihood._terms import Terms
from sdeinfer.likelihood._transitions import Path

CACHED = 2**20
"""Bytes of the functions of e that are computed at a time for data in chunks."""


def path_statistics(
    path: Path | ChunkedPath,
    layout: Layout | None = None,
    *,
    pooled: bool = False,
    assumptions: Assumptions = NOTHING_ASSUMED,
) -> PathStatistics:
    """Reduce transitions to sufficient statistics, in one pass, in float64, and in memory independent of their number.

    Arguments:
        path: the observed transitions.
        layout: nodes and mean features; `path_layout` if None.
        pooled: sum over the networks of one width directly, as `PathStatistics.pooled` does afterwards; so are
            transitions in chunks in any case.
        assumptions: assumptions of the fit.

    Returns:
        The statistics, in JAX's default floating-point type.

    Raises:
        InputError: if a covariance is so large or small that a term overflows.
    """
    layout = path_layout(path) if layout is None else layout
    widths, width = np.unique(path.width, return_inverse=True)
    padded = repeated_widths(widths)
    pooled = pooled or not path.in_memory
    weights, constant = path.reduced(
        partial(_sums, layout=layout, widths=widths if pooled else None), added, name="statistics"
    )
    groups, weights = len(constant), np.require(weights, requirements="W")
    to_nodes = _moments_to_nodes(layout.nodes)
    for own in weights:  # one at a time: the product is a copy
        own[..., 1:] @= to_nodes
    statistics = dict(
        weights=weights.swapaxes(1, 2),
        nodes=layout.points,
        centre=layout.centre,
        next_order=layout.next_order,
        constant=constant,
        widths=padded,
        width=np.arange(groups) if pooled else width,
        initial=None if pooled else path.initial,
    )
    arrays = jax.device_put(jax.tree.map(_in_default_type, statistics))
    depth = 0 if pooled else int(path.gap.sum())
    return PathStatistics(**arrays, pattern=path.pattern, assumptions=assumptions, depth=depth)


def _sums(
    path: Path, *, layout: Layout, widths: Float[np.ndarray, " widths"] | None
) -> tuple[Float[np.ndarray, "groups p rows nodes"], Float[np.ndarray, " groups"]]:
    """Sums over the transitions of each network, or of each of the widths: of rows times T_k(e), and the constant."""
    p, nodes, group, groups = len(layout.middle), layout.nodes, path.network, len(path.width)
    if widths is not None:
        group, groups = path.width_index(widths), len(repeated_widths(widths))
    weights = np.zeros((groups, p, rows_of(drift_count(path.pattern, path.others)), nodes + 1))
    constant = np.zeros(groups)
    # The functions of so many transitions fit in the cache.
    at_once = max(1, CACHED // (8 * p * (nodes + 1)))
    for block, terms in terms_by_block(path):
        require_finite(vars(terms), path.first + path.network[block])
        np.add.at(constant, group[block], terms.log_jacobian - p * math.log(2 * math.pi) / 2)
        data, e = _rows(terms), terms.mixing
        zero = at_zero(e)
        x = (np.log(np.where(zero, 1.0, e)) - np.where(zero, 0.0, layout.middle)) / layout.half_width
        x, away = np.ascontiguousarray(x.T), np.ascontiguousarray(~zero.T)
        changes = np.flatnonzero(np.diff(group[block], prepend=-1))
        for first, last in itertools.pairwise([*changes, len(block)]):
            for start in range(first, last, at_once):
                some = slice(start, min(start + at_once, last))
                functions = _chebyshev(x[:, some], away[:, some], nodes)
                # (p, rows, transitions) @ (p, transitions, nodes)
                weights[group[block[start]]] += data[:, some].swapaxes(1, 2) @ functions.transpose(1, 2, 0)
    return weights, constant


def _chebyshev(x: np.ndarray, away: np.ndarray, nodes: int) -> Float[np.ndarray, "nodes p transitions"]:
    """Indicator of e = 0, and T_k(x) for the other terms, with the nodes first, so that BLAS takes the strides.

    Arguments:
        x: log e, scaled to [−1, 1]; shape (p, transitions).
        away: whether e is not zero, shape (p, transitions).
        nodes: number of polynomials.
    """
    T = np.empty((nodes + 1, *x.shape))
    T[0], T[1] = ~away, away
    if nodes > 1:
        T[2] = x * away
    double = 2 * x
    for k in range(3, nodes + 1):
        np.multiply(double, T[k - 1], out=T[k])
        T[k] -= T[k - 2]
    return T


def _rows(terms: Terms) -> np.ndarray:
    """The summands of each row, shape (p, transitions, rows)."""
    b = np.concatenate([terms.increments[:, None], terms.drift], axis=1)
    rows = np.stack([np.ones_like(b[:, 0]), *(b[:, s] * b[:, t] for s, t in quadratic_pairs(b.shape[1] - 1))], axis=1)
    return np.ascontiguousarray(rows.transpose(2, 0, 1))


def _in_default_type(x: np.ndarray) -> np.ndarray:
    return np.asarray(x, jnp.result_type(float) if np.issubdtype(x.dtype, np.floating) else jnp.result_type(int))


def _moments_to_nodes(count: int) -> np.ndarray:
    """Matrix that converts sums over T_k to sums over the cardinal functions at the Chebyshev points."""
    to_nodes = np.cos(np.arange(count)[:, None] * angles(count)) * (2 / count)
    to_nodes[0] /= 2
    return to_nodes
