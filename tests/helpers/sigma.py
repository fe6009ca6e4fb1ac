"""Σ(V) = a Σ_lin(V) + κ² 𝒜(V) of Theorems 3.2 and 4.2 in the package's coordinates, to sample from and to invert."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from helpers.cases import matrix_of
from helpers.internals import pairs, unvech, vech

from sdeinfer.covariance import coordinates


class Sigma(NamedTuple):
    """The coordinates, and a and κ²."""

    at: Any
    linear: Any
    attention: Any

    @property
    def std(self):
        """Standard deviations of Z_ij, i ≤ j."""
        rows, columns = pairs(self.at.tokens)
        multiplicity = jnp.where(rows == columns, 2.0, 1.0).astype(self.at.cholesky.dtype)
        return jnp.sqrt(multiplicity * (self.linear + self.attention * self.at.mixing))

    def sample(self, xi):
        return self.at.colour(unvech(self.std * xi))

    def whiten(self, dV):
        return vech(self.at.whiten(dV)) / self.std

    def log_det(self):
        """Σ_{i≤j} log var Z_ij + 2(m + 1) Σ_i log L_ii, over the p entries of `vech`."""
        return 2 * jnp.sum(jnp.log(self.std)) + 2 * (self.at.tokens + 1) * self.at.log_volume

    def root(self):
        """Σ^{1/2} as a matrix."""
        return matrix_of(self.sample, len(self.std), dtype=self.std.dtype)


def sigma_of(limit, V) -> Sigma:
    return Sigma(coordinates(V, limit.pattern), limit.linear_noise, limit.attention_noise)
