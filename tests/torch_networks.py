"""Shaped networks in PyTorch, as a user might write them: a script that needs torch and numpy only.

Draws networks with N(0, 1) weights, runs them on four tokens, and writes V = X Xᵀ/n before the first block and after
every block, collected by forward hooks:

    python torch_networks.py OUT.npz --kind transformer --heads 4 --width 512 --depth 64 --networks 64

It runs in another interpreter than the tests, by Python 3.11 and later, and knows nothing of the package.
"""

import argparse
import math

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

TOKENS = 4
VARIANCE = 2.0
"""Of the entries of the tokens; the diagonal of V starts near it."""


class Dense(nn.Module):
    """X W/√n with entries of W from N(0, 1); `redraw` draws them."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, width))

    def forward(self, x):
        return x @ self.weight / math.sqrt(len(self.weight))


class Attention(nn.Module):
    """X′ = λX + γ A X W_V/√n with A = I + softmax(Y/τ) − 11ᵀ/m, and an A and n/H columns for each of H heads."""

    def __init__(self, width, *, heads, causal, tau0, gamma):
        super().__init__()
        if width % heads:
            raise ValueError(f"the width {width} is not a multiple of {heads} heads")
        self.query, self.key, self.value = Dense(width), Dense(width), Dense(width)
        self.heads, self.causal, self.gamma = heads, causal, gamma
        self.temperature = tau0 * math.sqrt(width * width / heads)

    def forward(self, x):
        tokens, width = x.shape
        # (heads, tokens, columns of a head)
        q, k, v = (
            part(x).view(tokens, self.heads, width // self.heads).transpose(0, 1)
            for part in (self.query, self.key, self.value)
        )
        seen = torch.ones(tokens, tokens, dtype=torch.bool)
        seen = seen.tril() if self.causal else seen
        scores = (q @ k.transpose(1, 2) / self.temperature).masked_fill(~seen, -math.inf)
        mixing = torch.eye(tokens) + scores.softmax(dim=-1) - seen / seen.sum(dim=1, keepdim=True)
        branch = (mixing @ v).transpose(0, 1).reshape(tokens, width)
        return math.sqrt(1 - self.gamma**2) * x + self.gamma * branch


class ShapedReLU(nn.Module):
    """Slopes 1 ± c/√n, times the constant that keeps the second moment of N(0, 1)."""

    def __init__(self, width, slope):
        super().__init__()
        self.up, self.down = 1 + slope / math.sqrt(width), 1 - slope / math.sqrt(width)
        self.scale = math.sqrt(2 / (self.up**2 + self.down**2))

    def forward(self, x):
        return self.scale * torch.where(x > 0, self.up * x, self.down * x)


class FeedForward(nn.Module):
    """X′ = λX + γ σ(X W_pre/√n) W_post/√n."""

    def __init__(self, width, *, slope, gamma):
        super().__init__()
        self.branch = nn.Sequential(Dense(width), ShapedReLU(width, slope), Dense(width))
        self.gamma = gamma

    def forward(self, x):
        return math.sqrt(1 - self.gamma**2) * x + self.gamma * self.branch(x)


def block(kind, width, *, heads, causal, tau0, gamma, slope):
    attention = Attention(width, heads=heads, causal=causal, tau0=tau0, gamma=gamma)
    if kind == "attention":
        return attention
    return nn.Sequential(attention, FeedForward(width, slope=slope, gamma=gamma))


def redraw(network):
    """Draw all weights from N(0, 1): in single precision, five times faster in PyTorch; the rest is in double."""
    for weight in network.parameters():
        weight.copy_(torch.randn(weight.shape, dtype=torch.float32))


def covariances(network, x, networks):
    """V of every network before the first and after every block, shape (networks, depth + 1, tokens, tokens)."""
    seen = []

    def keep(x):
        seen.append(x @ x.T / x.shape[1])

    hooks = [network[0].register_forward_pre_hook(lambda _, inputs: keep(inputs[0]))]
    hooks += [each.register_forward_hook(lambda _, __, output: keep(output)) for each in network]
    with torch.no_grad():
        for _ in range(networks):
            redraw(network)
            network(x)
    for hook in hooks:
        hook.remove()
    return torch.stack(seen).view(networks, -1, len(x), len(x)).numpy()


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("out")
    parser.add_argument("--kind", choices=("attention", "transformer"), default="transformer")
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--depth", type=int, default=64)
    parser.add_argument("--networks", type=int, default=64)
    parser.add_argument("--tau0", type=float, default=0.5)
    parser.add_argument("--gamma", type=float, default=0.5)
    parser.add_argument("--slope", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    settings = vars(parser.parse_args())
    out, width = settings.pop("out"), settings["width"]

    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(settings["seed"])
    tokens = math.sqrt(VARIANCE) * torch.randn(TOKENS, width)
    parts = {name: settings[name] for name in ("kind", "heads", "causal", "tau0", "gamma", "slope")}
    network = nn.Sequential(*(block(width=width, **parts) for _ in range(settings["depth"])))
    np.savez(out, covariance=covariances(network, tokens, settings["networks"]), **settings)


if __name__ == "__main__":
    main()
