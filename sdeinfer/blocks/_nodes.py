"""Quasi-random normal variables: the nodes of expectations over a few Gaussian vectors."""

import functools

import numpy as np
from jaxtyping import Float
from scipy.interpolate import CubicSpline
from scipy.special import gammaincinv, ndtr, ndtri

LARGEST_DIMENSION = 16_384
"""Largest dimension of the nodes; SciPy's Sobol sequence ends at 21,201."""


@functools.lru_cache(maxsize=4)
def uniform_nodes(dimension: int, log2: int, seed: int = 0) -> Float[np.ndarray, "nodes dimension"]:
    """2^`log2` points of a scrambled Sobol sequence in the open unit cube, read-only.

    Arguments:
        dimension: number of coordinates.
        log2: logarithm of the number of points, so that the sequence is balanced.
        seed: number of the scrambling; means over two scramblings are independent and unbiased.
    """
    from scipy.stats import qmc  # noqa: PLC0415 half a second

    points = qmc.Sobol(dimension, scramble=True, rng=np.random.default_rng([seed, dimension])).random_base2(log2)
    # A coordinate of 0 has probability 2⁻³⁰.
    points = np.clip(points, 2.0**-31, 1 - 2.0**-31)
    points.setflags(write=False)
    return points


def normal_nodes(dimension: int, log2: int, seed: int = 0) -> Float[np.ndarray, "nodes dimension"]:
    """The same as standard normals."""
    return ndtri(uniform_nodes(dimension, log2, seed))


def wishart_factors(
    uniforms: Float[np.ndarray, "nodes p"], tokens: int, freedom: int
) -> Float[np.ndarray, "nodes m m"]:
    """Bartlett's factors of Wishart matrices from uniform numbers; see `layers.wishart_factor`."""
    B = np.zeros((len(uniforms), tokens, tokens))
    a, b = np.tril_indices(tokens, -1)
    B[:, a, b] = ndtri(uniforms[:, tokens:])
    for k in range(min(tokens, freedom)):
        B[:, k, k] = _chi_quantile(freedom - k)(ndtri(uniforms[:, k]))
    B[:, :, freedom:] = 0.0
    return B


@functools.lru_cache(maxsize=256)
def _chi_quantile(freedom: int) -> CubicSpline:
    """The quantile of a chi variable at that of a normal variable; to 1e-7, in a seventh of SciPy's time."""
    z = np.linspace(-6.5, 6.5, 521)
    # A chi-square variable of ν degrees of freedom is twice a gamma variable of ν/2.
    return CubicSpline(z, np.sqrt(2 * gammaincinv(freedom / 2, ndtr(z))))
