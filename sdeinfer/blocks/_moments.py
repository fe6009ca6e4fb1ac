"""Mean and covariance of a random symmetric matrix, and fourth moments of normals."""

from typing import NamedTuple

from jaxtyping import Array, Float

from sdeinfer.covariance import pairs, square_of


class MatrixMoments(NamedTuple):
    """Mean and covariance of a random symmetric matrix, such as S = hhᵀ/u of a branch's u hidden features h.

    Attributes:
        mean: the mean, K of S.
        covariance: covariance of the entries on and above the diagonal, in the order of `covariance.pairs`; C of S.
    """

    mean: Float[Array, "m m"]
    covariance: Float[Array, "p p"]

    @property
    def full_covariance(self) -> Float[Array, "m m m m"]:
        """The covariance of entries ab and cd, with one axis for each index."""
        place = square_of(len(self.mean))
        return self.covariance[place[:, :, None, None], place[None, None]]


def fourth_moments(P: Float[Array, "parts m m"]) -> Float[Array, "p p"]:
    """The sum over parts of P_ac P_bd + P_ad P_bc for entries ab and cd, as of products of normals (Isserlis)."""
    m = P.shape[-1]
    flat = P.reshape(-1, m * m)
    return paired((flat.T @ flat).reshape(m, m, m, m))


def paired(T: Float[Array, "m m m m"]) -> Float[Array, "p p"]:
    """T_acbd + T_adbc for entries ab and cd."""
    a, b = pairs(len(T))
    rows = a[:, None], b[:, None]
    return T[rows[0], a, rows[1], b] + T[rows[0], b, rows[1], a]
