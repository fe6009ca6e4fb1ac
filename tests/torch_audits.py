"""Audits of PyTorch's and Hugging Face's models: a script that needs torch, transformers and this package.

    python torch_audits.py FOLDER

writes FOLDER/written.json: for each model its sentence, and covariances of its residual stream, as the audit saw them
and of the hidden states that the model returns; strengths of a model that has factors outside of its branches; the
growth of gradients, as `scaling` measures it and by hidden states; what an audit changes in a model and its input; and
exit codes and output of the command, for the models of `MAKES`.
"""

import functools
import json
import sys
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers as hf  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, SelfAttention

WIDTH, LAYERS, HEADS, UNITS = 128, 4, 4, 512
SIZES = {"hidden_size": WIDTH, "intermediate_size": UNITS, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS}
TEXT = SIZES | {"vocab_size": 99}
FACTORS = {"attention": 0.3, "mlp": 0.5}


def prompt(width=WIDTH):
    return torch.randn(1, 4, width, generator=torch.Generator().manual_seed(1))


def gpt2(width=WIDTH, layers=LAYERS, seed=0):
    torch.manual_seed(seed)
    return hf.GPT2Model(hf.GPT2Config(vocab_size=99, n_embd=width, n_layer=layers, n_head=HEADS))


def llama():
    return hf.LlamaModel(hf.LlamaConfig(**TEXT, num_key_value_heads=2, pad_token_id=None))


def bert():
    return hf.BertModel(hf.BertConfig(**TEXT), add_pooling_layer=False)


def vit():
    return hf.ViTModel(hf.ViTConfig(**SIZES, image_size=8, patch_size=4), add_pooling_layer=False)


