"""Latent attention: queries, keys and values of compressed tokens (DeepSeek). Tests: `tests/blocks/test_law.py`."""

import math
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray
from scipy.special import ndtri

from sdeinfer._arguments import at_least_one, given, shown
from sdeinfer._files import InputError
from sdeinfer.blocks._attention import SelfAttention
from sdeinfer.blocks._branch import GAIN, AbstractBranch, projection, split_nodes, wishart_factors
from sdeinfer.blocks._law import MatrixMoments, fourth_moments, moments_of_draws
from sdeinfer.blocks._logits import (
    Rotation,
    Softmax,
    is_rotatable,
    other_masks,
    plain_products,
    require_base,
    rotated_products,
)
from sdeinfer.blocks._norms import normalised_covariance, normalised_tokens
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._batched import gram, matmul, total
from sdeinfer.covariance._matrix import vech
from sdeinfer.covariance._pattern import EVERY_TOKEN, require_pattern
from sdeinfer.layers._keys import NetworkKeys
from sdeinfer.layers._wishart import factor, wishart_draws, wishart_factor
from sdeinfer.parameters import Parameter


class LatentNodes(NamedTuple):
    """Random numbers of all heads of networks; factors of Wishart matrices, and normals of rotated features.

    Attributes:
        of_keys: the factor of the compressed keys and values.
        of_queries: that of the compressed queries; zeros without compression.
        shared: normals of the rotated keys, which all heads share.
        keys: the factor of the plain keys of each head.
        queries: normals of its queries along these keys.
        rotated: normals of its rotated queries.
        values: the factor of its values.
    """

    of_keys: Float[Any, "nodes m m"]
    of_queries: Float[Any, "nodes m m"]
    shared: Float[Any, "nodes m r"]
    keys: Float[Any, "nodes heads m m"]
    queries: Float[Any, "nodes heads m m"]
    rotated: Float[Any, "nodes heads m r"]
    values: Float[Any, "nodes heads m m"]


