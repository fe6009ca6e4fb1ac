"""A small Transformer whose parts can be left out, put elsewhere or multiplied; PyTorch."""

import math

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional

N, LAYERS, HEADS, WORDS = 64, 4, 4, 99


class RMSNorm(nn.Module):
    def __init__(self, n, *, epsilon=1e-6, axis=-1):
        super().__init__()
        self.weight, self.epsilon, self.axis = nn.Parameter(torch.ones(n)), epsilon, axis

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(self.axis, keepdim=True) + self.epsilon) * self.weight


class Attention(nn.Module):
    def __init__(self, n, o):
        super().__init__()
        self.size, self.o = n // HEADS, o
        self.qkv = nn.Linear(n, 3 * n, bias=False) if o.get("packed") else None
        if self.qkv is None:
            self.wq, self.wk, self.wv = (nn.Linear(n, n, bias=False) for _ in range(3))
        self.wo = nn.Linear(n, n, bias=False)
        if o.get("qk"):
            size = HEADS if o.get("bug") == "over heads" else self.size
            self.q_norm, self.k_norm = RMSNorm(size), RMSNorm(size)
        if o.get("mask") == "buffer":
            self.register_buffer("mask", torch.full((8, 8), -math.inf).triu(1))

    def forward(self, x, positions=None):
        if self.o.get("bug") == "first axis":
            return self.mixed(x.transpose(0, 1)).transpose(0, 1)
        return self.mixed(x)

    def mixed(self, x):
        B, T, n = x.shape
        q, k, v = self.qkv(x).chunk(3, -1) if self.qkv is not None else (self.wq(x), self.wk(x), self.wv(x))
        if self.o.get("bug") == "split":
            q, k, v = (y.view(B, HEADS, T, self.size) for y in (q, k, v))
        else:
            q, k, v = (y.view(B, T, HEADS, self.size).transpose(1, 2) for y in (q, k, v))
        if self.o.get("bug") == "over heads":
            q, k = (norm(y.transpose(1, 3)).transpose(1, 3) for norm, y in ((self.q_norm, q), (self.k_norm, k)))
        elif self.o.get("qk") and self.o.get("bug") != "qk not called":
            q, k = self.q_norm(q), self.k_norm(k)
        if rotation := {"halves": turned, "complex": turned_by_complex_numbers}.get(self.o.get("rope")):
            q, k = rotation(q), k if self.o.get("bug") == "keys not turned" else rotation(k)
        scale = {"√n": n**-0.5, "√heads": HEADS**-0.5, "none": 1.0}.get(self.o.get("bug"), self.size**-0.5)
        logits = q @ k.mT * scale
        if self.o.get("mask") == "buffer":
            logits = logits + self.mask[:T, :T]
        elif self.o.get("mask"):
            seen = 2 if self.o.get("bug") == "one too many" else 1
            logits = logits.masked_fill(torch.ones(T, T, dtype=torch.bool).triu(seen), -math.inf)
        if self.o.get("bound"):
            logits = torch.max(logits, torch.tensor(torch.finfo(logits.dtype).min)).clamp(max=50.0)
        A = logits.softmax(-2 if self.o.get("bug") == "queries" else -1)
        A = A * torch.ones(T, T).tril() if self.o.get("bug") == "late mask" else A
        y = A @ v
        return self.wo((y if self.o.get("bug") == "join" else y.transpose(1, 2)).reshape(B, T, n))


def turned(x):
    T, d = x.shape[-2:]
    angles = torch.arange(T)[:, None] * 1e4 ** (-torch.arange(0, d, 2) / d)
    cos, sin = (torch.cat([f(angles)] * 2, -1) for f in (torch.cos, torch.sin))
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat([-two, one], -1) * sin


def turned_by_complex_numbers(x):
    T, d = x.shape[-2:]
    angles = torch.arange(T)[:, None] * 1e4 ** (-torch.arange(0, d, 2) / d)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(pairs).flatten(-2)


class MLP(nn.Module):
    def __init__(self, n):
        super().__init__()
        self.up, self.down = nn.Linear(n, 4 * n, bias=False), nn.Linear(4 * n, n, bias=False)

    def forward(self, x):
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    def __init__(self, n, o, number):
        super().__init__()
        self.o, self.bug = o, o.get("bug", "") if number in o.get("layers", range(LAYERS)) else ""
        norms = {"epsilon": 1.0 if self.bug == "epsilon" else 1e-6, "axis": 1 if self.bug == "axis" else -1}
        self.norm1, self.norm2 = (
            nn.Identity() if self.bug in (name, "both norms") else RMSNorm(n, **norms) for name in ("norm1", "norm2")
        )
        if self.bug == "norms not called":
            self.norm1, self.norm2 = RMSNorm(n), RMSNorm(n)
        self.attention, self.mlp = Attention(n, o | {"bug": self.bug}), MLP(n)
        if "scale" in o:
            self.register_buffer("scale", torch.tensor(o["scale"] if self.bug != "scale lost" else 0.0))
        if "branch" in o:
            self.register_buffer("branch", torch.tensor(o["branch"] if self.bug != "branch lost" else 0.0))

    def normed(self, norm, x):
        if self.bug == "norms not called":
            return x
        y = norm(x)
        y = 2 * y if self.bug == "factor" else y
        return y * self.scale if "scale" in self.o else y

    def forward(self, x):
        attention = lambda y: self.attention(y) * (self.branch if "branch" in self.o else 1)  # noqa: E731
        if self.o.get("post"):
            y = self.norm1(x + attention(x))
            return self.norm2((x if self.bug == "second sum" else y) + self.mlp(y))
        if self.bug == "no residual":
            return self.mlp(self.normed(self.norm2, attention(self.normed(self.norm1, x))))
        branch = attention(self.normed(self.norm1, x))
        y = branch if self.bug == "no sum" else x - branch if self.bug == "subtracted" else x + branch
        mlp = self.mlp(self.normed(self.norm2, y))
        if self.bug == "no second sum":
            return mlp
        start = x if self.bug == "second sum" else mlp if self.bug == "itself" else y
        return start + mlp


