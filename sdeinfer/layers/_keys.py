"""Random numbers for many networks side by side: the networks are the last axis, each with a key of its own.

A small layer's covariance costs little but its random numbers, so these come three times faster than from `jax.random`
under `vmap`: Threefry as there, but unrolled and with both of its words used, and normals by Box and Muller's pairs. A
call takes a third of the compilation of `jax.random.normal` under `vmap`, but still most of what a layer compiles: draw
all that a layer needs in few calls.
"""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA

_TERMS = {4: 5, 8: 10}
"""How many terms of the series of sin and cos reach the rounding, on |x| ≤ π/4, of a number of so many bytes."""


class NetworkKeys(eqx.Module):
    """One key for each network; what is drawn for a network depends on its own key alone, not on its neighbours.

    A key of its own is to be used for one draw, as those of JAX are: `split` and `fold_in` make new ones.

    Attributes:
        high: the first word of every key.
        low: the second.
    """

    high: UInt32[Array, " networks"]
    low: UInt32[Array, " networks"]

    @classmethod
    def numbered(cls, key: PRNGKeyArray, numbers: UInt32[Array, " networks"]) -> "NetworkKeys":
        """Keys of the networks of these numbers; no two of one `key` are equal."""
        # JAX's own new keys of `key` have a 0 in the place of the 3.
        return cls(*threefry(*key_words(key), jnp.uint32(3), numbers))

    def fold_in(self, number: Int[Array, ""] | int) -> "NetworkKeys":
        """New keys, others for every number."""
        # Draws have an even number in the place of the 1.
        return NetworkKeys(*threefry(self.high, self.low, jnp.uint32(1), jnp.asarray(number, jnp.uint32)))

    def split(self, count: int) -> "list[NetworkKeys]":
        """So many new keys for each network."""
        high, low = threefry(self.high, self.low, jnp.uint32(1), jnp.arange(count, dtype=jnp.uint32)[:, None])
        return [NetworkKeys(*words) for words in zip(high, low, strict=True)]

    def normals(
        self, shape: tuple[int, ...], dtype: jnp.dtype, *, stream: int = 0, block: Int[Array, ""] | int = 0
    ) -> Float[Array, "... networks"]:
        """Standard normals, as many as `shape` says for each network.

        Arguments:
            shape: all axes but the last.
            dtype: their type. They have 32 random bits whatever it is: of the same normals, float32 keeps 24 bits.
            stream: which of the key's independent sequences.
            block: which of the sequence's independent arrays of this shape.
        """
        one, other = _box_muller(*self._words(math.ceil(math.prod(shape) / 2), stream, block), dtype)
        return _joined(one, other, shape)

    def normals_and_uniforms(
        self, shape: tuple[int, ...], dtype: jnp.dtype, *, stream: int = 0, block: Int[Array, ""] | int = 0
    ) -> tuple[Float[Array, "... networks"], Float[Array, "... networks"]]:
        """Standard normals and numbers uniform on (0, 1), neither end included, of one shape; see `normals`."""
        count = math.prod(shape)
        one, other = self._words(count + math.ceil(count / 2), stream, block)
        normals, _ = _box_muller(one[:count], other[:count], dtype)
        uniforms = _joined(_uniform(one[count:], dtype), _uniform(other[count:], dtype), shape)
        return normals.reshape(*shape, normals.shape[-1]), uniforms

    def _words(self, count: int, stream: int, block: Int[Array, ""] | int) -> tuple[Array, Array]:
        index = jnp.asarray(block, jnp.uint32) * count + jnp.arange(count, dtype=jnp.uint32)
        return threefry(self.high, self.low, jnp.uint32(2 * stream), index[:, None])


def key_words(key: PRNGKeyArray) -> tuple[Array, Array]:
    """Two words that stand for a key of JAX, of any kind."""
    words = jr.key_data(key).ravel()
    return (words[0], words[1]) if words.size == 2 else threefry(*words)


def threefry(key_high: Array, key_low: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011): JAX's own, whose compiled form is a loop through memory."""
    keys = (key_high, key_low, key_high ^ key_low ^ jnp.uint32(_PARITY))
    high, low = high + keys[0], low + keys[1]
    for group in range(5):
        for rotation in _ROTATIONS[group % 2]:
            high = high + low
            low = high ^ ((low << rotation) | (low >> (32 - rotation)))
        high, low = high + keys[(group + 1) % 3], low + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    # Without the barrier XLA fuses the words into each of their uses, and computes them anew there.
    return jax.lax.optimization_barrier((high, low))


def _uniform(word: Array, dtype: jnp.dtype) -> Array:
    """The middle of one of 2²⁴ or 2³² equal parts of (0, 1)."""
    bits = 24 if jnp.dtype(dtype).itemsize <= 4 else 32
    # As a signed number where it fits, which a CPU converts several times faster.
    number = (word >> 8).astype(jnp.int32) if bits == 24 else word
    return jnp.minimum((number.astype(dtype) + 0.5) * 2.0**-bits, 1 - jnp.finfo(dtype).epsneg)


def _box_muller(one: Array, other: Array, dtype: jnp.dtype) -> tuple[Array, Array]:
    """Two independent normals r sin θ and r cos θ: r² is exponential with mean 2, θ uniform.

    θ is an angle of at most π/4, where short series give sin and cos, and one of four quarter turns.
    """
    radius = jnp.sqrt(-2 * jnp.log(_uniform(one, dtype)))
    bits = 22 if jnp.dtype(dtype).itemsize <= 4 else 29
    # The lowest 30 bits as a signed number, of which so many and the sign are kept, and then the middle between two.
    angle = ((other << 2).astype(jnp.int32) >> (31 - bits)).astype(dtype) + 0.5
    x = angle * (math.pi / 4 * 2.0**-bits)
    terms = _TERMS[jnp.dtype(dtype).itemsize]
    sin, cos = x * _series(x * x, terms, 1), _series(x * x, terms, 0)
    swapped = (other >> 30) % 2 == 1
    radius = jnp.where(other >> 31 == 1, -radius, radius)
    return radius * jnp.where(swapped, cos, sin), radius * jnp.where(swapped, sin, cos)


def _series(square: Array, terms: int, first: int) -> Array:
    """Σ_k (−x²)^k / (2k + first)!, by Horner's rule: cos x for 0, sin x / x for 1."""
    value = jnp.zeros_like(square)
    for k in reversed(range(terms)):
        value = value * square + (-1) ** k / math.factorial(2 * k + first)
    return value


def _joined(one: Array, other: Array, shape: tuple[int, ...]) -> Array:
    values = jnp.concatenate(jax.lax.optimization_barrier([one, other]))
    return values[: math.prod(shape)].reshape(*shape, values.shape[-1])
