"""The branch of self-attention: softmax as it is, with masks, groups of heads, norms and rotations of queries and keys.

Tests: `tests/blocks/test_law.py`.
"""

import functools
import math
from typing import Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray
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
from sdeinfer.blocks._logits import Products, Rotation, Softmax, plain_products, require_base, rotated_products
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._batched import gram, matmul, total
from sdeinfer.covariance._matrix import square_of, vech
from sdeinfer.covariance._pattern import EVERY_TOKEN, require_pattern
from sdeinfer.layers._keys import NetworkKeys
from sdeinfer.layers._wishart import COLUMNS_AT_ONCE, factor, wishart_draws, wishart_factor
from sdeinfer.parameters import Parameter, distributions

GATES = 5
"""The stream of random numbers of values and gates; see `layers._keys`."""


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


class SelfAttention(AbstractBranch):
    """h: for each head softmax(q kᵀ/(τ √d_k)) v, with masked logits; heads are concatenated.

    Heads that share keys and values, in groups as in GQA and MQA, make one part of S; a part is their mean. The gain of
    the values is a factor of the strength, that of queries and keys one of 1/τ; after norms of queries and keys their
    gain does not matter, and the gains of these norms are factors of 1/τ. The constant ε of norms is left out.

    Attributes:
        temperature: τ; √d_k for a softmax without the factor 1/√d_k.
        gain: w = n σ² of queries, keys and values, with weights of standard deviation σ; it is known.
        heads: number H of heads.
        key_value_heads: number of groups of heads with common keys and values; None for H.
        head_size: d_k; n/H if None.
        pattern: which tokens each token attends to.
        rope: base of the rotations of queries and keys by their positions (10,000 in Llama); None for none.
        rope_size: number of features of each head that are rotated, the first ones (GPT-NeoX); None for all.
        qk_norm: "head" for an RMSNorm of the queries and keys of each head, before rotations (Qwen3, Gemma 3), "all"
            for one over all heads together (OLMo 2); None for none.
        cap: c of logits c tanh(ℓ/c) (Gemma 2); None for none.
        sink: a logit in each row of the softmax, whose probability is lost (gpt-oss has 0); None for none.
        gate: gain of projections u, for heads whose outputs are multiplied by σ(u) (Qwen3-Next); None for none.
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
    rope_size: int | None = eqx.field(default=None, static=True)
    qk_norm: Literal["head", "all"] | None = eqx.field(default=None, static=True)
    cap: float | None = eqx.field(default=None, static=True)
    sink: float | None = eqx.field(default=None, static=True)
    gate: float | None = eqx.field(default=None, static=True)

    def __check_init__(self):
        at_least_one(heads=self.heads, **given(key_value_heads=self.key_value_heads, head_size=self.head_size))
        check_bias(self.bias)
        require_pattern(self.pattern)
        if self.heads % self.groups:
            raise InputError(f"key_value_heads: {self.heads} heads are not a multiple of {self.groups}")
        require_base(self.rope)
        if self.rope_size is not None and (self.rope is None or self.rope_size < 2 or self.rope_size % 2):
            raise InputError(f"rope_size: an even number beside a base is needed, got {shown(self.rope_size)}")
        if self.qk_norm not in ("head", "all", None):
            raise InputError(f"qk_norm: one of head, all, None is needed, got {shown(self.qk_norm)}")
        for name in ("cap", "gate"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise InputError(f"{name}: a positive number is needed, got {shown(value)}")

    @property
    def groups(self) -> int:
        """Number of groups of heads with common keys and values."""
        return self.heads if self.key_value_heads is None else self.key_value_heads

    @property
    def log2_nodes(self) -> int:
        """Rotations and norms need the queries and keys themselves, hundreds of normals, and more nodes."""
        return 12 if self._explicit else 10

    @property
    def _explicit(self) -> bool:
        """Whether nodes are of all features of queries and keys, not of their products alone."""
        return self.rope is not None or self.qk_norm is not None

    def check_width(self, width: int) -> None:
        """Raise an InputError for a width that is not a multiple of the heads, and for rotations of odd d_k."""
        if self.head_size is None and width % self.heads:
            raise InputError(f"heads: the width {width} is not a multiple of {self.heads}; or give head_size")
        size = self._head_size(width)
        if self.rope is not None and self.rope_size is None and size % 2:
            raise InputError(f"rope: rotations need an even head_size, got {size}")
        if self.rope_size is not None and self.rope_size > size:
            raise InputError(f"rope_size: at most {size}, the features of a head, is needed, got {self.rope_size}")

    def hidden(self, U: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m u"]:
        """Draw weights and compute h."""
        tokens, width = U.shape
        size, shared = self._head_size(width), self.heads // self.groups
        key_gates, *keys = jr.split(key, 4)

        def heads_of(gain: ArrayLike, count: int, key: PRNGKeyArray) -> Float[Array, "heads m k"]:
            key_weights, key_biases = jr.split(key)
            W = jr.normal(key_weights, (width, count * size), U.dtype)
            flat = projection(U, W, jr.normal(key_biases, (count * size,), U.dtype), gain, self.bias)
            return jnp.moveaxis(flat.reshape(tokens, count, size), 1, 0)

        counts = (self.heads, self.groups, self.groups)
        q, k, v = (heads_of(self.gain, count, own) for count, own in zip(counts, keys, strict=True))
        q, k = (self._turned(self._normed(x)) for x in (q, k))
        k, v = (jnp.repeat(x, shared, axis=0) for x in (k, v))
        h = self._softmax(size)(jnp.einsum("hac,hbc->hab", q, k)) @ v
        if self.gate is not None:
            h = h * jax.nn.sigmoid(heads_of(self.gate, self.heads, key_gates))
        return jnp.moveaxis(h, 0, 1).reshape(tokens, self.heads * size)

    def hidden_covariance(
        self, V: Float[Array, "m m 1 networks"], *, width: Int[Array, ""] | int, keys: NetworkKeys
    ) -> Float[Array, "m m 1 networks"]:
        """The mean over heads of A vvᵀAᵀ/d_k; products of Gaussian matrices by Bartlett's decomposition."""
        tokens, size, shared = len(V), self._head_size(width), self.heads // self.groups
        L, plain = factor(projected(V, self.gain, self.bias)), self._plain_size(size)
        of_plain = [] if plain is None else [plain, *([] if self.qk_norm is None else [plain - tokens] * shared)]
        freedom = [size, *of_plain]
        drawn = wishart_draws(
            freedom, tokens=tokens, blocks=self.groups, normals=0 if plain is None else shared, dtype=V.dtype, keys=keys
        )
        factors = [wishart_factor(nu, drawn.normals[k], drawn.chi[k]) for k, nu in enumerate(freedom)]
        found = []
        if plain is not None:
            inside = drawn.normals[len(freedom) :]
            found.append(plain_products(L, L, size=plain, B=factors[1], inside=inside, outside=factors[2:]))
        if self.rope is not None:
            rotation, rotated = Rotation.of(self.rope, self.pattern, tokens), self.rope_size or size
            groups = {"shared": shared, "groups": self.groups, "key_groups": self.groups}
            found.append(rotated_products(L, L, rotation, rotated, **groups, keys=keys))
        sums = functools.reduce(Products.with_features, found)
        products = sums.products if self.qk_norm is None else sums.normed(self.qk_norm, size)
        A = jnp.moveaxis(self._softmax(size)(jnp.moveaxis(products, (1, 2), (-2, -1))), (-2, -1), (1, 2))
        if self.gate is not None:
            return self._gated_covariance(A, V, size, keys)
        values, S = matmul(L, factors[0]), jnp.zeros_like(V)
        for of_head in A:
            S = S + total(gram(matmul(of_head, values)), axis=2)[:, :, None]
        return S / (self.heads * jnp.asarray(size, V.dtype))

    def _gated_covariance(
        self,
        A: Float[Array, "shared m m groups networks"],
        V: Float[Array, "m m 1 networks"],
        size: Int[Array, ""] | int,
        keys: NetworkKeys,
    ) -> Float[Array, "m m 1 networks"]:
        """The mean over heads of hhᵀ/d_k for h = A v ⊙ σ(u), a sum over features."""
        tokens, shared = len(V), len(A)
        L, of_gates = factor(projected(V, self.gain, self.bias)), factor(projected(V, self.gate or 0.0, self.bias))

        def add(number: Int[Array, ""], S: Array) -> Array:
            shape = (1 + shared, tokens, COLUMNS_AT_ONCE, self.groups)
            value, *gates = keys.normals(shape, V.dtype, stream=GATES, block=number)
            there = number * COLUMNS_AT_ONCE + jnp.arange(COLUMNS_AT_ONCE) < size
            v = jnp.where(there[:, None, None], matmul(L, value), 0.0)
            for of_head, gate in zip(A, gates, strict=True):
                h = matmul(of_head, v) * jax.nn.sigmoid(matmul(of_gates, gate))
                S = S + total(gram(h), axis=2)[:, :, None]
            return S

        blocks = -(-size // COLUMNS_AT_ONCE)
        return jax.lax.fori_loop(0, blocks, add, jnp.zeros_like(V)) / (self.heads * jnp.asarray(size, V.dtype))

    def nodes(self, tokens: int, width: int, *, log2: int, seed: int = 0) -> AttentionNodes:
        """Keys, queries and values of one group."""
        size, shared = self._head_size(width), self.heads // self.groups
        p, k = tokens * (tokens + 1) // 2, size if self._explicit else tokens
        rng = np.random.default_rng([seed, tokens, size])
        members = np.stack([rng.permutation(2**log2) for _ in range(self.groups)])
        # Keys, queries, values, gates, and the squares of other groups.
        of_keys = tokens * size if self._explicit else p
        of_values = p if self.gate is None else tokens * size
        of_gates = 0 if self.gate is None else shared * tokens * size
        others = p if self.qk_norm == "all" and self.groups > 1 else 0
        counts = np.array([of_keys, shared * tokens * k, of_values, of_gates, others, others])
        if counts.sum() > 16_384:  # SciPy's Sobol sequence ends at 21,201 dimensions
            uniforms = rng.random((2**log2, counts.sum()))
        else:
            uniforms = uniform_nodes(int(counts.sum()), log2, seed)
        keys, queries, values, gates, *squares = np.split(uniforms, np.cumsum(counts)[:-1], axis=1)
        count, features = len(uniforms), (tokens, size)
        freedoms = (self.groups - 1) * size, (self.groups - 1) * shared * size
        of_others = [
            wishart_factors(x, tokens, nu) if others else None for x, nu in zip(squares, freedoms, strict=True)
        ]
        return AttentionNodes(
            ndtri(keys).reshape(count, *features) if self._explicit else wishart_factors(keys, tokens, size),
            ndtri(queries).reshape(count, shared, tokens, k),
            wishart_factors(values, tokens, size) if self.gate is None else ndtri(values).reshape(count, *features),
            members,
            *of_others,
            gates=None if self.gate is None else ndtri(gates).reshape(count, shared, *features),
        )

    def moments(self, V: Float[Array, "m m"], nodes: Any, *, width: Int[Array, ""] | int) -> MatrixMoments:
        """Means over nodes; given the softmax, a part has the moments of normal values, which are integrated out."""
        size, tokens = self._head_size(width), len(V)
        A = self._attention(V, nodes, size)
        h = A @ jnp.linalg.cholesky(projected(V, self.gain, self.bias))
        shared, count = A.shape[1], len(A)
        if self.gate is not None:
            s = self._gates(V, nodes)
            of_gates = jnp.einsum("rhak,rhbk->ab", s, s) / math.prod(s[..., 0, :].shape)
            mean = jnp.einsum("rhai,rhbi->ab", h, h) / (shared * count) * of_gates
            part = vech(self._parts(V, nodes, size))
            centred = part - part.mean(0)
            return MatrixMoments(mean, centred.T @ centred / (count * self.groups))
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
        return self._parts(V, nodes, self._head_size(width))[nodes.members].mean(0)

    def _parts(self, V: Float[Array, "m m"], nodes: AttentionNodes, size: Any) -> Float[Array, "nodes m m"]:
        """S of one group at each node, with values drawn."""
        A = self._attention(V, nodes, size)
        L = jnp.linalg.cholesky(projected(V, self.gain, self.bias))
        h = jnp.einsum("rhai,ij,rjk->rhak", A, L, nodes.values)
        if self.gate is not None:
            h = h * self._gates(V, nodes)
        return jnp.einsum("rhak,rhbk->rab", h, h) / (A.shape[1] * size)

    def _gates(self, V: Float[Array, "m m"], nodes: AttentionNodes) -> Float[Array, "nodes heads m v"]:
        L = jnp.linalg.cholesky(projected(V, self.gate or 0.0, self.bias))
        return jax.nn.sigmoid(jnp.einsum("ai,rhik->rhak", L, nodes.gates))

    def _attention(self, V: Float[Array, "m m"], nodes: Any, size: Any) -> Float[Array, "nodes heads m m"]:
        L, softmax = jnp.linalg.cholesky(projected(V, self.gain, self.bias)), self._softmax(size)
        if not self._explicit:
            return softmax(jnp.einsum("ai,rhij,rkj,bk->rhab", L, nodes.queries, nodes.keys, L))
        q = jnp.einsum("ai,rhik->rhak", L, nodes.queries)
        k = jnp.einsum("ai,rik->rak", L, nodes.keys)[:, None]
        if self.qk_norm is not None:
            q = q * self._norm_of_nodes(q, L, nodes.other_queries)
            k = k * self._norm_of_nodes(k, L, nodes.other_keys)
        q, k = self._turned(q), self._turned(k)
        return softmax(jnp.einsum("rhak,rgbk->rhab", q, k))

    def _norm_of_nodes(
        self, x: Float[Array, "nodes heads m k"], L: Float[Array, "m m"], others: Float[Any, "nodes m m"] | None
    ) -> Float[Array, "nodes #heads m 1"]:
        """One over the root mean square of queries or keys, over a head or all heads with those of other groups."""
        squares = jnp.square(x).sum(-1, keepdims=True)
        if self.qk_norm == "head":
            return jnp.sqrt(x.shape[-1] / squares)
        squares = squares.sum(1, keepdims=True)
        if others is not None:
            squares = squares + jnp.square(L @ others).sum(-1)[:, None, :, None]
        return jnp.sqrt(x.shape[-1] * x.shape[1] * self.groups / squares)

    def _normed(self, x: Float[Array, "heads m k"]) -> Float[Array, "heads m k"]:
        if self.qk_norm is None:
            return x
        axes = -1 if self.qk_norm == "head" else (0, -1)
        return x / jnp.sqrt(jnp.square(x).mean(axes, keepdims=True))

    def _turned(self, x: Float[Array, "... m k"]) -> Float[Array, "... m k"]:
        """Queries or keys after the rotation of their first features."""
        if self.rope is None:
            return x
        rotation, size = Rotation.of(self.rope, self.pattern, x.shape[-2]), self.rope_size or x.shape[-1]
        return jnp.concatenate([rotation.turned(x[..., :size]), x[..., size:]], axis=-1)

    def _plain_size(self, size: Any) -> Any:
        """Number of features of a head that are not rotated; None if all are."""
        if self.rope is None:
            return size
        return None if self.rope_size is None else size - self.rope_size

    def _softmax(self, size: Any) -> Softmax:
        return Softmax(self.temperature, size, self.pattern, self.cap, self.sink)

    def _head_size(self, width: Any) -> Any:
        return width // self.heads if self.head_size is None else self.head_size
