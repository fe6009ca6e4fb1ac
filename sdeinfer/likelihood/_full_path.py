"""The law of networks of which every layer is observed."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float
from numpyro.distributions import Distribution, constraints

from sdeinfer.layers import Limit
from sdeinfer.likelihood._statistics import PathStatistics


class FullPath(Distribution):
    """Law of observed covariance paths given their initial covariance, as a density of their sufficient statistics.

    One step of the Euler chain over one layer, dt = 1/n, is Gaussian with the drift and the diffusion of Corollary 4.3.
    One batch element is one network; its log density is that of the covariances V_αβ, α ≤ β, after every layer but the
    first.

    Attributes:
        limit: coefficients θ₁, θ₂, a, κ² of the SDE.
        path: the statistics of the data, whose nodes and constants belong to the law.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("limit", "path")
    support = constraints.independent(constraints.real, 2)  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, limit: Limit, path: PathStatistics, *, validate_args: bool | None = None):
        self.limit = limit
        self.path = path
        networks, features, nodes = path.weights.shape
        super().__init__((networks,), (features, nodes), validate_args=validate_args)

    def log_prob(self, value: ArrayLike, intermediates: list | None = None) -> Float[Array, " networks"]:
        """Log density of each network; `value` holds `PathStatistics.weights`, shape (networks, 7, nodes)."""
        del intermediates
        theta1, theta2 = self.limit.attention_drift, self.limit.relu_drift
        variance = self.limit.linear_noise + self.limit.attention_noise * self.path.nodes
        one = jnp.ones_like(theta1)
        square = jnp.stack([one, theta1, theta2, theta1**2, theta1 * theta2, theta2**2])
        kernel = jnp.concatenate([jnp.log(variance)[None], square[:, None] / variance])
        weights = jnp.reshape(value, (self.path.networks, -1))
        return self.path.constant - weights @ kernel.reshape(-1) / 2
