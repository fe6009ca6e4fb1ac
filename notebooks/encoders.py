"""Transformer encoders of Appendix D: shaped ones, whose shaping is removed or trained, and Pre-LN.

*Recover* and *Learn* are a `sdeinfer.ShapedTransformer` at initialisation; `tests/test_studies.py` compares them. As in
the paper, the 1/√n of the temperature is in the initial weights of queries and keys, N(0, n^{-3/2}), so that one
learning rate serves all weights.
"""

import dataclasses
import math
from typing import override

import jax
import jax.numpy as jnp
import jax.random as jr
from flax import nnx
from jaxtyping import Array, ArrayLike, Float, Int

import sdeinfer as si


@dataclasses.dataclass(frozen=True)
class Settings:
    """Sizes of the networks, of their training and of their fine-tuning; `large_rate` is for Fig. 6 only."""

    width: int = 32
    heads: int = 4
    expansion: int = 1
    context: int = 24
    masked: float = 0.15
    batch: int = 8
    steps: int = 1500
    warmup: int = 150
    rates: tuple[float, ...] = (0.001, 0.003, 0.01)
    large_rate: float = 0.03
    seeds: int = 3
    examples: int = 1024
    epochs: int = 3
    fine_rate: float = 0.001


def gaussian(rows: int, columns: int, variance: float, *, rngs: nnx.Rngs) -> nnx.Param:
    """Weights N(0, variance)."""
    return nnx.Param(math.sqrt(variance) * jr.normal(rngs.params(), (rows, columns)))


