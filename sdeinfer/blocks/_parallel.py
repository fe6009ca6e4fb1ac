"""Blocks beside each other. Tests: `tests/blocks/test_block.py`."""

import functools
import operator
from collections.abc import Sequence

import jax.random as jr
from jaxtyping import Array, Float, Int, PRNGKeyArray

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.blocks._block import Block, increment_parts
from sdeinfer.layers import Stack
from sdeinfer.layers._keys import NetworkKeys


class Parallel(Stack):
    """Blocks beside each other: X′ = αX + Σ Δ_i, where all branches read one norm of X (GPT-J, GPT-NeoX, Cohere).

    Given X the increments are independent, so that their sum has the covariance Σ g_i² S_i.

    Attributes:
        layers: the blocks, with one norm before their branches, one α, and no norm after them.
    """

    def __check_init__(self):
        for block in self.layers:
            if not isinstance(block, Block) or block.position == "post" or block.output_norm is not None:
                raise InputError(f"layers: blocks with a norm before their branches are needed, got {shown(block)}")
        if len({(block.norm, block.skip) for block in self.blocks}) > 1:
            raise InputError("layers: blocks beside each other have one norm and one skip")

    @property
    def blocks(self) -> tuple[Block, ...]:
        """The blocks."""
        return tuple(block for block in self.layers if isinstance(block, Block))

    def forward(self, X: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m n"]:
        """Apply the blocks with fresh weights."""
        keys = jr.split(key, len(self.layers))
        return self.with_increments(
            X, [b.increment(b.read(X), key=block_key) for b, block_key in zip(self.blocks, keys, strict=True)]
        )

    def with_increments(self, X: Float[Array, "m n"], increments: Sequence[Float[Array, "m n"]]) -> Float[Array, "m n"]:
        """The output, given what the branches add."""
        return self.blocks[0].skip * X + sum(increments)

    def forward_covariance(  # pyright: ignore[reportIncompatibleMethodOverride]  not `on_host`
        self, V: Float[Array, "m m 1 networks"], *, width: Int[Array, ""] | int, keys: NetworkKeys
    ) -> Float[Array, "m m 1 networks"]:
        """Draw S of each branch, then V′ given their sum; see `Block.forward_covariance`."""
        for block in self.blocks:
            block.require_no_dropout("the chain has none: use method='weights'")
        key_read, key_out, *key_branches = keys.split(2 + len(self.blocks))
        read = self.blocks[0].read_covariance(V, width=width, keys=key_read)
        S = [
            b.increment_covariance(read, width=width, keys=block_keys)
            for b, block_keys in zip(self.blocks, key_branches, strict=True)
        ]
        parts = increment_parts(V, functools.reduce(operator.add, S), width=width, features=width, keys=key_out)
        return parts.sum_covariance(self.blocks[0].skip)
