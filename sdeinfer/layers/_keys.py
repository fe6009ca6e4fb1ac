"""Random numbers for a batch of networks: networks are the last axis, and each has its own key.

Random numbers dominate the cost of sampling a small covariance. These are three times faster than `jax.random` under
`vmap`: an unrolled Threefry that uses both output words, and Box–Muller pairs for normals. A call takes a third of the
compilation time of `jax.random.normal` under `vmap`, but still most of that of a layer: a layer should draw all its
numbers in few calls. Tests: `tests/networks/test_chain.py`.
"""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float, Integer, PRNGKeyArray, UInt32

CHI, COLUMNS, QUERY_PLANES, KEY_PLANES, GATES = range(1, 6)
"""Streams of a layer's keys; stream 0 is used for the matrices of normals. Planes are those of rotations, and gates are
drawn with their values."""


class NetworkKeys(eqx.Module):
    """One key per network; the draws of a network depend on its own key only.

    As with JAX keys, use a key for one draw; `split` and `fold_in` make new keys.
    """

    high: UInt32[Array, " networks"]
    low: UInt32[Array, " networks"]

    @classmethod
    def numbered(cls, key: PRNGKeyArray, numbers: UInt32[Array, " networks"]) -> "NetworkKeys":
        """Keys of the networks with the given numbers; they are distinct for one `key`."""
        # `jax.random.split` and `fold_in` use 0 in place of 3.
        return cls(*threefry(*key_words(key), jnp.uint32(3), numbers))

    def fold_in(self, number: Integer[Array, ""] | int) -> "NetworkKeys":
        """New keys, distinct for each number."""
        # Draws use an even number in place of 1.
        return NetworkKeys(*threefry(self.high, self.low, jnp.uint32(1), jnp.asarray(number, jnp.uint32)))

    def split(self, count: int) -> "list[NetworkKeys]":
        """`count` new keys per network."""
        high, low = threefry(self.high, self.low, jnp.uint32(1), jnp.arange(count, dtype=jnp.uint32)[:, None])
        return [NetworkKeys(*words) for words in zip(high, low, strict=True)]

    def normals(
        self, shape: tuple[int, ...], dtype: Any, *, stream: int = 0, block: Integer[Array, ""] | int = 0
    ) -> Float[Array, "... networks"]:
        """Standard normals."""
        first, second = _box_muller(*self._words(math.ceil(math.prod(shape) / 2), stream, block), dtype)
        return _joined(first, second, shape)

    def normals_and_uniforms(
        self, shape: tuple[int, ...], dtype: Any, *, stream: int = 0, block: Integer[Array, ""] | int = 0
    ) -> tuple[Float[Array, "... networks"], Float[Array, "... networks"]]:
        """Standard normals, and uniform numbers on the open interval (0, 1), of the same shape; see `normals`."""
        count = math.prod(shape)
        high, low = self._words(count + math.ceil(count / 2), stream, block)
        normals, _ = _box_muller(high[:count], low[:count], dtype)
        uniforms = _joined(_uniform(high[count:], dtype), _uniform(low[count:], dtype), shape)
        return normals.reshape(*shape, normals.shape[-1]), uniforms

    def chi(self, freedom: Integer[Array, " k"], *, blocks: int, dtype: Any) -> Float[Array, "k blocks networks"]:
        """Chi variables from stream `CHI`, by the rejection method of Marsaglia & Tsang (2000), exact for every ν ≥ 1.

        Let d = ν/2 − 1/3 and 3√d u ~ N(0, 1). Then 2d (1 + u)³, accepted with probability exp f(u),
        f(u) = 3d (log(1 + u) − u + u²/2 − u³/3) ≤ 0, is chi-square with ν degrees of freedom; one in 18ν is rejected.
        """
        d = (jnp.asarray(freedom).astype(dtype) / 2 - 1 / 3)[:, None, None]
        shape = (len(d), blocks)

        def propose(state):
            attempt, chi, settled = state
            normals, uniforms = self.normals_and_uniforms(shape, dtype, stream=CHI, block=attempt)
            u = normals / (3 * jnp.sqrt(d))
            positive = u > -1
            u = jnp.where(positive, u, 0.0)
            log_probability = 3 * d * (jnp.log1p(u) - u * (1 - u * (1 / 2 - u / 3)))
            accepted = positive & (uniforms < jnp.exp(log_probability))
            chi = jnp.where(settled, chi, jnp.sqrt(2 * d * (1 + u)) * (1 + u))
            return attempt + 1, chi, settled | accepted

        start = jnp.zeros((*shape, self.high.shape[0]), dtype)
        _, chi, _ = jax.lax.while_loop(lambda state: ~state[2].all(), propose, (0, start, start > 0))
        return chi

    def _words(self, count: int, stream: int, block: Integer[Array, ""] | int) -> tuple[Array, Array]:
        index = jnp.asarray(block, jnp.uint32) * count + jnp.arange(count, dtype=jnp.uint32)
        return threefry(self.high, self.low, jnp.uint32(2 * stream), index[:, None])


