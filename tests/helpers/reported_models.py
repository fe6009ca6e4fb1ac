"""Small models in the style of public projects, each correct or with a bug that somebody reported; PyTorch."""

import functools
import math
from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

N, LAYERS, HEADS, VOCABULARY = 128, 4, 4, 199
SIZE = N // HEADS


class RMSNorm(nn.Module):
    def __init__(self, n: int, bug: str = ""):
        super().__init__()
        self.weight, self.bug = nn.Parameter(torch.ones(n)), bug

    def forward(self, x):
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (x / scale if self.bug == "rsqrt" else x * scale) * self.weight


def rotated(x, bug: str = ""):
    m, d = x.shape[-2:]
    theta = 1e2 if bug == "theta" else 1e4
    angles = torch.arange(m)[:, None] * theta ** (-torch.arange(0, d, 2) / d)
    if bug == "interleaved":
        cos, sin = (each(angles).repeat_interleave(2, -1) for each in (torch.cos, torch.sin))
    else:
        cos, sin = (torch.cat([each(angles)] * 2, -1) for each in (torch.cos, torch.sin))
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat([-two, one], -1) * sin


class Attention(nn.Module):
    """Fused, or written out where a bug is in what is written out."""

    def __init__(
        self, *, bias: bool = False, rope: bool = False, causal: bool = True, bug: str = "", groups: int = HEADS
    ):
        super().__init__()
        self.rope, self.causal, self.bug, self.groups = rope, causal, bug, groups
        self.wq, self.wo = nn.Linear(N, N, bias=bias), nn.Linear(N, N, bias=bias)
        self.wk, self.wv = (nn.Linear(N, groups * SIZE, bias=bias) for _ in range(2))
        self.scale, self.normed = SIZE**-0.5, False

    def forward(self, x, context=None):
        B, T, _ = x.shape
        context = x if context is None else context
        q, k, v = (
            f(y).view(B, T, -1, SIZE).transpose(1, 2) for f, y in ((self.wq, x), (self.wk, context), (self.wv, context))
        )
        if self.normed:
            q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if self.rope:
            q, k = rotated(q, self.bug), rotated(k, self.bug)
        if self.groups < HEADS:
            times = HEADS // self.groups
            tiled = self.bug == "tiled"
            k, v = (each.repeat(1, times, 1, 1) if tiled else each.repeat_interleave(times, 1) for each in (k, v))
        causal = self.causal and self.bug != "mask"
        if self.bug == "dropout":
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=causal)
        elif self.bug == "probabilities":
            y = (q @ k.mT).softmax(-1) / math.sqrt(N) @ v
        elif self.bug == "eager dropout":
            logits = (q @ k.mT * self.scale).masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
            y = F.dropout(logits.softmax(-1), 0.2) @ v  # training=True is the default of the function
        elif self.bug == "fused scale":
            y = F.scaled_dot_product_attention(q / (10 * math.sqrt(SIZE)), k, v, is_causal=causal, scale=1.0)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=self.scale)
        return self.wo(y.transpose(1, 2).reshape(B, T, N))


class MLP(nn.Module):
    def __init__(self, *, bias: bool = False, gated: bool = False, bug: str = ""):
        super().__init__()
        self.gated, self.bug = gated, bug
        self.w1, self.w2 = nn.Linear(N, 4 * N, bias=bias), nn.Linear(4 * N, N, bias=bias)
        self.w3 = nn.Linear(N, 4 * N, bias=bias) if gated else None

    def forward(self, x):
        if self.w3 is None:
            return self.w2(F.gelu(self.w1(x)))
        one, other = self.w1(x), self.w3(x)
        return self.w2(F.silu(one * other) if self.bug == "gate" else F.silu(one) * other)


class Layer(nn.Module):
    def __init__(self, *, rms: bool = False, bias: bool = False, gated: bool = False, bug: str = "", **of_attention):
        super().__init__()
        norm = (lambda: RMSNorm(N, bug)) if rms else (lambda: nn.LayerNorm(N))
        self.norm1, self.norm2, self.bug = norm(), norm(), bug
        self.attention = Attention(bias=bias, bug=bug, **of_attention)
        self.mlp = MLP(bias=bias, gated=gated, bug=bug)
        self.alpha, self.beta, self.scale = 1.0, 1.0, None

    def forward(self, x):
        if self.bug == "stream norm":
            x = self.norm1(x)
            x = x + self.attention(x)
            x = self.norm2(x)
            return x + self.mlp(x)
        if self.bug == "queries":
            x = x + self.attention(self.norm1(x), x)
        else:
            branch = self.attention(self.norm1(x))
            x = self.alpha * x + self.beta * (branch if self.scale is None else self.scale * branch)
        return self.alpha * x + self.beta * self.mlp(self.norm2(x))


class Net(nn.Module):
    """Tokens, layers, a norm, a head; `sd` of all weights, 0 of biases."""

    def __init__(self, *, sd=0.02, layers=LAYERS, scaled=False, rms: bool = False, bug: str = "", **of_layers):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, N)
        self.layers = nn.ModuleList([Layer(rms=rms, bug=bug, **of_layers) for _ in range(layers)])
        self.norm = RMSNorm(N, bug) if rms else nn.LayerNorm(N)
        self.head = nn.Linear(N, VOCABULARY, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=sd)
                if getattr(module, "bias", None) is not None:
                    nn.init.zeros_(module.bias)
        if scaled:
            for layer in self.layers:
                for last in (layer.attention.wo, layer.mlp.w2):
                    nn.init.normal_(last.weight, std=sd / math.sqrt(2 * layers))

    def forward(self, idx):
        x = self.embed(idx)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


NANOGPT = {"scaled": True}
LLAMA = {"rms": True, "rope": True, "gated": True}


def with_bug(bug: str, **options) -> Callable[[bool], nn.Module]:
    return lambda fixed: Net(bug="" if fixed else bug, **options)


def changed(change: Callable[[nn.Module], None], make: Callable = Net, *, repairs=False, **options) -> Callable:
    """A model that a function spoils, or repairs."""

    def of(fixed) -> nn.Module:
        model = make(**options)
        if fixed == repairs:
            with torch.no_grad():
                change(model)
        return model

    return of


repaired = functools.partial(changed, repairs=True)


def biases(model):
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            bound = module.in_features**-0.5
            nn.init.uniform_(module.bias, -bound, bound)


def values_of(part: str, **values) -> Callable[[nn.Module], None]:
    """Sets attributes of all layers, or of a part of each."""

    def change(model):
        for layer in model.layers:
            vars(layer.get_submodule(part)).update(values)

    return change


def of_rotations(model):
    model.layers[0].attention.wq.weight.fill_(math.nan)


def layer_scale(value: float) -> Callable[[nn.Module], None]:
    def change(model):
        for layer in model.layers:
            layer.scale = nn.Parameter(torch.full((N,), value))

    return change


def scaled(model):
    for layer in model.layers:
        for last in (layer.attention.wo, layer.mlp.w2):
            last.weight.mul_((2 * len(model.layers)) ** -0.5)


def swapped(model):
    for layer in model.layers:
        w3, w2 = layer.mlp.w3, layer.mlp.w2
        nn.init.normal_(w3.weight, std=0.02 / math.sqrt(2 * len(model.layers)))
        nn.init.normal_(w2.weight, std=0.02)


def copied(model):
    for layer in model.layers[1:]:
        layer.load_state_dict(model.layers[0].state_dict())
