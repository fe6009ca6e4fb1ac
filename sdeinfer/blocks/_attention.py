"""The branch of self-attention: softmax as it is, with masks, groups of heads, norms and rotations of queries and keys.

Tests: `tests/blocks/test_law.py`.
"""

import functools
import math
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray

from sdeinfer._arguments import at_least_one, given, shown
from sdeinfer._files import InputError
from sdeinfer.blocks._attention_parts import AttentionNodes, AttentionParts, attention_nodes
from sdeinfer.blocks._branch import GAIN, AbstractBranch, check_bias, projected, projection
from sdeinfer.blocks._law import MatrixMoments
from sdeinfer.blocks._logits import (
    Products,
    Rotation,
    Softmax,
    is_rotatable,
    other_masks,
    plain_products,
    require_base,
    rotated_products,
)
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._batched import gram, matmul, total
from sdeinfer.covariance._pattern import EVERY_TOKEN, require_pattern
from sdeinfer.layers._keys import GATES, NetworkKeys
from sdeinfer.layers._wishart import COLUMNS_AT_ONCE, factor, wishart_draws, wishart_factor
from sdeinfer.parameters import Parameter, distributions


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
        if self.rope is not None:
            require_base(self.rope)
        if self.rope_size is not None and (self.rope is None or not is_rotatable(self.rope_size)):
            raise InputError(f"rope_size: an even number beside a base is needed, got {shown(self.rope_size)}")
        if self.qk_norm not in ("head", "all", None):
            raise InputError(f"qk_norm: one of head, all, None is needed, got {shown(self.qk_norm)}")
        if self.sink is not None and not (isinstance(self.sink, int | float) and math.isfinite(self.sink)):
            raise InputError(f"sink: a number is needed, got {shown(self.sink)}")
        for name in ("cap", "gate"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, int | float) and 0 < value < math.inf):
                raise InputError(f"{name}: a positive number is needed, got {shown(value)}")

    def alternatives(self, width: int) -> dict[str, AbstractBranch]:
        """Other norms, factors and masks; and attention without its cap, sink, gate or rotations."""
        root = math.sqrt(self._head_size(width))
        changes = {
            "queries and keys have no norms": {"qk_norm": None},
            "queries and keys of each head have norms": {"qk_norm": "head"},
            "queries and keys of all heads together have norms": {"qk_norm": "all"},
            "logits have no factor 1/√d_k": {"temperature": self.temperature / root},
            "logits have the factor 1/√d_k twice": {"temperature": self.temperature * root},
            "logits have no cap": {"cap": None},
            "the softmax has no sink": {"sink": None},
            "outputs of heads have no gate": {"gate": None},
            "queries and keys are not rotated": {"rope": None, "rope_size": None},
            "all features of queries and keys are rotated": {"rope_size": None},
        }
        return self.with_changes(changes | other_masks(self.pattern))

    @property
    def groups(self) -> int:
        """Number of groups of heads with common keys and values."""
        return self.heads if self.key_value_heads is None else self.key_value_heads

    @property
    def log2_nodes(self) -> int:
        """Rotations and norms need the queries and keys themselves, hundreds of normals, and more nodes."""
        return 12 if self.explicit_nodes else 10

    @property
    def explicit_nodes(self) -> bool:
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
        q, k, v = (heads_of(self.gain, count, key_heads) for count, key_heads in zip(counts, keys, strict=True))
        q, k = (self.turned(self._normed(x)) for x in (q, k))
        k, v = (jnp.repeat(x, shared, axis=0) for x in (k, v))
        h = self.softmax(size)(jnp.einsum("hac,hbc->hab", q, k)) @ v
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
        summands = []
        if plain is not None:
            inside = drawn.normals[len(freedom) :]
            summands.append(plain_products(L, L, size=plain, B=factors[1], inside=inside, outside=factors[2:]))
        if self.rope is not None:
            rotation, rotated = Rotation.of(self.rope, self.pattern, tokens), self.rope_size or size
            groups = {"shared": shared, "groups": self.groups, "key_groups": self.groups}
            summands.append(rotated_products(L, L, rotation, rotated, **groups, keys=keys))
        sums = functools.reduce(Products.with_features, summands)
        products = sums.products if self.qk_norm is None else sums.normed(self.qk_norm, size)
        A = jnp.moveaxis(self.softmax(size)(jnp.moveaxis(products, (1, 2), (-2, -1))), (-2, -1), (1, 2))
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
            is_feature = number * COLUMNS_AT_ONCE + jnp.arange(COLUMNS_AT_ONCE) < size
            v = jnp.where(is_feature[:, None, None], matmul(L, value), 0.0)
            for of_head, gate in zip(A, gates, strict=True):
                h = matmul(of_head, v) * jax.nn.sigmoid(matmul(of_gates, gate))
                S = S + total(gram(h), axis=2)[:, :, None]
            return S

        blocks = -(-size // COLUMNS_AT_ONCE)
        return jax.lax.fori_loop(0, blocks, add, jnp.zeros_like(V)) / (self.heads * jnp.asarray(size, V.dtype))

    def nodes(self, tokens: int, width: int, *, log2: int, seed: int = 0) -> AttentionNodes:
        """Keys, queries and values of one group."""
        return attention_nodes(self, tokens, self._head_size(width), log2=log2, seed=seed)

    def moments(self, V: Float[Array, "m m"], nodes: Any, *, width: Int[Array, ""] | int) -> MatrixMoments:
        """Means over nodes; given the softmax, a part has the moments of normal values, which are integrated out."""
        return AttentionParts(self, V, nodes, self._head_size(width)).moments()

    def hidden_draws(
        self, V: Float[Array, "m m"], nodes: Any, *, width: Int[Array, ""] | int
    ) -> Float[Array, "nodes m m"]:
        """Means of parts at random nodes, one for each group of heads, with values drawn too."""
        return AttentionParts(self, V, nodes, self._head_size(width)).draws()[nodes.members].mean(0)

    def _normed(self, x: Float[Array, "heads m k"]) -> Float[Array, "heads m k"]:
        if self.qk_norm is None:
            return x
        axes = -1 if self.qk_norm == "head" else (0, -1)
        return x / jnp.sqrt(jnp.square(x).mean(axes, keepdims=True))

    def turned(self, x: Float[Array, "... m k"]) -> Float[Array, "... m k"]:
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

    def softmax(self, size: Any) -> Softmax:
        """The probabilities of heads with `size` features."""
        return Softmax(self.temperature, size, self.pattern, self.cap, self.sink)

    def _head_size(self, width: Any) -> Any:
        return width // self.heads if self.head_size is None else self.head_size