def key_words(key: PRNGKeyArray) -> tuple[Array, Array]:
    """Two words that represent a JAX key of any implementation."""
    words = jr.key_data(key).ravel()
    return (words[0], words[1]) if words.size == 2 else threefry(*words)


def threefry(key_high: Array, key_low: Array, high: Array, low: Array) -> tuple[Array, Array]:
    """Threefry-2x32 with 20 rounds (Salmon et al. 2011), unrolled; JAX's version compiles to a loop through memory."""
    keys = (key_high, key_low, key_high ^ key_low ^ jnp.uint32(0x1BD11BDA))
    rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
    high, low = high + keys[0], low + keys[1]
    for group in range(5):
        for rotation in rotations[group % 2]:
            high = high + low
            low = high ^ ((low << rotation) | (low >> (32 - rotation)))
        high, low = high + keys[(group + 1) % 3], low + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    # Without the barrier XLA fuses the words into each use and recomputes them there.
    return jax.lax.optimization_barrier((high, low))


def _uniform(word: Array, dtype: Any) -> Array:
    """Midpoint of one of 2²⁴ or 2³² equal parts of (0, 1)."""
    bits = 24 if jnp.dtype(dtype).itemsize <= 4 else 32
    # A CPU converts signed integers several times faster.
    number = (word >> 8).astype(jnp.int32) if bits == 24 else word
    return jnp.minimum((number.astype(dtype) + 0.5) * 2.0**-bits, 1 - jnp.finfo(dtype).epsneg)


def _box_muller(radius_word: Array, angle_word: Array, dtype: Any) -> tuple[Array, Array]:
    """Two independent normals r sin θ and r cos θ, with r² exponential of mean 2 and θ uniform.

    θ is the sum of an angle of at most π/4, for which short series give sin and cos, and of quarter turns.
    """
    radius = jnp.sqrt(-2 * jnp.log(_uniform(radius_word, dtype)))
    bits = 22 if jnp.dtype(dtype).itemsize <= 4 else 29
    # The lowest 30 bits as a signed number, shifted to `bits` bits and a sign; 0.5 takes the midpoint.
    angle = ((angle_word << 2).astype(jnp.int32) >> (31 - bits)).astype(dtype) + 0.5
    x = angle * (math.pi / 4 * 2.0**-bits)
    terms = 5 if jnp.dtype(dtype).itemsize <= 4 else 10  # reach rounding on |x| ≤ π/4
    sin, cos = x * _series(x * x, terms, 1), _series(x * x, terms, 0)
    swapped = (angle_word >> 30) % 2 == 1
    radius = jnp.where(angle_word >> 31 == 1, -radius, radius)
    return radius * jnp.where(swapped, cos, sin), radius * jnp.where(swapped, sin, cos)


def _series(square: Array, terms: int, first: int) -> Array:
    """Σ_k (−x²)^k / (2k + first)! by Horner's rule: cos x for first = 0, sin x / x for first = 1."""
    value = jnp.zeros_like(square)
    for k in reversed(range(terms)):
        value = value * square + (-1) ** k / math.factorial(2 * k + first)
    return value


def _joined(first: Array, second: Array, shape: tuple[int, ...]) -> Array:
    values = jnp.concatenate(jax.lax.optimization_barrier([first, second]))
    return values[: math.prod(shape)].reshape(*shape, values.shape[-1])
