"""Initialise a small Transformer that is compiled, or whose inputs are no tensors, and print verdicts as JSON."""

import json
from collections import OrderedDict

import torch
from torch import nn

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, SelfAttention

WIDTH, TOKENS = 64, 4
ATTENTION = Block(SelfAttention(heads=4, pattern=si.CAUSAL), norm="layer")
BLOCKS = si.Stack((ATTENTION, Block(MLP(activation="gelu_tanh"), norm="layer")))


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True, bias=False)
        fc1, fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.mlp = nn.Sequential(OrderedDict(fc1=fc1, act=nn.GELU(approximate="tanh"), fc2=fc2))

    def forward(self, x):
        u, mask = self.norm1(x), torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.attn(u, u, u, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(16, WIDTH), nn.ModuleList(Layer() for _ in range(2))

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def of_compiled_layers():
    model = Model()
    model.layers = nn.ModuleList(map(torch.compile, model.layers))
    return model


def compiled_in_place():
    model = Model()
    model.compile()
    return model


tokens = torch.arange(TOKENS)[None]
cases = {
    "tensor": (Model(), tokens),
    "compiled": (torch.compile(Model()), tokens),
    "compiled layers": (of_compiled_layers(), tokens),
    "compiled in place": (compiled_in_place(), tokens),
    "NumPy": (Model(), tokens.numpy()),
    "keyword": (Model(), {"tokens": tokens.numpy()}),
    "list": (Model(), tokens.tolist()),
}
found = {
    name: str(si.audit.initialise(model, "gpt2", inputs, architecture=BLOCKS).audit)
    for name, (model, inputs) in cases.items()
}
print(json.dumps({name: verdict.split(": ", 2)[2] for name, verdict in found.items()}))
