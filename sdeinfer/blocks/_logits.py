"""Products of queries and keys, their norms and rotations, and the softmax of the logits.

Tests: `tests/blocks/test_law.py`.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._batched import matmul, total, transpose
from sdeinfer.layers._keys import KEY_PLANES, QUERY_PLANES, NetworkKeys


def require_base(rope: Any) -> None:
    """Raise an InputError for a base of rotations of at most 1."""
    if not (isinstance(rope, int | float) and 1 < rope < math.inf):
        raise InputError(f"rope: a base above 1 is needed, got {shown(rope)}")


def is_rotatable(size: Any) -> bool:
    """Whether a number of features can be rotated."""
    return isinstance(size, int) and size >= 2 and size % 2 == 0


def other_masks(pattern: Pattern) -> dict[str, dict[str, Pattern]]:
    """The field of a branch with the other mask of tokens in their order, by its words; none for a mask of its own."""
    if pattern.rows:
        return {}
    words = "tokens attend to later ones too" if pattern.causal else "tokens do not attend to later ones"
    return {words: {"pattern": dataclasses.replace(pattern, causal=not pattern.causal)}}


@dataclasses.dataclass(frozen=True)
class Softmax:
    """Probabilities of attention by the logits q kᵀ/(τ √`size`), with the cap and the sink of `SelfAttention`."""

    temperature: ArrayLike
    size: ArrayLike
    pattern: Pattern
    cap: float | None = None
    sink: float | None = None

    def __call__(self, products: Float[Array, "... m m"]) -> Float[Array, "... m m"]:
        """The softmax over the last axis."""
        logits = products / (self.temperature * jnp.sqrt(jnp.asarray(self.size, products.dtype)))
        if self.cap is not None:
            logits = self.cap * jnp.tanh(logits / self.cap)
        logits = jnp.where(self.pattern.mask(logits.shape[-1]), logits, -jnp.inf)
        if self.sink is None:
            return jax.nn.softmax(logits, axis=-1)
        of_sink = jnp.full((*logits.shape[:-1], 1), self.sink, logits.dtype)
        return jax.nn.softmax(jnp.concatenate([logits, of_sink], axis=-1), axis=-1)[..., :-1]


@dataclasses.dataclass(frozen=True)
class Rotation:
    """Rotations of queries and keys by their positions.

    Attributes:
        base: entries c and c + r/2 of token a are turned by the angle of a · base^(−2c/r).
        positions: the place of each token in its prompt.
    """

    base: float
    positions: Float[np.ndarray, " m"]

    @classmethod
    def of(cls, base: float, pattern: Pattern, tokens: int) -> "Rotation":
        """The rotation of the tokens of a pattern's prompts."""
        prompts = pattern.prompts or (tokens,)
        return cls(base, np.concatenate([np.arange(length) for length in prompts]).astype(float))

    def turned(self, x: Float[Array, "... m r"]) -> Float[Array, "... m r"]:
        """Queries or keys after the rotation of all their entries."""
        size = x.shape[-1]
        angles = self.positions[:, None] * self.base ** (-2 * np.arange(size // 2) / size)
        first, second = x[..., : size // 2], x[..., size // 2 :]
        cos, sin = (jnp.asarray(f(angles), x.dtype) for f in (np.cos, np.sin))
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


class Products(NamedTuple):
    """q_a · k_b of the heads of each group, and the squares |q_a|² and |k_a|².

    A group is of heads with common keys; `shared` is their number.
    """

    products: Float[Array, "shared m m groups networks"]
    queries: Float[Array, "shared m groups networks"]
    keys: Float[Array, "m groups networks"]

    def with_features(self, other: "Products") -> "Products":
        """The products of queries and keys with the features of both."""
        return Products(*(first + second for first, second in zip(self, other, strict=True)))

    def normed(self, over: str, size: Any) -> Float[Array, "shared m m groups networks"]:
        """The products of queries and keys with a mean square of 1 over a head ("head") or over all heads ("all")."""
        queries, keys, count = self.queries, self.keys, size
        if over == "all":
            keys = total(keys, axis=1)[:, None]
            count = size * self.keys.shape[1]
            queries = total(total(queries, axis=0), axis=1)[None, :, None]
        of_queries = count * (len(self.queries) if over == "all" else 1) / queries
        return self.products * jnp.sqrt(of_queries)[:, :, None] * jnp.sqrt(count / keys)[None]


def plain_products(
    of_queries: Float[Array, "m m 1 networks"],
    of_keys: Float[Array, "m m 1 networks"],
    *,
    size: Int[Array, ""] | int,
    B: Float[Array, "m m groups networks"],
    inside: Float[Array, "shared m m groups networks"],
    outside: Sequence[Float[Array, "m m groups networks"]] = (),
) -> Products:
    """Products of queries and keys of `size` features by Bartlett's decomposition, without rotations.

    The keys of a head are L_k B O, with O of orthonormal rows. A query has the components L_q Z in the span of O, and
    others outside of it, which count for its square alone.

    Arguments:
        of_queries: L_q, with L_q L_qᵀ the covariance of one feature of the queries.
        of_keys: L_k, that of the keys.
        size: number of features.
        B: with B Bᵀ ~ Wishart_m(size, I).
        inside: normals Z of each head of a group.
        outside: for each head a matrix like B with size − m degrees of freedom; none if no squares are needed.
    """
    keys = matmul(of_keys, B)
    of_span = (jnp.arange(len(of_keys)) < size)[:, None, None]
    queries = [jnp.where(of_span, matmul(of_queries, Z), 0.0) for Z in inside]
    squares = [total(jnp.square(query), axis=1) for query in queries]
    if outside:
        far = [total(jnp.square(matmul(of_queries, factor)), axis=1) for factor in outside]
        squares = [inner + outer for inner, outer in zip(squares, far, strict=True)]
    products = jnp.stack([matmul(query, transpose(keys)) for query in queries])
    return Products(products, jnp.stack(squares), total(jnp.square(keys), axis=1))


def rotated_products(
    of_queries: Float[Array, "m m 1 networks"],
    of_keys: Float[Array, "m m 1 networks"],
    rotation: Rotation,
    size: Int[Array, ""] | int,
    *,
    shared: int,
    groups: int,
    key_groups: int,
    keys: NetworkKeys,
) -> Products:
    """Products of queries and keys of `size` rotated features, as a sum over the planes; see `plain_products`.

    Groups of `shared` heads have keys of their own; with `key_groups` of 1 all heads have one key.
    """
    tokens, dtype = len(of_keys), of_keys.dtype
    positions = jnp.asarray(rotation.positions, dtype)

    def add(plane: Int[Array, ""], sums: Products) -> Products:
        queries = keys.normals((shared, 2, tokens, 1, groups), dtype, stream=QUERY_PLANES, block=plane)
        key_normals = keys.normals((2, tokens, 1, key_groups), dtype, stream=KEY_PLANES, block=plane)
        k, other_k = (matmul(of_keys, x)[:, 0] for x in key_normals)
        q, other_q = (jnp.stack([matmul(of_queries, x)[:, 0] for x in queries[:, side]]) for side in range(2))
        angles = positions * jnp.asarray(rotation.base, dtype) ** (-2 * plane / jnp.asarray(size, dtype))
        turned = (angles[:, None] - angles)[:, :, None, None]
        straight = q[:, :, None] * k + other_q[:, :, None] * other_k
        across = q[:, :, None] * other_k - other_q[:, :, None] * k
        products = jnp.cos(turned) * straight + jnp.sin(turned) * across
        squares = jnp.square(k) + jnp.square(other_k)
        of_plane = Products(products, jnp.square(q) + jnp.square(other_q), jnp.broadcast_to(squares, sums.keys.shape))
        return sums.with_features(of_plane)

    shapes = (shared, tokens, tokens, groups), (shared, tokens, groups), (tokens, groups)
    start = Products(*(jnp.zeros((*shape, of_keys.shape[-1]), dtype) for shape in shapes))
    return jax.lax.fori_loop(0, size // 2, add, start)