def encoder(*, drawn=True):
    """PyTorch's encoder copies one layer into all, unless each is drawn."""
    make = functools.partial(nn.TransformerEncoderLayer, WIDTH, HEADS, UNITS, batch_first=True)
    model = nn.TransformerEncoder(make(), LAYERS)
    if drawn:
        model.layers = nn.ModuleList([make() for _ in range(LAYERS)])
    return model


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x):
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, dim=-1))
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Both branches read one norm, and their factors are in the sum."""

    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), Attention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, UNITS, bias=False), nn.GELU(), nn.Linear(UNITS, WIDTH, bias=False))

    def forward(self, *, stream):
        u = self.norm(stream)
        return stream + FACTORS["attention"] * self.attn(u) + FACTORS["mlp"] * self.mlp(u)


class Parallel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(stream=x)
        return x


def blocks():
    attention = SelfAttention(heads=HEADS, pattern=si.CAUSAL)
    return si.Stack((Block(attention, norm="layer"), Block(MLP(expansion=UNITS / WIDTH), norm="layer")))


def covariances(states):
    flat = [each.detach().double().numpy().reshape(-1, each.shape[-1]) for each in states]
    return [(X @ X.T / X.shape[1]).tolist() for X in flat]


def hidden_states(model, inputs):
    """The residual stream before the first and after each layer, as the model returns it or by calls of its layers."""
    model.eval()
    if not isinstance(inputs, dict):
        states = [inputs]
        for layer in model.layers:
            states.append(layer(states[-1]))
        return states
    last = []
    norm = next((getattr(model, name) for name in ("ln_f", "norm", "layernorm") if hasattr(model, name)), None)
    if norm is not None:
        norm.register_forward_pre_hook(lambda module, arguments: last.append(arguments[0]))
    states = list(model(**inputs, output_hidden_states=True).hidden_states)
    return states[:-1] + last if last else states


MODELS = {
    "gpt2": (gpt2, "gpt2"),
    "llama": (llama, "normal"),
    "bert": (bert, "normal"),
    "vit": (vit, "normal"),
    "encoder": (encoder, "pytorch"),
    "encoder of copies": (functools.partial(encoder, drawn=False), "pytorch"),
}


def audited(make, recipe):
    torch.manual_seed(0)
    model = make()
    given = si.auditing.default_inputs(model) if hasattr(model, "config") else prompt()
    found = si.audit(model, given, recipe=recipe)
    return {
        "passed": found.passed,
        "verdict": found.verdict,
        "stream": found.stream[0].tolist(),
        "own": covariances(hidden_states(model, given)),
    }


def factors():
    """Strengths with the factors of the sums, and those of the modules alone, from their observed increments."""
    torch.manual_seed(0)
    model = Parallel()
    recipe = si.audit.recipes.pytorch_linear(biases=False)
    found = si.audit(model, prompt(), recipe=recipe, architecture=blocks())
    data = si.observe_branches.torch(
        model,
        prompt(),
        lambda model: [pair for layer in model.layers for pair in (("attention", layer.attn), ("mlp", layer.mlp))],
        pattern=si.CAUSAL,
    )
    of_modules = si.audit(data, recipe=recipe, architecture=blocks())
    return {
        "strengths": found.branches["strength"].tolist(),
        "of modules": of_modules.branches["strength"].tolist(),
        "ratios": {each.name: [each.ratio, each.sd * each.ratio] for each in found.strengths},
        "passed": [found.passed, of_modules.passed],
        "verdict": found.verdict,
    }


def growths():
    """The growth of gradients of each size, of `scaling` and through the hidden states that the model returns."""
    models = {(n, L): gpt2(n, L, seed=n + L).double() for n in (32, 64) for L in (2, 3)}
    study = si.audit.scaling(lambda n, L: models[n, L], widths=(32, 64), depths=(2, 3), recipe="gpt2", gradients=True)
    rows, table = study.sizes[study.sizes["quantity"] == "growth of gradients"], []
    for size in rows.itertuples():
        model = models[size.width, size.layers]
        first, *_, last = hidden_states(model, si.auditing.default_inputs(model))
        G = torch.as_tensor(np.random.default_rng(0).standard_normal(tuple(last.shape)))
        (gradient,) = torch.autograd.grad(last, first, G)
        table.append([size.log_value, float(torch.log(gradient.square().sum() / G.square().sum()))])
    return {"growths": table, "quantities": sorted(set(study.exponents.index.get_level_values("quantity")))}


def untouched():
    """What an audit, and a measurement of gradients, change in a model in training and in its input."""
    model = encoder().train()
    model.layers[1].norm1.eval()
    for each in model.parameters():
        each.grad = torch.randn_like(each)
    given = prompt()

    def state():
        return {
            "modes": [module.training for module in model.modules()],
            "weights": [each.detach().double().sum().item() for each in model.parameters()],
            "gradients": [each.grad.double().sum().item() for each in model.parameters()],
            "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
            "generator": torch.get_rng_state().tolist(),
            "input": [given.requires_grad, given.sum().item()],
        }

    before = state()
    monitor = si.audit.Monitor(model, given, recipe="pytorch", every=2)
    monitor(0)
    after = state()
    with torch.no_grad():
        study = si.audit.scaling(lambda n, L: model, given, widths=(WIDTH,), depths=(1, 2), gradients=True)
    changed = {
        name: [key for key, value in before.items() if value != each[key]]
        for name, each in (("monitor", after), ("gradients", state()))
    }
    return {"changed": changed, "growth": len(study.sizes), "verdict": str(monitor)}


def compiled():
    """What is said of one network that is compiled, as a whole or in parts, and of inputs that are no tensors."""

    def said(compile_it=lambda model: model, given=None):
        torch.manual_seed(0)
        given = prompt() if given is None else given
        arguments = {"architecture": blocks(), "roles": {"*.mlp.0": "up", "*.mlp.2": "mlp output"}}
        return str(si.audit.initialise(compile_it(Parallel()), "gpt2", given, **arguments).audit)

    def in_parts(model):
        model.layers = nn.ModuleList(map(torch.compile, model.layers))
        return model

    def in_place(model):
        model.compile()
        return model

    found = [said(), *map(said, (torch.compile, in_parts, in_place))]
    found += [said(given=given) for given in (prompt().numpy(), {"x": prompt().numpy()}, prompt().tolist())]
    return [verdict.split(": ", 2)[2] for verdict in found]


def trained(*, monitored=False):
    """A GPT-2 after some steps of training on random tokens."""
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=99, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS)).train()
    ids = torch.randint(0, 99, (8, 16))
    optimiser = torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor = si.audit.Monitor(model, recipe="gpt2", every=10)
    for step in range(21):
        if monitored:
            monitor(step)
        optimiser.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
    return (model, monitor) if monitored else model


def quantised():
    model = gpt2()
    weight = model.h[0].mlp.c_fc.weight
    model.h[0].mlp.c_fc.weight = nn.Parameter((100 * weight).to(torch.int8), requires_grad=False)
    return model


def perturbed():
    model = gpt2()
    with torch.no_grad():
        model.h[2].mlp.c_proj.weight *= 2
    return model


MAKES = {
    "trained": ("trained()", {}, "gpt2"),
    "perturbed": ("perturbed()", {}, "gpt2"),
    "quantised": ("quantised()", {}, "gpt2"),
    "no branch": ("nn.Sequential(nn.Linear(8, 8))", {}, "gpt2"),
    "no match": ("gpt2()", {"attention": "h.*.attention", "mlp": "h.*.mlp"}, "gpt2"),
}
"""Models of the command, branches and recipe."""


def commands(folder):
    """Exit code and output of the command for each model."""
    from typer.testing import CliRunner

    from sdeinfer.cli import app

    (folder / "config.json").write_text(gpt2().config.to_json_string(use_diff=False), encoding="utf-8")
    models = {"config": (folder / "config.json", "gpt2"), "other recipe": (folder / "config.json", "lecun")}
    for number, (name, (model, branches, recipe)) in enumerate(MAKES.items()):
        lines = [f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})", "from torch_audits import *"]
        lines += [f"branches = {branches or None}", f"def make(seed): return {model}", ""]
        (folder / f"model{number}.py").write_text("\n".join(lines), encoding="utf-8")
        models[name] = (folder / f"model{number}.py", recipe)
    found = {}
    for name, (path, recipe) in models.items():
        result = CliRunner().invoke(app, ["audit", str(path), "--recipe", recipe])
        found[name] = [result.exit_code, result.output.strip().splitlines()]
    return found


def main(folder):
    _, monitor = trained(monitored=True)
    written = {
        "models": {name: audited(*each) for name, each in MODELS.items()},
        "factors": factors(),
        "gradients": growths(),
        "untouched": untouched(),
        "compiled": compiled(),
        "monitor": {"passed": [each.passed for each in monitor.audits.values()], "verdict": str(monitor)},
        "commands": commands(folder),
    }
    (folder / "written.json").write_text(json.dumps(written))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
