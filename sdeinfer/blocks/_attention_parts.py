"""The parts of S of self-attention at quasi-random nodes, for fits. Tests: `tests/blocks/test_law.py`."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from scipy.special import ndtri

from sdeinfer.blocks._branch import projected, split_nodes, wishart_factors
from sdeinfer.blocks._law import MatrixMoments, fourth_moments, moments_of_draws
from sdeinfer.covariance._matrix import vech

if TYPE_CHECKING:
    from sdeinfer.blocks._attention import SelfAttention


class AttentionNodes(NamedTuple):
    """Random numbers of parts of attention, each a group of heads with common keys and values.

    Attributes:
        keys: normals of all features, or a factor of their Wishart matrix where the products alone count (k = m).
        queries: those of each head; normals along the keys where the products alone count.
        values: a factor of their Wishart matrix; normals of all features for gated heads (v = d_k).
        members: the nodes of each group in random order.
        other_keys: a factor of the Wishart matrix of the keys of all other groups, for norms over all heads.
        other_queries: that of the queries of all other groups.
        gates: normals of the gates of each head.
    """

    keys: Float[Any, "nodes m k"]
    queries: Float[Any, "nodes heads m k"]
    values: Float[Any, "nodes m v"]
    members: Int[Any, "groups nodes"]
    other_keys: Float[Any, "nodes m m"] | None = None
    other_queries: Float[Any, "nodes m m"] | None = None
    gates: Float[Any, "nodes heads m v"] | None = None


def attention_nodes(attention: "SelfAttention", tokens: int, size: int, *, log2: int, seed: int) -> AttentionNodes:
    """Random numbers of 2^`log2` groups of heads with `size` features."""
    shared, groups, gated = attention.heads // attention.groups, attention.groups, attention.gate is not None
    explicit = attention.explicit_nodes
    p, k = tokens * (tokens + 1) // 2, size if explicit else tokens
    rng = np.random.default_rng([seed, tokens, size])
    members = np.stack([rng.permutation(2**log2) for _ in range(groups)])
    others = p if attention.qk_norm == "all" and groups > 1 else 0
    dimensions = [
        tokens * size if explicit else p,  # keys
        shared * tokens * k,  # queries
        tokens * size if gated else p,  # values
        shared * tokens * size if gated else 0,  # gates
        others,  # squares of the keys of other groups
        others,  # those of their queries
    ]
    keys, queries, values, gates, *squares = split_nodes(dimensions, log2, seed, rng)
    count, freedoms = 2**log2, ((groups - 1) * size, (groups - 1) * shared * size)
    pairs = zip(squares, freedoms, strict=True)
    other_keys, other_queries = (wishart_factors(x, tokens, nu) if others else None for x, nu in pairs)
    return AttentionNodes(
        keys=ndtri(keys).reshape(count, tokens, size) if explicit else wishart_factors(keys, tokens, size),
        queries=ndtri(queries).reshape(count, shared, tokens, k),
        values=ndtri(values).reshape(count, tokens, size) if gated else wishart_factors(values, tokens, size),
        members=members,
        other_keys=other_keys,
        other_queries=other_queries,
        gates=ndtri(gates).reshape(count, shared, tokens, size) if gated else None,
    )


@dataclasses.dataclass(frozen=True)
class AttentionParts:
    """S of one group of heads of `size` features at each node, given the covariance V of what the branch reads."""

    attention: "SelfAttention"
    V: Float[Array, "m m"]
    nodes: AttentionNodes
    size: Any

    def moments(self) -> MatrixMoments:
        """Mean and covariance of the mean of all groups; values of gated heads are drawn, others integrated out."""
        tokens, groups, A = len(self.V), self.attention.groups, self._probabilities()
        h = A @ self._factor(self.attention.gain)
        count, shared = A.shape[:2]
        if self.attention.gate is not None:
            s = self._gates()
            of_gates = jnp.einsum("rhak,rhbk->ab", s, s) / math.prod(s[..., 0, :].shape)
            mean = jnp.einsum("rhai,rhbi->ab", h, h) / (shared * count) * of_gates
            return MatrixMoments(mean, moments_of_draws(vech(self.draws())).covariance / groups)
        # P is A_h G A_h′ᵀ for two heads of a group; S has the mean of those with h = h′ given the softmax.
        P = jnp.einsum("rhai,rgbi->rhgab", h, h)
        mean, covariance = moments_of_draws(vech(jnp.einsum("rhhab->rab", P) / shared))
        of_values = fourth_moments(P.reshape(-1, tokens, tokens)) / (shared**2 * self.size)
        return MatrixMoments(mean, (covariance + of_values / count) / groups)

    def draws(self) -> Float[Array, "nodes m m"]:
        """S of one group, with values drawn."""
        A = self._probabilities()
        h = jnp.einsum("rhai,ij,rjk->rhak", A, self._factor(self.attention.gain), self.nodes.values)
        if self.attention.gate is not None:
            h = h * self._gates()
        return jnp.einsum("rhak,rhbk->rab", h, h) / (A.shape[1] * self.size)

    def _factor(self, gain: Any) -> Float[Array, "m m"]:
        return jnp.linalg.cholesky(projected(self.V, gain, self.attention.bias))

    def _gates(self) -> Float[Array, "nodes heads m v"]:
        L = self._factor(self.attention.gate)
        return jax.nn.sigmoid(jnp.einsum("ai,rhik->rhak", L, self.nodes.gates))

    def _probabilities(self) -> Float[Array, "nodes heads m m"]:
        attention, nodes = self.attention, self.nodes
        L, softmax = self._factor(attention.gain), attention.softmax(self.size)
        if not attention.explicit_nodes:
            return softmax(jnp.einsum("ai,rhij,rkj,bk->rhab", L, nodes.queries, nodes.keys, L))
        q = jnp.einsum("ai,rhik->rhak", L, nodes.queries)
        k = jnp.einsum("ai,rik->rak", L, nodes.keys)[:, None]
        if attention.qk_norm is not None:
            q = q * self._over_root_mean_square(q, L, nodes.other_queries)
            k = k * self._over_root_mean_square(k, L, nodes.other_keys)
        return softmax(jnp.einsum("rhak,rgbk->rhab", attention.turned(q), attention.turned(k)))

    def _over_root_mean_square(
        self, x: Float[Array, "nodes heads m k"], L: Float[Array, "m m"], others: Float[Any, "nodes m m"] | None
    ) -> Float[Array, "nodes one_or_all m 1"]:
        """One over the root mean square of queries or keys, over a head or all heads with those of other groups.

        Groups have a norm over all heads in common; here each has its own others, an error of order 1/n in covariances.
        """
        squares = jnp.square(x).sum(-1, keepdims=True)
        if self.attention.qk_norm == "head":
            return jnp.sqrt(x.shape[-1] / squares)
        squares = squares.sum(1, keepdims=True)
        if others is not None:
            squares = squares + jnp.square(L @ others).sum(-1)[:, None, :, None]
        return jnp.sqrt(x.shape[-1] * x.shape[1] * self.attention.groups / squares)
