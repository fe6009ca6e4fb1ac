"""Shaped blocks as modules of PyTorch (Noci et al., 2023): with their first weights they have the law of the layers.

    layer = si.tune("transformer", V0, ..., width=512, depth=64).layer
    blocks = nn.ModuleList(ShapedTransformer.of(layer.at((l + 0.5) / 512), 512) for l in range(64))

Weights are matrices without biases, with independent N(0, 1/fan_in) entries at first; γ, τ0, c₊ and c₋ are constants.
"""

from typing import Any, Self

import torch  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn  # pyright: ignore[reportMissingImports]

from sdeinfer import layers
from sdeinfer.modules._constants import arguments_of, key_size, relu_slopes, residual_weights, temperature


class ShapedAttention(nn.Module):
    """X′ = λX + γ A X W_V with A = γ₁I + softmax(Y/τ) − γ₂11ᵀ/m (Eq. 1, 9, 33): `sdeinfer.ShapedAttention`.

    A − γ₁I is computed in float32 or above, without I: half precision would lose it beside I, and beside the output of
    a fused softmax(Y/τ)V.

    Arguments:
        width: n.
        gamma, tau0, heads, key_width, output_projection: those of the layer.
        causal: whether a token attends only to itself and earlier tokens.
        gamma1, gamma2: gains γ₁ and γ₂, at first if they are trained.
        trainable_gains: whether γ₁ and γ₂ are parameters.
        options: `device` and `dtype` of the parameters.

    Raises:
        InputError: for arguments out of range.
    """

    def __init__(
        self,
        width: int,
        gamma: float,
        tau0: float,
        *,
        heads: int = 1,
        key_width: int | None = None,
        output_projection: bool = False,
        causal: bool = False,
        gamma1: float = 1.0,
        gamma2: float = 1.0,
        trainable_gains: bool = False,
        **options: Any,
    ):
        super().__init__()
        size = key_size(width, heads, key_width)
        self.heads, self.causal, self.tau = heads, causal, temperature(tau0, width, size)
        self.shortcut, self.gamma = residual_weights(gamma)
        self.query, self.key = Linear(width, heads * size, **options), Linear(width, heads * size, **options)
        self.value = Linear(width, width, **options)
        self.output = Linear(width, width, **options) if output_projection else nn.Identity()
        self.gamma1, self.gamma2 = float(gamma1), float(gamma2)
        if trainable_gains:
            self.gamma1, self.gamma2 = gain(gamma1, **options), gain(gamma2, **options)

    @classmethod
    def of(cls, layer: layers.ShapedAttention, width: int, **options: Any) -> Self:
        """The module of a layer, with further arguments.

        Raises:
            InputError: for another layer, or a pattern that is neither `Pattern()` nor `CAUSAL`.
        """
        return cls(width, **arguments_of(layer, layers.ShapedAttention), **options)

    def mixing(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """A − γ₁I, of shape (…, heads, tokens, tokens); zero for a token that attends to nothing."""
        tokens = X.shape[-2]
        attended = torch.ones(tokens, tokens, dtype=torch.bool, device=X.device)
        if self.causal:
            attended = attended.tril()
        if mask is not None:
            attended = attended & mask.expand(*X.shape[:-2], tokens, tokens)
        attended = attended.unsqueeze(-3)
        Y = wide(self.by_head(self.query(X)) @ self.by_head(self.key(X)).mT) / self.tau
        # Finite, so that a row without tokens and its gradient are.
        Y = Y.masked_fill(~attended, torch.finfo(Y.dtype).min)
        count = attended.sum(-1, keepdim=True, dtype=Y.dtype).clamp(min=1)
        return (Y.softmax(-1) - self.gamma2 / count).masked_fill(~attended, 0)

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """X′ of tokens X, both of shape (…, tokens, n).

        Arguments:
            X: representations of the tokens.
            mask: boolean, True where the row's token attends to the column's; broadcastable to (…, tokens, tokens).
        """
        values = self.by_head(self.value(X))
        mixed = self.gamma1 * wide(values) + wide(self.mixing(X, mask).to(values.dtype) @ values)
        Z = self.output(mixed.to(values.dtype).transpose(-2, -3).flatten(-2))
        return residual(X, Z, self.shortcut, self.gamma)

    def by_head(self, Z: Tensor) -> Tensor:
        """The columns of each head: (…, tokens, columns) as (…, heads, tokens, columns of a head)."""
        return Z.unflatten(-1, (self.heads, -1)).transpose(-2, -3)


class ShapedFeedForward(nn.Module):
    """X′ = λX + γ √c σ_s(X W_pre) W_post (Eq. 4): `sdeinfer.ResidualFeedForward`.

    Arguments:
        width: n.
        gamma, c_plus, c_minus, expansion: those of the layer.
        options: `device` and `dtype` of the parameters.

    Raises:
        InputError: for arguments out of range.
    """

    def __init__(
        self, width: int, gamma: float, c_plus: float, c_minus: float, *, expansion: float = 1, **options: Any
    ):
        super().__init__()
        units = layers.hidden_units(expansion, width)
        self.shortcut, self.gamma = residual_weights(gamma)
        self.slopes = relu_slopes(c_plus, c_minus, width)
        self.pre, self.post = Linear(width, units, **options), Linear(units, width, **options)

    @classmethod
    def of(cls, layer: layers.ResidualFeedForward, width: int, **options: Any) -> Self:
        """The module of a layer, with further arguments; raises an InputError for another layer."""
        return cls(width, **arguments_of(layer, layers.ResidualFeedForward), **options)

    def forward(self, X: Tensor) -> Tensor:
        """X′ of tokens X, both of shape (…, tokens, n)."""
        h, (up, down) = self.pre(X), self.slopes
        # Slopes differ by O(1/√n), which is about the spacing of numbers of half precision.
        shaped = torch.where(h > 0, up * wide(h), down * wide(h)).to(h.dtype)
        return residual(X, self.post(shaped), self.shortcut, self.gamma)


class ShapedTransformer(nn.Module):
    """Shaped attention, then the feed-forward layer, with one γ (Eq. 11): `sdeinfer.ShapedTransformer`.

    Arguments:
        width: n.
        gamma, tau0, c_plus, c_minus, expansion: those of the layer.
        attention: further arguments of `ShapedAttention`.
        options: `device` and `dtype` of the parameters.

    Raises:
        InputError: for arguments out of range.
    """
