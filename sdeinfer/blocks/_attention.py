"""The branch of self-attention: softmax as it is, with masks, groups of heads and rotations of positions.

Tests: `tests/blocks/test_law.py`.
"""

import math
from typing import Any, ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray
from scipy.special import ndtri

from sdeinfer._arguments import at_least_one, given, shown
from sdeinfer._files import InputError
from sdeinfer.blocks._branch import (
    GAIN,
    AbstractBranch,
    check_bias,
    projected,
    projection,
    uniform_nodes,
    wishart_factors,
)
from sdeinfer.blocks._law import MatrixMoments, fourth_moments
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._batched import gram, matmul, total, transpose
from sdeinfer.covariance._matrix import square_of, vech
from sdeinfer.covariance._pattern import EVERY_TOKEN, require_pattern
from sdeinfer.layers._keys import NetworkKeys
from sdeinfer.layers._wishart import factor, wishart_draws, wishart_factor
from sdeinfer.parameters import Parameter, distributions


class AttentionNodes(NamedTuple):
    """Keys, queries and values of parts of attention, and the nodes of each group of heads in random order."""

    keys: Float[Any, "nodes m k"]
    queries: Float[Any, "nodes heads m k"]
    values: Float[Any, "nodes m m"]
    members: Int[Any, "groups nodes"]


