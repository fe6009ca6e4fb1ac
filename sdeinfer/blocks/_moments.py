"""Mean and covariance of a random symmetric matrix, and fourth moments of normals."""

from typing import NamedTuple

from jaxtyping import Array, Float

from sdeinfer.covariance import pairs


class MatrixMoments(NamedTuple):
    """Mean and covariance of a random symmetric matrix, such as S = hhᵀ/u of a branch's u hidden features h.

    Attributes:
        mean: the mean, K of S.
        covariance: covariance of the entries on and above the diagonal, in the order of `covariance.pairs`; C of S.
    """

    mean: Float[Array, "m m"]
    covariance: Float[Array, "p p"]


def fourth_moments(P: Float[Array, "parts m m"]) -> Float[Array, "p p"]:
    """The sum over parts of P_ac P_bd + P_ad P_bc for entries ab and cd, as of products of normals (Isserlis)."""
    m = P.shape[-1]
    flat = P.reshape(-1, m * m)
    T = (flat.T @ flat).reshape(m, m, m, m)
    a, b = pairs(m)
    rows = a[:, None], b[:, None]
    return T[rows[0], a, rows[1], b] + T[rows[0], b, rows[1], a]
