"""Fourth moments of |h| for h ~ N(0, V), which the kink of a ReLU adds to variances with the coefficient q².

E[h_a² |h_c h_d|] has a closed form; E|h_a h_b h_c h_d| of four different tokens has none, and `absolute_squares` and
`excess_of_repeated` replace it by the moment of a normal with the mean and the covariance of |h|. Along the difference
of nearly equal tokens, or where V is nearly singular, Q⁻¹ amplifies the error of that replacement without bound: the
variance of five near copies was 10⁵ times too large. Quadrature is not amplified, since its |h| are those of actual h,
but it is less accurate for other V. The moments are therefore the closed forms where the quadrature confirms them.
Tests: `tests/layers/test_pattern_order.py`.
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Float

from sdeinfer.covariance._diffusion import spectrum

NODES = 512
"""Number of nodes of the quadrature, a power of two; they give the moments to 5 to 25 % of 1 plus their size."""

LARGEST_ERROR = 0.25
"""Largest distance from the quadrature, relative to 1 plus it, at which closed forms are confirmed."""

CLOSED_FORM_TOKENS, BENIGN_MOMENT = 3, 3.0
"""Largest number of tokens for which the closed forms are exact; and the largest moment of a V for which quadrature is
left out, since the error of the replacement is not amplified there."""


@functools.lru_cache(maxsize=64)
def normal_nodes(tokens: int) -> Float[np.ndarray, "nodes m"]:
    """Standard normals by a scrambled Sobol sequence, with mean 0 and covariance I."""
    from scipy.special import ndtri
    from scipy.stats import qmc

    z = ndtri(qmc.Sobol(tokens, scramble=True, rng=np.random.default_rng(0)).random(NODES))
    z = z - z.mean(axis=0)
    return np.linalg.solve(np.linalg.cholesky(z.T @ z / NODES), z.T).T


def excess_products(
    Q: Float[Any, "... m m"], R: Float[Any, "... m m"], closed: Float[Any, "... m m"]
) -> Float[Any, "... m m"]:
    """E[(u_i u_j − g_i g_j)²]/(1 + [i = j]) of g = Rh and u = R|h|, by closed forms or by quadrature."""
    z = normal_nodes(Q.shape[-1]).astype(Q.dtype)

    def checked(Q: Any, R: Any, closed: Any) -> Any:
        xp = Q.__array_namespace__()
        h = z @ _oriented(Q).mT
        g, u = h @ R.mT, xp.abs(h) @ R.mT
        uu, gg, ug = ((x * y).mT @ (x * y) / NODES for x, y in ((u, u), (g, g), (u, g)))
        return _checked(closed, (uu + gg - 2 * ug) / (1 + np.eye(Q.shape[-1], dtype=Q.dtype)))

    return closed if Q.shape[-1] <= CLOSED_FORM_TOKENS else _where_amplified(checked, closed, 2, Q, R)


def excess_forms(
    V: Float[Any, "... m m"], W: Float[Any, "... p m m"], closed: Float[Any, "... p"]
) -> Float[Any, "... p"]:
    """E[(|h|ᵀW_q|h| − hᵀW_qh)²], by closed forms or by quadrature."""
    z = normal_nodes(V.shape[-1]).astype(V.dtype)

    def checked(V: Any, W: Any, closed: Any) -> Any:
        xp, coordinates = V.__array_namespace__(), spectrum(V)
        h = z @ _oriented(coordinates.cholesky @ coordinates.rotation).mT
        products = xp.abs(h)[..., :, None] * xp.abs(h)[..., None, :] - h[..., :, None] * h[..., None, :]
        flat = (X.reshape(*X.shape[:-2], -1) for X in (products, W))
        excess = xp.matmul(next(flat), next(flat).mT)
        return _checked(closed, (excess**2).mean(axis=-2))

    return closed if V.shape[-1] <= CLOSED_FORM_TOKENS else _where_amplified(checked, closed, 1, V, W)


def _oriented(Q: Float[Any, "... m m"]) -> Float[Any, "... m m"]:
    """Spectral coordinates with a sign of each eigenvector that does not depend on the order of the tokens."""
    xp = Q.__array_namespace__()
    return Q * xp.where((Q**3).sum(axis=-2, keepdims=True) < 0, -1, 1)


def _checked(closed: Any, quadrature: Any) -> Any:
    """The closed forms where they agree with the quadrature up to `LARGEST_ERROR`; otherwise the quadrature."""
    xp = closed.__array_namespace__()
    return xp.where(xp.abs(closed - quadrature) <= LARGEST_ERROR * (1 + quadrature), closed, quadrature)


def _where_amplified(checked: Callable[..., Any], closed: Any, axes: int, *arrays: Any) -> Any:
    """Checked moments; NumPy checks only those V whose moments are large."""
    if not isinstance(closed, np.ndarray):
        return checked(*arrays, closed)
    stack = closed.shape[:-axes]
    flat, *others = (x.reshape(-1, *x.shape[len(stack) :]) for x in (closed, *arrays))
    large = np.flatnonzero(~(np.abs(flat).max(axis=tuple(range(1, flat.ndim))) <= BENIGN_MOMENT))
    # Arrays of 2¹⁶ entries at a time stay in the cache.
    flat, at_once = flat.copy(), max(1, 2**16 // (NODES * arrays[0].shape[-1] ** (3 - axes)))
    for start in range(0, len(large), at_once):
        some = large[start : start + at_once]
        flat[some] = checked(*(x[some] for x in others), flat[some])
    return flat.reshape(closed.shape)