class SelfAttention(AbstractBranch):
    """h: for each head softmax(q kᵀ/(τ √d_k)) v, with masked logits; heads are concatenated.

    Heads that share keys and values, in groups as in GQA and MQA, make one part of S; a part is their mean. The gain of
    the values is a factor of the strength, that of queries and keys one of 1/τ.

    Attributes:
        temperature: τ; √d_k for a softmax without the factor 1/√d_k.
        gain: w = n σ² of queries, keys and values, with weights of standard deviation σ; it is known.
        heads: number H of heads.
        key_value_heads: number of groups of heads with common keys and values; None for H.
        head_size: d_k; n/H if None.
        pattern: which tokens each token attends to.
        rope: base of the rotations of queries and keys by their positions (10,000 in Llama); None for none.
        bias: variance of the biases of queries, keys and values.
    """

    kind: ClassVar[str] = "attention"
    shape: ClassVar[Parameter] = Parameter(
        "temperature", "τ", "softmax temperature over √d_k", "log", lambda: distributions().LogNormal(0.0, 1.0)
    )

    temperature: Float[Any, ""] = shape.field(default=1.0)
    gain: Float[Any, ""] = eqx.field(converter=GAIN.checked, default=1.0)
    heads: int = eqx.field(default=1, static=True)
    key_value_heads: int | None = eqx.field(default=None, static=True)
    head_size: int | None = eqx.field(default=None, static=True)
    pattern: Pattern = eqx.field(default=EVERY_TOKEN, static=True)
    rope: float | None = eqx.field(default=None, static=True)
    bias: float = eqx.field(default=0.0, static=True)

    def __check_init__(self):
        at_least_one(heads=self.heads, **given(key_value_heads=self.key_value_heads, head_size=self.head_size))
        check_bias(self.bias)
        require_pattern(self.pattern)
        if self.heads % self.groups:
            raise InputError(f"key_value_heads: {self.heads} heads are not a multiple of {self.groups}")
        if self.rope is not None and not (isinstance(self.rope, int | float) and 1 < self.rope < math.inf):
            raise InputError(f"rope: a base above 1 is needed, got {shown(self.rope)}")

    @property
    def groups(self) -> int:
        """Number of groups of heads with common keys and values."""
        return self.heads if self.key_value_heads is None else self.key_value_heads

    @property
    def log2_nodes(self) -> int:
        """Rotations need the queries and keys themselves, hundreds of normals, and more nodes for the same error."""
        return 10 if self.rope is None else 12

    def check_width(self, width: int) -> None:
        """Raise an InputError for a width that is not a multiple of the heads, and for rotations of odd d_k."""
        if self.head_size is None and width % self.heads:
            raise InputError(f"heads: the width {width} is not a multiple of {self.heads}; or give head_size")
        if self.rope is not None and self._head_size(width) % 2:
            raise InputError(f"rope: rotations need an even head_size, got {self._head_size(width)}")

    def hidden(self, U: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m u"]:
        """Draw weights and compute h."""
        tokens, width = U.shape
        size = self._head_size(width)
        counts = (self.heads, self.groups, self.groups)
        drawn = []
        for count, own in zip(counts, jr.split(key, 3), strict=True):
            key_weights, key_biases = jr.split(own)
            W = jr.normal(key_weights, (width, count * size), U.dtype)
            flat = projection(U, W, jr.normal(key_biases, (count * size,), U.dtype), self.gain, self.bias)
            drawn.append(jnp.moveaxis(flat.reshape(tokens, count, size), 1, 0))
        q, k, v = drawn
        if self.rope is not None:
            q, k = self._rotated(q), self._rotated(k)
        k, v = (jnp.repeat(each, self.heads // self.groups, axis=0) for each in (k, v))
        A = self._softmax(jnp.einsum("hac,hbc->hab", q, k), size)
        return jnp.moveaxis(A @ v, 0, 1).reshape(tokens, self.heads * size)

    def hidden_covariance(
        self, V: Float[Array, "m m 1 networks"], *, width: Int[Array, ""] | int, keys: NetworkKeys
    ) -> Float[Array, "m m 1 networks"]:
        """The mean over heads of A vvᵀAᵀ/d_k; products of Gaussian matrices by Bartlett's decomposition."""
        tokens, size, shared = len(V), self._head_size(width), self.heads // self.groups
        drawn = wishart_draws([size, size], tokens=tokens, blocks=self.groups, normals=shared, dtype=V.dtype, keys=keys)
        B, values = (wishart_factor(size, drawn.normals[k], drawn.chi[k]) for k in range(2))
        L = factor(projected(V, self.gain, self.bias))
        Lv, S = matmul(L, values), jnp.zeros_like(V)
        rotated = None if self.rope is None else self._rotated_logits(L, size, keys)
        for head in range(shared):
            if rotated is None:
                logits = matmul(matmul(L, matmul(drawn.normals[2 + head], transpose(B))), transpose(L))
            else:
                logits = rotated[head]
            A = jnp.moveaxis(self._softmax(jnp.moveaxis(logits, (0, 1), (-2, -1)), size), (-2, -1), (0, 1))
            S = S + total(gram(matmul(A, Lv)), axis=2)[:, :, None]
        return S / (self.heads * jnp.asarray(size, V.dtype))

    def nodes(self, tokens: int, width: int, *, log2: int, seed: int = 0) -> AttentionNodes:
        """Keys, queries and values of one group."""
        size, shared = self._head_size(width), self.heads // self.groups
        p = tokens * (tokens + 1) // 2
        rng = np.random.default_rng([seed, tokens, size])
        members = np.stack([rng.permutation(2**log2) for _ in range(self.groups)])
        own = (1 + shared) * tokens * size if self.rope is not None else p + shared * tokens**2
        if own + p > 16_384:  # SciPy's Sobol sequence ends at 21,201 dimensions
            uniforms = rng.random((2**log2, own + p))
        else:
            uniforms = uniform_nodes(own + p, log2, seed)
        normals, values = ndtri(uniforms[:, :own]), wishart_factors(uniforms[:, own:], tokens, size)
        if self.rope is not None:
            drawn = normals.reshape(-1, 1 + shared, tokens, size)
            return AttentionNodes(drawn[:, 0], drawn[:, 1:], values, members)
        keys, queries = wishart_factors(uniforms[:, :p], tokens, size), normals[:, p:]
        return AttentionNodes(keys, queries.reshape(-1, shared, tokens, tokens), values, members)

    def moments(self, V: Float[Array, "m m"], nodes: Any, *, width: Int[Array, ""] | int) -> MatrixMoments:
        """Means over nodes; given the softmax, a part has the moments of normal values, which are integrated out."""
        size, tokens = self._head_size(width), len(V)
        A = self._attention(V, nodes, size)
        h = A @ jnp.linalg.cholesky(projected(V, self.gain, self.bias))
        shared, count = A.shape[1], len(A)
        # P is A_h G A_h′ᵀ for two heads of a group; S has the mean of those with h = h′ given the softmax.
        P = jnp.einsum("rhai,rgbi->rhgab", h, h)
        part = vech(jnp.einsum("rhhab->rab", P) / shared)
        mean = part.mean(0)
        centred = part - mean
        of_values = fourth_moments(P.reshape(-1, tokens, tokens)) / (shared**2 * size)
        return MatrixMoments(mean[square_of(tokens)], (centred.T @ centred + of_values) / (count * self.groups))

    def hidden_draws(
        self, V: Float[Array, "m m"], nodes: Any, *, width: Int[Array, ""] | int
    ) -> Float[Array, "nodes m m"]:
        """Means of parts at random nodes, one for each group of heads, with values drawn too."""
        size = self._head_size(width)
        A = self._attention(V, nodes, size)
        L = jnp.linalg.cholesky(projected(V, self.gain, self.bias))
        h = jnp.einsum("rhai,ij,rjk->rhak", A, L, nodes.values)
        parts = jnp.einsum("rhak,rhbk->rab", h, h) / (A.shape[1] * size)
        return parts[nodes.members].mean(0)

    def _attention(self, V: Float[Array, "m m"], nodes: Any, size: Any) -> Float[Array, "nodes heads m m"]:
        L = jnp.linalg.cholesky(projected(V, self.gain, self.bias))
        if self.rope is None:
            return self._softmax(jnp.einsum("ai,rhij,rkj,bk->rhab", L, nodes.queries, nodes.keys, L), size)
        q = self._rotated(jnp.einsum("ai,rhik->rhak", L, nodes.queries))
        k = self._rotated(jnp.einsum("ai,rik->rak", L, nodes.keys))
        return self._softmax(jnp.einsum("rhak,rbk->rhab", q, k), size)

    def _softmax(self, logits: Float[Array, "... m m"], size: Any) -> Float[Array, "... m m"]:
        scaled = logits / (self.temperature * jnp.sqrt(jnp.asarray(size, logits.dtype)))
        return jax.nn.softmax(jnp.where(self.pattern.mask(logits.shape[-1]), scaled, -jnp.inf), axis=-1)

    def _head_size(self, width: Any) -> Any:
        return width // self.heads if self.head_size is None else self.head_size

    def _positions(self, tokens: int) -> np.ndarray:
        """The place of each token in its prompt."""
        prompts = self.pattern.prompts or (tokens,)
        return np.concatenate([np.arange(length) for length in prompts])

    def _rotated(self, x: Float[Array, "... m k"]) -> Float[Array, "... m k"]:
        """Rotate entries c and c + d_k/2 of token a by the angle of a · base^(−2c/d_k)."""
        tokens, size = x.shape[-2:]
        angles = self._positions(tokens)[:, None] * float(self.rope or 1) ** (-2 * np.arange(size // 2) / size)
        first, second = x[..., : size // 2], x[..., size // 2 :]
        cos, sin = (jnp.asarray(f(angles), x.dtype) for f in (np.cos, np.sin))
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def _rotated_logits(
        self, L: Float[Array, "m m 1 networks"], size: Any, keys: NetworkKeys
    ) -> Float[Array, "heads m m groups networks"]:
        """Logits of rotated queries and keys, as a sum over the planes of rotation."""
        tokens, shared = len(L), self.heads // self.groups
        positions = jnp.asarray(self._positions(tokens), L.dtype)

        def add(plane: Int[Array, ""], logits: Array) -> Array:
            drawn = keys.normals((1 + shared, 2, tokens, 1, self.groups), L.dtype, stream=3, block=plane)
            one, other = ([matmul(L, x)[:, 0] for x in drawn[:, side]] for side in range(2))
            angles = positions * jnp.asarray(self.rope, L.dtype) ** (-2 * plane / jnp.asarray(size, L.dtype))
            turned = (angles[:, None] - angles)[:, :, None, None]
            cos, sin = jnp.cos(turned), jnp.sin(turned)
            (k, other_k), (q, other_q) = (one[0], other[0]), (one[1:], other[1:])
            straight = jnp.stack([a[:, None] * k + b[:, None] * other_k for a, b in zip(q, other_q, strict=True)])
            across = jnp.stack([a[:, None] * other_k - b[:, None] * k for a, b in zip(q, other_q, strict=True)])
            return logits + cos * straight + sin * across

        start = jnp.zeros((shared, tokens, tokens, self.groups, L.shape[-1]), L.dtype)
        return jax.lax.fori_loop(0, size // 2, add, start)