class LatentAttention(AbstractBranch):
    """h: for each head softmax((q kᵀ + q′ k′ᵀ)/(τ √(d_k + r))) v, with q, q′, k and v of compressed tokens.

    Tokens are compressed to `key_rank` features for keys k and values v, and to `query_rank` features for queries, by
    matrices whose outputs have an RMSNorm. Keys k′ are of the tokens themselves, rotated by their positions, and shared
    by all heads. Given the compressed tokens the heads are independent; so S is no mean of independent parts.

    Attributes:
        temperature: τ.
        gain: w = rank σ² of plain queries, keys and values, whose compressed tokens have mean squares of 1.
        rotated_gain: n σ² of the rotated keys.
        heads: number H of heads.
        head_size: d_k, the number of plain features of a query or key.
        rotated_size: r, that of rotated ones.
        value_size: number of features of a head's values; d_k if None.
        key_rank: number of compressed features of keys and values.
        query_rank: that of queries; None for queries of the tokens themselves.
        rope: base of the rotations.
        pattern: which tokens each token attends to.
    """

    kind: ClassVar[str] = "attention"
    shape: ClassVar[Parameter] = SelfAttention.shape

    temperature: Float[Any, ""] = SelfAttention.shape.field(default=1.0)
    gain: Float[Any, ""] = eqx.field(converter=GAIN.checked, default=1.0)
    rotated_gain: Float[Any, ""] = eqx.field(converter=GAIN.checked, default=1.0)
    heads: int = eqx.field(default=1, static=True)
    head_size: int = eqx.field(default=128, static=True)
    rotated_size: int = eqx.field(default=64, static=True)
    value_size: int | None = eqx.field(default=None, static=True)
    key_rank: int = eqx.field(default=512, static=True)
    query_rank: int | None = eqx.field(default=None, static=True)
    rope: float = eqx.field(default=10_000.0, static=True)
    pattern: Pattern = eqx.field(default=EVERY_TOKEN, static=True)

    def __check_init__(self):
        sizes = {"heads": self.heads, "head_size": self.head_size, "key_rank": self.key_rank}
        at_least_one(**sizes, **given(value_size=self.value_size, query_rank=self.query_rank))
        if not is_rotatable(self.rotated_size):
            raise InputError(f"rotated_size: an even number is needed, got {shown(self.rotated_size)}")
        require_base(self.rope)
        require_pattern(self.pattern)

    def alternatives(self, width: int) -> dict[str, AbstractBranch]:
        """Other factors of the logits and masks."""
        del width
        size = self.head_size + self.rotated_size
        changes = {
            "logits have no factor 1/√(d_k + r)": {"temperature": self.temperature / math.sqrt(size)},
            "logits have the factor 1/√(d_k + r) twice": {"temperature": self.temperature * math.sqrt(size)},
            "logits have a factor 1/√d_k": {"temperature": self.temperature * math.sqrt(self.head_size / size)},
        }
        return self.with_changes(changes | other_masks(self.pattern))

    @property
    def log2_nodes(self) -> int:
        """A node has all heads, whose mean has a smaller variance."""
        return max(9, 12 - self.heads.bit_length())

    @property
    def _value_size(self) -> int:
        return self.head_size if self.value_size is None else self.value_size

    @property
    def _softmax(self) -> Softmax:
        return Softmax(self.temperature, self.head_size + self.rotated_size, self.pattern)

    def hidden(self, U: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m u"]:
        """Draw weights and compute h."""
        tokens, heads = len(U), self.heads
        keys = iter(jr.split(key, 7))

        def mapped(X: Array, features: int, gain: Any) -> Float[Array, "m features"]:
            W = jr.normal(next(keys), (X.shape[1], features), U.dtype)
            return projection(X, W, jnp.zeros(features, U.dtype), gain, 0.0)

        def heads_of(X: Array, features: int) -> Float[Array, "heads m features"]:
            return jnp.moveaxis(mapped(X, heads * features, self.gain).reshape(tokens, heads, features), 1, 0)

        of_keys = normalised_tokens(mapped(U, self.key_rank, 1.0), "rms")
        of_queries = U
        if self.query_rank is not None:
            of_queries = normalised_tokens(mapped(U, self.query_rank, 1.0), "rms")
        turned = Rotation.of(self.rope, self.pattern, tokens).turned
        k, v = heads_of(of_keys, self.head_size), heads_of(of_keys, self._value_size)
        q, rotated = heads_of(of_queries, self.head_size), turned(heads_of(of_queries, self.rotated_size))
        shared = turned(mapped(U, self.rotated_size, self.rotated_gain))
        A = self._softmax(q @ k.mT + rotated @ shared.T)
        return jnp.moveaxis(A @ v, 0, 1).reshape(tokens, -1)

    def hidden_covariance(
        self, V: Float[Array, "m m 1 networks"], *, width: Int[Array, ""] | int, keys: NetworkKeys
    ) -> Float[Array, "m m 1 networks"]:
        """The mean over heads of A vvᵀAᵀ/d_v, given the compressed tokens."""
        del width
        tokens, heads = len(V), self.heads
        key_ranks, key_heads, key_planes = keys.split(3)
        ranks = [self.key_rank, *([] if self.query_rank is None else [self.query_rank])]
        drawn = wishart_draws(ranks, tokens=tokens, blocks=1, dtype=V.dtype, keys=key_ranks)
        L = factor(V)
        compressed = [
            normalised_covariance(gram(matmul(L, wishart_factor(rank, drawn.normals[k], drawn.chi[k]))), "rms")
            for k, rank in enumerate(ranks)
        ]
        gain = jnp.asarray(self.gain, V.dtype)
        of_keys = factor(gain * compressed[0])
        of_queries = factor(gain * compressed[1]) if self.query_rank is not None else jnp.sqrt(gain) * L
        sizes = [self.head_size, self._value_size]
        drawn = wishart_draws(sizes, tokens=tokens, blocks=heads, normals=1, dtype=V.dtype, keys=key_heads)
        B, values = (wishart_factor(size, drawn.normals[k], drawn.chi[k]) for k, size in enumerate(sizes))
        plain = plain_products(of_queries, of_keys, size=self.head_size, B=B, inside=drawn.normals[2:])
        rotated = rotated_products(
            of_queries,
            jnp.sqrt(jnp.asarray(self.rotated_gain, V.dtype)) * L,
            Rotation.of(self.rope, self.pattern, tokens),
            self.rotated_size,
            shared=1,
            groups=heads,
            key_groups=1,
            keys=key_planes,
        )
        products = (plain.products + rotated.products)[0]
        A = jnp.moveaxis(self._softmax(jnp.moveaxis(products, (0, 1), (-2, -1))), (-2, -1), (0, 1))
        S = total(gram(matmul(A, matmul(of_keys, values))), axis=2)[:, :, None]
        return S / (heads * jnp.asarray(self._value_size, V.dtype))

    def nodes(self, tokens: int, width: int, *, log2: int, seed: int = 0) -> LatentNodes:
        """Random numbers of all heads of 2^`log2` networks."""
        del width
        heads, p, size = self.heads, tokens * (tokens + 1) // 2, tokens * self.rotated_size
        dimensions = [p, p, size, heads * p, heads * tokens**2, heads * size, heads * p]
        parts = split_nodes(dimensions, log2, seed, np.random.default_rng([seed, tokens]))
        of_keys, of_queries, shared, keys, queries, rotated, values = parts
        count = 2**log2

        def factors(uniforms: np.ndarray, freedom: int) -> Float[np.ndarray, "nodes heads m m"]:
            return wishart_factors(uniforms.reshape(-1, p), tokens, freedom).reshape(count, -1, tokens, tokens)

        return LatentNodes(
            factors(of_keys, self.key_rank)[:, 0],
            factors(of_queries, self.query_rank or 1)[:, 0],
            ndtri(shared).reshape(count, tokens, -1),
            factors(keys, self.head_size),
            ndtri(queries).reshape(count, heads, tokens, tokens),
            ndtri(rotated).reshape(count, heads, tokens, -1),
            factors(values, self._value_size),
        )

    def moments(self, V: Float[Array, "m m"], nodes: Any, *, width: Int[Array, ""] | int) -> MatrixMoments:
        """Means over nodes; given the softmax, values are normal and are integrated out."""
        del width
        h, tokens = self._weighted_factors(V, nodes), len(V)
        P = jnp.einsum("rhai,rhbi->rhab", h, h)
        mean, covariance = moments_of_draws(vech(P.mean(1)))
        of_values = fourth_moments(P.reshape(-1, tokens, tokens)) / (self.heads**2 * self._value_size)
        return MatrixMoments(mean, covariance + of_values / len(P))

    def hidden_draws(
        self, V: Float[Array, "m m"], nodes: Any, *, width: Int[Array, ""] | int
    ) -> Float[Array, "nodes m m"]:
        """S at each node, with values drawn too."""
        del width
        h = self._weighted_factors(V, nodes) @ nodes.values
        return jnp.einsum("rhak,rhbk->rab", h, h) / (self.heads * self._value_size)

    def _weighted_factors(self, V: Float[Array, "m m"], nodes: LatentNodes) -> Float[Array, "nodes heads m m"]:
        """A L for the factor L of the values' covariance."""
        L, gain = jnp.linalg.cholesky(V), jnp.sqrt(self.gain)

        def compressed(factors: Float[Any, "nodes m m"]) -> Float[Array, "nodes m m"]:
            C = L @ factors
            return C / jnp.linalg.norm(C, axis=-1, keepdims=True)

        of_keys = gain * compressed(nodes.of_keys)
        of_queries = gain * (
            jnp.broadcast_to(L, of_keys.shape) if self.query_rank is None else compressed(nodes.of_queries)
        )
        turned = Rotation.of(self.rope, self.pattern, len(V)).turned
        shared = turned(jnp.sqrt(self.rotated_gain) * L @ nodes.shared)
        rotated = turned(jnp.einsum("rai,rhik->rhak", of_queries, nodes.rotated))
        plain = jnp.einsum("rai,rhij,rhkj,rbk->rhab", of_queries, nodes.queries, nodes.keys, of_keys)
        A = self._softmax(plain + jnp.einsum("rhak,rbk->rhab", rotated, shared))
        return jnp.einsum("rhab,rbi->rhai", A, of_keys)
