"""Networks outside the theory, unshaped or with shared weights: for Figure 1 of the paper, and to plant failures."""

import math
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import Array, Float, Key, PRNGKeyArray

import sdeinfer as si
from sdeinfer.layers import shaped_relu
from sdeinfer.networks import tokens_with_covariance


class Baseline(eqx.Module):
    """A layer of attention and then feed-forward, X′ = λX + γ f(X); each switch removes one modification of Eq. 11.

    Attributes:
        gamma: γ, the factor of the branches.
        shortcut: λ, the factor of the shortcut; None for √(1 − γ²). A common Pre-LN Transformer has λ = γ = 1.
        tau0: τ0 of the shaped temperature τ0 √(n n_k); unused with the usual temperature.
        c: c₊ = −c₋ of the shaped ReLU; None for a plain ReLU.
        identity: add I to A (Eq. 9).
        centred: subtract 11ᵀ/m from A.
        temperature: "shaped", or "usual" for √n_k.
        layer_norm: normalise the tokens at the start of each branch (Pre-LN).
        weights: standard deviation of the weights.
        shared: give every layer of a network the same weights.
    """

    gamma: float = 0.5
    shortcut: float | None = None
    tau0: float = 1.0
    c: float | None = 1.0
    identity: bool = True
    centred: bool = True
    temperature: Literal["shaped", "usual"] = "shaped"
    layer_norm: bool = False
    weights: float = 1.0
    shared: bool = False

    def forward(self, X: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m n"]:
        """Apply one layer."""
        shortcut = math.sqrt(1 - self.gamma**2) if self.shortcut is None else self.shortcut
        for branch, branch_key in zip((self._attention, self._feedforward), jr.split(key), strict=True):
            X = shortcut * X + self.gamma * branch(_normalised(X) if self.layer_norm else X, branch_key)
        return X

    def _attention(self, X: Float[Array, "m n"], key: PRNGKeyArray) -> Float[Array, "m n"]:
        tokens, width = X.shape
        queries, keys, values = (X @ self._weights(k, width) for k in jr.split(key, 3))
        tau = self.tau0 * width if self.temperature == "shaped" else math.sqrt(width)
        A = jax.nn.softmax(queries @ keys.T / tau, axis=-1)
        A = A + (jnp.eye(tokens) if self.identity else 0) - (1 / tokens if self.centred else 0)
        return A @ values

    def _feedforward(self, X: Float[Array, "m n"], key: PRNGKeyArray) -> Float[Array, "m n"]:
        width, (key_pre, key_post) = X.shape[1], jr.split(key)
        h = X @ self._weights(key_pre, width)
        # The slopes 1 and 0 of a plain ReLU are those of c₊ = 0 and c₋ = −√n.
        c_plus, c_minus = (0.0, -math.sqrt(width)) if self.c is None else (self.c, -self.c)
        hidden = shaped_relu(h, jnp.asarray(c_plus), jnp.asarray(c_minus), width)
        return hidden @ self._weights(key_post, width)

    def _weights(self, key: PRNGKeyArray, width: int) -> Float[Array, "n n"]:
        return self.weights * jr.normal(key, (width, width)) / math.sqrt(width)


def sample_baseline(
    baseline: Baseline, V0: Float[Array, "m m"], *, width: int, depth: int, networks: int, key: PRNGKeyArray
) -> xr.Dataset:
    """Draw independent networks with all their weights, and record V = XXᵀ/n after every layer."""
    paths = _paths(baseline, V0, jr.split(key, networks), width=width, depth=depth)
    return si.covariance_dataset(np.asarray(paths), width=width, layers=np.arange(depth + 1))


@eqx.filter_jit
def _paths(baseline: Baseline, V0: Array, keys: Key[Array, " networks"], *, width: int, depth: int) -> Array:
    def network(key: PRNGKeyArray) -> Array:
        key_tokens, key_layers = jr.split(key)
        X = tokens_with_covariance(V0, width=width, key=key_tokens)

        def layer(X: Array, number: Array) -> tuple[Array, Array]:
            X = baseline.forward(X, key=jr.fold_in(key_layers, 0 if baseline.shared else number))
            return X, X @ X.T / width

        _, path = jax.lax.scan(layer, X, jnp.arange(depth))
        return jnp.concatenate([V0[None], path])

    # Sequential, so that memory holds the weights of one layer of one network only.
    return jax.lax.map(network, keys)


def _normalised(X: Float[Array, "m n"]) -> Float[Array, "m n"]:
    centred = X - jnp.mean(X, axis=1, keepdims=True)
    return centred / jnp.sqrt(jnp.mean(centred**2, axis=1, keepdims=True))
