"""Quasi-random normal variables: the nodes of expectations over a few Gaussian vectors."""

import functools

import numpy as np
from jaxtyping import Float
from scipy.special import ndtri

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
