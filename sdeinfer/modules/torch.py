"""Shaped blocks as modules of PyTorch (Noci et al., 2023): at initialisation they have the law of the layers.

    layer = si.tune("transformer", V0, ..., width=512, depth=64).layer
    blocks = nn.ModuleList(ShapedTransformer.of(layer.at((l + 0.5) / 512), 512) for l in range(64))

Weights are matrices without biases, at first with independent N(0, 1/fan_in) entries; γ, τ0, c₊ and c₋ are constants.
Tests: `tests/modules/test_modules.py`.
"""

from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch import Tensor, nn  # pyright: ignore[reportMissingImports]

from sdeinfer import layers
from sdeinfer.layers._feedforward import hidden_units
from sdeinfer.modules._shared import OfLayer, key_size, relu_slopes, residual_weights, temperature


class ShapedAttention(OfLayer, nn.Module):
    """X′ = λX + γ A X W_V with A = γ₁I + softmax(Y/τ) − γ₂11ᵀ/m (Eq. 1, 9, 33), as `sdeinfer.ShapedAttention`.

    A − γ₁I is computed in float32 or above, and without I: beside I, and in the output of a fused softmax(Y/τ)V, half
    precision would round it away.

    Arguments:
        width: n.
        gamma, tau0, heads, key_width, output_projection: those of the layer.
        causal: whether a token attends only to itself and earlier tokens.
        gamma1, gamma2: gains γ₁ and γ₂; at first, if they are trained.
        trainable_gains: whether γ₁ and γ₂ are parameters.
        more: `device` and `dtype` of the parameters.
    """

    layer_type = layers.ShapedAttention

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
        **more: Any,
    ):
        super().__init__()
        size = key_size(width, heads, key_width)
        self.heads, self.causal, self.tau = heads, causal, temperature(tau0, width, size)
        self.shortcut, self.gamma = residual_weights(gamma)
        self.query, self.key = Linear(width, heads * size, **more), Linear(width, heads * size, **more)
        self.value = Linear(width, width, **more)
        self.output = Linear(width, width, **more) if output_projection else nn.Identity()
        self.gamma1, self.gamma2 = self.gains = float(gamma1), float(gamma2)
        if trainable_gains:
            # In float32 or above: at lower precision, numbers near 1 are too far apart for small steps.
            more["dtype"] = wide(torch.empty(0, dtype=more.get("dtype"))).dtype
            self.gamma1, self.gamma2 = (nn.Parameter(torch.tensor(gain, **more)) for gain in self.gains)

    def reset_parameters(self):
        """Set gains that are trained to their first values."""
        for parameter, start in zip(self.parameters(recurse=False), self.gains, strict=False):
            nn.init.constant_(parameter, start)

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """X′ of tokens X, (…, tokens, n); the boolean mask, broadcast to (…, tokens, tokens), says who attends."""
        values = self.by_head(self.value(X))
        mixed = self.gamma1 * wide(values) + wide(self.mixing(X, mask).to(values.dtype) @ values)
        return residual(self, X, self.output(mixed.to(values.dtype).transpose(-2, -3).flatten(-2)))

    def mixing(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """A − γ₁I, of shape (…, heads, tokens, tokens); zero in the row of a token that attends to nothing."""
        tokens = X.shape[-2]
        attended = torch.ones(tokens, tokens, dtype=torch.bool, device=X.device)
        attended = attended.tril() if self.causal else attended
        if mask is not None:
            attended = attended & mask.expand(*X.shape[:-2], tokens, tokens)
        attended = attended.unsqueeze(-3)
        Y = wide(self.by_head(self.query(X)) @ self.by_head(self.key(X)).mT) / self.tau
        # Finite, so that the softmax of a row without tokens is, and its gradient.
        Y = Y.masked_fill(~attended, torch.finfo(Y.dtype).min)
        count = attended.sum(-1, keepdim=True, dtype=Y.dtype).clamp(min=1)
        return (Y.softmax(-1) - self.gamma2 / count).masked_fill(~attended, 0)

    def by_head(self, Z: Tensor) -> Tensor:
        """The columns of each head: (…, tokens, columns) as (…, heads, tokens, columns of a head)."""
        return Z.unflatten(-1, (self.heads, -1)).transpose(-2, -3)


class ShapedFeedForward(OfLayer, nn.Module):
    """X′ = λX + γ √c σ_s(X W_pre) W_post (Eq. 4), with the arguments of `sdeinfer.ResidualFeedForward`."""

    layer_type = layers.ResidualFeedForward

    def __init__(self, width: int, gamma: float, c_plus: float, c_minus: float, *, expansion: float = 1, **more: Any):
        super().__init__()
        units = hidden_units(expansion, width)
        self.shortcut, self.gamma = residual_weights(gamma)
        self.up, self.down = relu_slopes(c_plus, c_minus, width)
        self.pre, self.post = Linear(width, units, **more), Linear(units, width, **more)

    def forward(self, X: Tensor) -> Tensor:
        """X′ of tokens X, (…, tokens, n)."""
        h = self.pre(X)
        # The slopes differ by O(1/√n), about the spacing of numbers in half precision.
        shaped = torch.where(h > 0, self.up * wide(h), self.down * wide(h)).to(h.dtype)
        return residual(self, X, self.post(shaped))


class ShapedTransformer(OfLayer, nn.Module):
    """Shaped attention, then feed-forward, with one γ (Eq. 11) and the arguments of both modules."""

    layer_type = layers.ShapedTransformer

    def __init__(
        self, width: int, gamma: float, tau0: float, c_plus: float, c_minus: float, *, expansion: float = 1, **more: Any
    ):
        super().__init__()
        placed = {name: more[name] for name in ("device", "dtype") if name in more}
        self.attention = ShapedAttention(width, gamma, tau0, **more)
        self.feedforward = ShapedFeedForward(width, gamma, c_plus, c_minus, expansion=expansion, **placed)

    def forward(self, X: Tensor, mask: Tensor | None = None) -> Tensor:
        """X′ of tokens X, with the mask of `ShapedAttention`."""
        return self.feedforward(self.attention(X, mask))


class Linear(nn.Linear):
    """X W without a bias; the entries of W are at first independent N(0, 1/fan_in)."""

    def __init__(self, fan_in: int, fan_out: int, **more: Any):
        super().__init__(fan_in, fan_out, bias=False, **more)

    def reset_parameters(self):
        """Draw W."""
        nn.init.normal_(self.weight, std=self.in_features**-0.5)


def residual(block: Any, X: Tensor, Z: Tensor) -> Tensor:
    """λX + γZ in the type of X, rounded once: in half precision, λ near 1 would itself be 1."""
    return (block.shortcut * wide(X) + block.gamma * wide(Z)).to(X.dtype)


def wide(x: Tensor) -> Tensor:
    """Numbers in float32, or in float64 if they are."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
