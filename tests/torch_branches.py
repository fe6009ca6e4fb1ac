"""Residual branches of PyTorch models, observed: a script that needs torch, transformers and this package.

    python torch_branches.py FOLDER

writes of each model NAME.nc, the Dataset of hooks, and NAME.npz with U and D of every branch, which come from the
inputs of the norms around it: no hook is at the branch itself. `errors.json` holds the message of each faulty use, and
`states.json` what must be as before. Models are made from small configurations, without a download.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers as hf  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

import sdeinfer as si
from sdeinfer import observe_branches

WIDTH, LAYERS, TOKENS = 32, 2, 5
IDS = torch.tensor([[3, 1, 4, 15, 9]])
LLAMA = {"vocab_size": 99, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": LAYERS}
LLAMA |= {"num_attention_heads": 4, "num_key_value_heads": 2}
BERT = {"hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": 4}


class Normed(nn.Module):
    """PyTorch's own encoder, in evaluation mode the fused kernel's case."""

    def __init__(self, **options):
        super().__init__()
        block = nn.TransformerEncoderLayer(WIDTH, 4, 64, norm_first=True, batch_first=True, **options)
        self.encoder = nn.TransformerEncoder(block, LAYERS, norm=nn.LayerNorm(WIDTH))

    def forward(self, x):
        return self.encoder(x)


def gpt2():
    return hf.GPT2Model(hf.GPT2Config(vocab_size=99, n_embd=WIDTH, n_layer=LAYERS, n_head=4))


def vit():
    return hf.ViTModel(hf.ViTConfig(**BERT, image_size=8, patch_size=4), add_pooling_layer=False)


def pairs(blocks, attention, mlp):
    """The branches of blocks, as tuples of names inside them."""

    def of(block, kind, names):
        return (kind, *(block.get_submodule(name) for name in names))

    return [part for block in blocks for part in (of(block, "attention", attention), of(block, "mlp", mlp))]


def norms(model, blocks, names, last):
    """The norm before each branch, and the one after the last."""
    return [block.get_submodule(name) for block in blocks for name in names] + [model.get_submodule(last)]


LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
LLAMA_PARTS = (lambda model: model.layers, ("self_attn",), ("mlp",), LLAMA_NORMS, "norm")
MODELS = {
    "gpt2": (gpt2, {"input_ids": IDS}, lambda model: model.h, ("attn",), ("mlp",), ("ln_1", "ln_2"), "ln_f"),
    "llama": (lambda: hf.LlamaModel(hf.LlamaConfig(**LLAMA)), {"input_ids": IDS}, *LLAMA_PARTS),
    "gemma3": (  # norms after the branches, too
        lambda: hf.Gemma3TextModel(hf.Gemma3TextConfig(**LLAMA, head_dim=8)),
        {"input_ids": IDS},
        lambda model: model.layers,
        ("self_attn", "post_attention_layernorm"),
        ("mlp", "post_feedforward_layernorm"),
        ("input_layernorm", "pre_feedforward_layernorm"),
        "norm",
    ),
    "vit": (
        vit,
        {"pixel_values": torch.linspace(-1, 1, 3 * 64, dtype=torch.float64).cos().reshape(1, 3, 8, 8)},
        lambda model: model.layers,
        ("attention",),
        ("mlp",),
        ("layernorm_before", "layernorm_after"),
        "layernorm",
    ),
    "encoder": (
        Normed,
        torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64),
        lambda model: model.encoder.layers,
        ("self_attn",),
        ("linear1", "linear2"),
        ("norm1", "norm2"),
        "encoder.norm",
    ),
}


def bert():
    model = hf.BertModel(hf.BertConfig(**BERT, vocab_size=99), add_pooling_layer=False)
    attention = ("attention.self", "attention.output.dense")
    return model, lambda model: pairs(model.encoder.layer, attention, ("intermediate.dense", "output.dense"))


def run(model, inputs):
    model.eval()
    with torch.no_grad():
        model(**inputs) if isinstance(inputs, dict) else model(inputs)


def streams(model, modules, inputs):
    """What each module reads, as arrays (tokens, width)."""
    seen = {}
    for module in modules:
        module.register_forward_pre_hook(lambda module, arguments: seen.update({module: arguments[0]}))
    torch.backends.mha.set_fastpath_enabled(False)
    run(model, inputs)
    torch.backends.mha.set_fastpath_enabled(True)
    return [seen[module] for module in modules]


def flat(tensors):
    return np.stack([each.detach().reshape(-1, WIDTH).numpy() for each in tensors])


def before_norms(model, inputs, blocks, names, last):
    """U and D of blocks with norms before their branches, and the stream."""
    around = norms(model, blocks(model), names, last)
    stream = streams(model, around, inputs)
    with torch.no_grad():
        U = flat([norm(x) for norm, x in zip(around[:-1], stream[:-1], strict=True)])
    return U, np.diff(flat(stream), axis=0), flat(stream)


def of_bert(model, inputs):
    """U and D of blocks with norms after their sums: a norm reads U + D."""
    around = [
        part for block in model.encoder.layer for part in (block.attention.output.LayerNorm, block.output.LayerNorm)
    ]
    sums = streams(model, around, inputs)
    with torch.no_grad():
        outputs = [norm(x) for norm, x in zip(around, sums, strict=True)]
        first = model.embeddings(inputs["input_ids"])
    U = flat([first, *outputs[:-1]])
    return U, flat(sums) - U


def double(make):
    """A function that draws models in double precision, and the models it drew."""
    drawn = []

    def draw(seed):
        drawn.append(make().double())
        return drawn[-1]

    return draw, drawn


def write(folder, name, data, found):
    data.to_netcdf(folder / f"{name}.nc", engine="h5netcdf")
    arrays = {
        part: np.stack([each[i] for each in found]) for i, part in enumerate(("U", "D", "stream")[: len(found[0])])
    }
    np.savez(folder / f"{name}.npz", **arrays)


def write_models(folder):
    for name, (make, inputs, blocks, attention, mlp, names, last) in MODELS.items():
        draw, drawn = double(make)
        pattern = si.Pattern() if name in ("vit", "encoder") else si.CAUSAL
        branches = lambda model: pairs(blocks(model), attention, mlp)  # noqa: B023, E731
        data = observe_branches.torch(draw, inputs, branches, networks=2, pattern=pattern)
        write(folder, name, data, [before_norms(model, inputs, blocks, names, last) for model in drawn])
    draw, drawn = double(lambda: bert()[0])
    inputs = {"input_ids": IDS}
    data = observe_branches.torch(draw, inputs, bert()[1], networks=2, seed=3)
    write(folder, "bert", data, [of_bert(model, inputs) for model in drawn])


def branches_of_gpt2(model):
    return pairs(model.h, ("attn",), ("mlp",))


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 64)

    def forward(self, x):
        self.wide(x)
        x = x + self.b(x)
        x = x + self.a(x)
        return x + self.a(x)


ERRORS = {
    "twice": (Twice, lambda m: [("mlp", m.a)], {}),
    "order": (Twice, lambda m: [("mlp", m.a), ("mlp", m.b)], {}),
    "shape": (Twice, lambda m: [("mlp", m.wide)], {}),
    "unused": (Normed, lambda m: [("mlp", m.encoder.layers[0].self_attn.out_proj)], {}),
    "none": (Twice, lambda m: [], {}),
    "entry": (Twice, lambda m: [m.a], {}),
    "several": (Normed(), lambda m: [("mlp", m.encoder.layers[0].self_attn)], {"networks": 2}),
    "half": (lambda: Normed().bfloat16(), lambda m: [("mlp", m.encoder.layers[0].self_attn)], {"half": True}),
    "batch": (lambda: nn.TransformerEncoderLayer(WIDTH, 4), lambda m: [("attention", m.self_attn)], {}),
}


LAYERS_OF = {
    "layer not called": lambda m: [*m.h, nn.Linear(WIDTH, WIDTH)],
    "layers out of order": lambda m: [m.h[1], m.h[0]],
    "a layer twice": lambda m: [m.h[0], m.h[0]],
    "no layer": lambda m: [],
}


def write_errors(folder):
    messages = {}
    for name, layers in LAYERS_OF.items():
        try:
            si.observe.torch(lambda seed: gpt2(), {"input_ids": IDS}, layers=layers, networks=1, seed=0)
        except si.InputError as error:
            messages[name] = str(error)
    for name, (make, branches, options) in ERRORS.items():
        x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
        x = x.bfloat16() if options.pop("half", False) else x
        try:
            draw = make if isinstance(make, nn.Module) else lambda seed, make=make: make()
            observe_branches.torch(draw, x, branches, **options)
        except si.InputError as error:
            messages[name] = str(error)
    (folder / "errors.json").write_text(json.dumps(messages))


def layers_agree():
    """Whether hidden states after layers are those that the library returns, of networks that differ."""
    draw, drawn = double(gpt2)
    data = si.observe.torch(draw, IDS, layers=lambda model: model.h[:1], networks=2, tokens=[0, 2], seed=0)
    again = si.observe.torch(draw, {"input_ids": IDS}, layers=lambda m: m.h[:1], networks=2, tokens=[0, 2], seed=0)
    with torch.no_grad():
        states = [model.eval()(IDS, output_hidden_states=True).hidden_states[:2] for model in drawn[:2]]
    expected = si.observe(np.stack([[x[0].numpy() for x in each] for each in states]), tokens=[0, 2])
    same = np.allclose(data["covariance"], expected["covariance"], rtol=1e-9) and data.attrs == expected.attrs
    return bool(same) and again.identical(data) and not np.allclose(*data["covariance"].values)


def write_states(folder):
    """Of a model in training mode with one part in evaluation mode, and of PyTorch itself."""
    model = gpt2().train()
    model.h[0].eval()
    modes = [module.training for module in model.modules()]
    before = torch.random.get_rng_state()
    one, other = (observe_branches.torch(model, {"input_ids": IDS}, branches_of_gpt2) for _ in range(2))
    observe_branches.torch(lambda seed: gpt2(), {"input_ids": IDS}, branches_of_gpt2)
    states = {
        "modes": modes == [module.training for module in model.modules()],
        "fast path": torch.backends.mha.get_fastpath_enabled(),
        "generator": bool((before == torch.random.get_rng_state()).all()),
        "hooks": not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules()),
        "no dropout": one.identical(other),
        "gradients": torch.is_grad_enabled(),
        "layers": layers_agree(),
    }
    (folder / "states.json").write_text(json.dumps(states))


if __name__ == "__main__":
    out = Path(sys.argv[1])
    write_models(out)
    write_errors(out)
    write_states(out)