class Attention(nnx.Module):
    """Residual branch of attention between all tokens, with several heads and an output projection."""

    def __init__(self, settings: Settings, *, logit_variance: float, rngs: nnx.Rngs):
        n = settings.width
        self.heads = settings.heads
        self.W_Q, self.W_K = (gaussian(n, n, math.sqrt(logit_variance) / n, rngs=rngs) for _ in range(2))
        self.W_V, self.W_O = (gaussian(n, n, 1 / n, rngs=rngs) for _ in range(2))

    def __call__(
        self, X: Float[Array, "*batch m n"], gamma1: ArrayLike, gamma2: ArrayLike
    ) -> tuple[Float[Array, "*batch m n"], Float[Array, ""]]:
        """A X W_V W_O with A = γ₁I + softmax(Y/√n_k) − γ₂11ᵀ/m (Eq. 33), and the mean entropy of the softmax's rows."""
        tokens, width = X.shape[-2:]

        def project(W):
            projected = X @ W[...]
            return jnp.swapaxes(projected.reshape(*X.shape[:-1], self.heads, width // self.heads), -2, -3)

        queries, keys, values = map(project, (self.W_Q, self.W_K, self.W_V))
        Y = queries @ jnp.swapaxes(keys, -1, -2) / math.sqrt(width // self.heads)
        P = jax.nn.softmax(Y)
        entropy = jax.nn.logsumexp(Y, axis=-1) - jnp.sum(P * Y, axis=-1)
        mixed = P @ values + gamma1 * values - gamma2 * values.mean(-2, keepdims=True)
        joined = jnp.swapaxes(mixed, -2, -3).reshape(X.shape)
        return joined @ self.W_O[...], jax.lax.stop_gradient(entropy.mean())


class FeedForward(nnx.Module):
    """Residual branch of a feed-forward layer."""

    def __init__(self, settings: Settings, *, rngs: nnx.Rngs):
        n, units = settings.width, settings.expansion * settings.width
        self.W_pre, self.W_post = gaussian(n, units, 1 / n, rngs=rngs), gaussian(units, n, 1 / units, rngs=rngs)

    def __call__(self, X: Float[Array, "*batch m n"], slope: ArrayLike) -> Float[Array, "*batch m n"]:
        """√c σ_s(X W_pre) W_post with the slopes 1 and s₋ (Eq. 4)."""
        width = X.shape[-1]
        c_plus, c_minus = jnp.zeros(()), jnp.asarray(slope - 1) * math.sqrt(width)
        return si.layers.shaped_relu(X @ self.W_pre[...], c_plus, c_minus, width) @ self.W_post[...]


class ShapedBlock(nnx.Module):
    """X′ = λX + γ branch(X), of shaped attention and then of a feed-forward layer; each has a trained λ and γ."""

    def __init__(self, gamma: Float[ArrayLike, ""], settings: Settings, *, rngs: nnx.Rngs):
        self.attention = Attention(settings, logit_variance=1 / settings.width, rngs=rngs)
        self.feedforward = FeedForward(settings, rngs=rngs)
        self.lambdas = nnx.Param(jnp.full(2, jnp.sqrt(1 - jnp.square(gamma))))
        self.gammas = nnx.Param(jnp.full(2, gamma))

    def shape(self, remaining: Float[ArrayLike, ""]) -> tuple[ArrayLike, ArrayLike, ArrayLike]:
        """γ₁, γ₂ and s₋; `remaining` falls from 1 to 0 in the warm-up."""
        raise NotImplementedError

    def __call__(self, X: Float[Array, "*batch m n"], remaining: Float[ArrayLike, ""]) -> tuple[Array, Array]:
        """X′ and the mean entropy of the softmax's rows."""
        gamma1, gamma2, slope = self.shape(remaining)
        branch, entropy = self.attention(X, gamma1, gamma2)
        X = self.lambdas[0] * X + self.gammas[0] * branch
        return self.lambdas[1] * X + self.gammas[1] * self.feedforward(X, slope), entropy


def shaped_slope(width: int) -> float:
    """s₋ = 1 − 1/√n."""
    return 1 - 1 / math.sqrt(width)


class RecoverBlock(ShapedBlock):
    """γ₁, γ₂ and s₋ fall to 0, which leaves a Transformer block without LayerNorm."""

    @override
    def shape(self, remaining):
        return remaining, remaining, remaining * shaped_slope(self.attention.W_Q.shape[-1])


class LearnBlock(ShapedBlock):
    """γ₁, γ₂ and s₋ are trained."""

    def __init__(self, gamma: Float[ArrayLike, ""], settings: Settings, *, rngs: nnx.Rngs):
        super().__init__(gamma, settings, rngs=rngs)
        self.shapes = nnx.Param(jnp.array([1.0, 1.0, shaped_slope(settings.width)]))

    @override
    def shape(self, remaining):
        gamma1, gamma2, slope = self.shapes[...]
        return gamma1, gamma2, slope


class BaselineBlock(nnx.Module):
    """X′ = X + branch(LN(X)) with the usual temperature and ReLU."""

    def __init__(self, gamma: Float[ArrayLike, ""], settings: Settings, *, rngs: nnx.Rngs):
        self.attention = Attention(settings, logit_variance=1.0, rngs=rngs)
        self.feedforward = FeedForward(settings, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(settings.width, rngs=rngs) for _ in range(2)])

    def __call__(self, X: Float[Array, "*batch m n"], remaining: Float[ArrayLike, ""]) -> tuple[Array, Array]:
        """X′ and the mean entropy of the softmax's rows."""
        branch, entropy = self.attention(self.norms[0](X), 0.0, 0.0)
        X = X + branch
        return X + self.feedforward(self.norms[1](X), 0.0), entropy


BLOCKS = {"Baseline": BaselineBlock, "Recover": RecoverBlock, "Learn": LearnBlock}


def waves(tokens: int, width: int) -> Float[Array, "m n"]:
    """Sines and cosines of the place with ‖x‖²/n = 1/2; attention learns the distance of two tokens from them."""
    angles = jnp.arange(tokens)[:, None] / 1000 ** (jnp.arange(width // 2) / (width // 2))
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)


class Network(nnx.Module):
    """Embedding of characters and positions, `depth` blocks and LayerNorm; heads for characters and for two classes.

    The embedded tokens have ‖x‖²/n of about 1, half of it from the position. The last character stands for a mask.
    """

    def __init__(
        self,
        block: type[nnx.Module],
        depth: int,
        gamma: ArrayLike,
        settings: Settings,
        *,
        characters: int,
        rngs: nnx.Rngs,
    ):
        n = settings.width
        self.characters = gaussian(characters + 1, n, 0.5, rngs=rngs)
        self.positions = nnx.Param(waves(settings.context, n))

        @nnx.split_rngs(splits=depth)
        @nnx.vmap
        def stacked(rngs):
            return block(gamma, settings, rngs=rngs)

        self.blocks = stacked(rngs)
        self.norm = nnx.LayerNorm(n, rngs=rngs)
        self.readout = gaussian(n, characters, 1 / n, rngs=rngs)
        self.classes = gaussian(n, 2, 1 / n, rngs=rngs)

    def hidden(
        self, text: Int[Array, "batch m"], remaining: ArrayLike
    ) -> tuple[Float[Array, "batch m n"], Float[Array, " depth"]]:
        """Tokens after the last LayerNorm, and each block's entropy."""

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=(nnx.Carry, 0))
        def apply(block, X):
            return block(X, remaining)

        X, entropies = apply(self.blocks, self.characters[...][text] + self.positions[...])
        return self.norm(X), entropies

    def __call__(
        self, text: Int[Array, "batch m"], remaining: ArrayLike
    ) -> tuple[Float[Array, "batch m k"], Float[Array, " depth"]]:
        """Logits of every character, and each block's entropy."""
        X, entropies = self.hidden(text, remaining)
        return X @ self.readout[...], entropies

    def classify(self, text: Int[Array, "batch m"]) -> Float[Array, "batch 2"]:
        """Logits of the two classes, from the mean over the tokens."""
        return self.hidden(text, 0.0)[0].mean(-2) @ self.classes[...]
