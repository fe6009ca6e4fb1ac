"""A layer of a user's with an activation of its own: one term and one layer, as `docs/guides/layer.md` shows."""

import dataclasses

import jax.numpy as jnp
import jax.random as jr
import numpyro.distributions as dist
from jaxtyping import Array, Float

import sdeinfer as si

KAPPA = si.Parameter("kappa", "κ", "curvature of the activation", "log", lambda: dist.LogNormal(0, 1))


@dataclasses.dataclass(frozen=True)
class CubicDrift(si.terms.AbstractTerm):
    """dV_αβ/dt = c (V_αα + V_ββ − 2) V_αβ, of the activation φ of `TanhMLP` with E φ(g)² = 1 and c = −3κ."""

    def drift(self, c, V):
        norms = jnp.einsum("ii...->i...", V)
        return c * (norms[:, None] + norms[None] - 2) * V

    def flow(self, c, X, h):
        norms = jnp.sum(X * X, axis=1, keepdims=True)  # u = V_αα is logistic: du/dt = 2c (u − 1) u
        return X / jnp.sqrt(norms + (1 - norms) * jnp.exp(2 * c * h))


class TanhMLP(si.layers.AbstractLayer):
    """X′ = φ(X) W/√n with φ(x) = s tanh(x/s) up to a constant, s² = n/(3κ): φ(x) = x − κ x³/n to leading order."""

    kappa: Float[Array, ""] = KAPPA.field()

    def forward(self, X, *, key):
        width = X.shape[1]
        s = jnp.sqrt(width / (3 * self.kappa))
        images = jnp.sqrt(1 + 6 * self.kappa / width) * s * jnp.tanh(X / s)
        return images @ jr.normal(key, (width, width), X.dtype) / jnp.sqrt(width)

    def limit(self):
        return si.layers.Limit(linear_noise=1.0, others={CubicDrift(): -3 * self.kappa})