class Net(nn.Module):
    """σ = .02 of all weights; `bug` is in the layers `layers`."""

    def __init__(self, *, n=N, sd=0.02, depth=LAYERS, **o):
        super().__init__()
        self.embed, self.positions = nn.Embedding(WORDS, n), nn.Parameter(sd * torch.randn(8, n))
        self.layers = nn.ModuleList([Layer(n, o, number) for number in range(depth)])
        bug = o.get("bug")
        self.norm = nn.Identity() if o.get("post") or bug == "final norm" else RMSNorm(n)
        self.head = nn.Linear(n, WORDS, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=sd)

    def forward(self, tokens):
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Nested(Net):
    def forward(self, batch):
        return super().forward(batch["text"]["tokens"])


class Modal(Net):
    """Reads what it is given: one matrix without tokens."""

    def __init__(self, **o):
        super().__init__(**o)
        self.image = nn.Linear(N, N, bias=False)
        nn.init.normal_(self.image.weight, std=0.02)

    def forward(self, image, tokens=None):
        y = self.image(image)
        return y if tokens is None else y.mean() + super().forward(tokens)


class Listed(nn.Module):
    """A model whose layers are in a Python list, where their parameters are none of the model."""

    def __init__(self):
        super().__init__()
        self.embedding, self.layers = nn.Embedding(WORDS, N), [nn.Linear(N, N) for _ in range(3)]
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return x


class Conditioned(nn.Module):
    """Branches that a condition scales and gates, both by 0 at first; `one` is the 1 of 1 + scale, or 0 without it."""

    def __init__(self, *, one=1.0):
        super().__init__()
        self.ups, self.downs = (nn.ModuleList(nn.Linear(N, N, bias=False) for _ in range(3)) for _ in "ab")
        self.conditions, self.one = nn.ModuleList(nn.Linear(N, 2 * N) for _ in range(3)), one
        for condition in self.conditions:
            nn.init.zeros_(condition.weight)
            nn.init.zeros_(condition.bias)

    def forward(self, x):
        c = x.mean(1, keepdim=True)
        for up, down, condition in zip(self.ups, self.downs, self.conditions, strict=True):
            scale, gate = condition(c).chunk(2, -1)
            u = F.layer_norm(x, (N,)) * (self.one + scale)
            x = x + gate * down(F.gelu(up(u)))
        return x


class LateralValues(nn.Module):
    """Values of each layer that are averaged with those of the first one."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, N)
        self.matrices = nn.ModuleList(nn.ModuleList(nn.Linear(N, N, bias=False) for _ in range(4)) for _ in range(3))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens):
        x, first = self.embedding(tokens), None
        for q, k, v, o in self.matrices:
            u = F.layer_norm(x, (N,))
            values = v(u)
            first = values if first is None else first
            logits = q(u) @ k(u).mT / N**0.5
            x = x + o(logits.softmax(-1) @ (0.5 * values + 0.5 * first))
        return x


class Repeated(nn.Module):
    """A layer that a loop goes through as often as there are layers."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def __iter__(self):
        return iter([self.layer] * LAYERS)


class Steps(nn.Module):
    """A parameter is added to each time step alone, as RWKV's `time_first`."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, N)
        self.first = nn.ParameterList(torch.full((N,), -1.2) for _ in range(LAYERS))
        self.keys, self.outs = (nn.ModuleList(nn.Linear(N, N, bias=False) for _ in self.first) for _ in range(2))
        for weight in (parameter for parameter in self.parameters() if parameter.ndim == 2):
            nn.init.normal_(weight, std=0.02)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for first, key, out in zip(self.first, self.keys, self.outs, strict=True):
            k = key(F.layer_norm(x, (N,)))
            x = x + out(torch.stack([torch.sigmoid(first + k[:, t]) for t in range(k.shape[1])], 1))
        return x


class TokensFirst(nn.Module):
    """Reads (tokens, items, n); one head, whose logits fall with the distance of tokens."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList(nn.Linear(N, N, bias=False) for _ in "qkvo") for _ in range(LAYERS))
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, x):
        places = torch.arange(len(x))
        for q, k, v, o in self.layers:
            u = F.layer_norm(x, (N,)).transpose(0, 1)
            logits = q(u) @ k(u).mT / N**0.5 - (places[:, None] - places).abs()
            x = x + o(logits.softmax(-1) @ v(u)).transpose(0, 1)
        return x
