"""Audits of PyTorch's and Hugging Face's models: what they see, and what the command says of models."""

import sys
from types import ModuleType

import numpy as np
import pytest
from budget import assert_estimate
from torch_models import TORCH, CausalAttention, bert, covariances, encoder, gpt2, hf, llama, nn, prompt, torch, vit
from typer.testing import CliRunner

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, SelfAttention
from sdeinfer.cli import app

pytestmark = TORCH

WIDTH, LAYERS, UNITS = 128, 4, 512
FACTORS = {"attention": 0.3, "mlp": 0.5}


def drawn_encoder(width, layers):
    """Each layer is drawn."""
    model = encoder(width, layers)
    model.layers = nn.ModuleList([encoder(width, 1).layers[0] for _ in range(layers)])
    return model


class Layer(nn.Module):
    """Both branches read one norm, and their factors are in the sum."""

    def __init__(self):
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), CausalAttention(WIDTH, bias=False)
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
    attention = SelfAttention(heads=4, pattern=si.CAUSAL)
    return si.Stack((Block(attention, norm="layer"), Block(MLP(expansion=UNITS / WIDTH), norm="layer")))


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
    "encoder": (drawn_encoder, "pytorch"),
}


@pytest.mark.parametrize("name", MODELS)
def test_correct_models_pass(name):
    make, recipe = MODELS[name]
    torch.manual_seed(0)
    model = make(WIDTH, LAYERS)
    given = prompt(WIDTH) if name == "encoder" else si.auditing.default_inputs(model)
    found = si.audit(model, given, recipe=recipe)
    assert found.passed, found.verdict
    stream = found.stream[0]
    assert len(stream) == LAYERS + 1
    own = covariances(hidden_states(model, given))
    np.testing.assert_allclose(stream, own, rtol=1e-5, atol=1e-6 * stream.max())


def test_copies_of_one_layer_are_seen():
    torch.manual_seed(0)
    found = si.audit(encoder(WIDTH, LAYERS), prompt(WIDTH), recipe="pytorch")
    assert "attention branches of layers 0, 1, 2, 3 have the same weights; mlp branches of" in found.verdict


def test_factors_outside_of_branches_are_part_of_strengths():
    """Against those of the modules alone, from their observed increments."""
    torch.manual_seed(0)
    model, recipe = Parallel(), si.audit.recipes.pytorch_linear(biases=False)
    found = si.audit(model, prompt(WIDTH), recipe=recipe, architecture=blocks())
    data = si.observe_branches.torch(
        model,
        prompt(WIDTH),
        lambda model: [pair for layer in model.layers for pair in (("attention", layer.attn), ("mlp", layer.mlp))],
        pattern=si.CAUSAL,
    )
    of_modules = si.audit(data, recipe=recipe, architecture=blocks())
    expected = of_modules.branches["strength"] * np.array([0.3, 0.5] * LAYERS)
    np.testing.assert_allclose(found.branches["strength"], expected, rtol=1e-5)
    for each, factor in zip(found.strengths, FACTORS.values(), strict=True):
        assert_estimate(each.ratio, factor, each.sd * each.ratio)
    assert of_modules.passed
    assert not found.passed


def test_growth_of_gradients():
    """Of each size, by `scaling` and through the hidden states that the model returns."""
    torch.manual_seed(0)
    models = {(n, L): gpt2(n, L).double() for n in (32, 64) for L in (2, 3)}
    study = si.audit.scaling(lambda n, L: models[n, L], widths=(32, 64), depths=(2, 3), recipe="gpt2", gradients=True)
    rows = study.sizes[study.sizes["quantity"] == "growth of gradients"]
    assert len(rows) == len(models)
    for size in rows.itertuples():
        model = models[size.width, size.layers]
        first, *_, last = hidden_states(model, si.auditing.default_inputs(model))
        G = torch.as_tensor(np.random.default_rng(0).standard_normal(tuple(last.shape)))
        (gradient,) = torch.autograd.grad(last, first, G)
        growth = float(torch.log(gradient.square().sum() / G.square().sum()))
        np.testing.assert_allclose(size.log_value, growth, rtol=1e-5)
    quantities = {"attention.strength", "growth of gradients", "growth of the stream", "mlp.strength"}
    assert set(study.exponents.index.get_level_values("quantity")) == quantities


def test_a_model_in_training_is_left_as_it_was():
    """By an audit, and by a measurement of gradients."""
    model, given = drawn_encoder(WIDTH, LAYERS).train(), prompt(WIDTH)
    model.layers[1].norm1.eval()
    for each in model.parameters():
        each.grad = torch.randn_like(each)

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
    assert state() == before
    assert str(monitor) == "at initialisation up to step 0"
    with torch.no_grad():
        si.audit.scaling(lambda n, L: model, given, widths=(WIDTH,), depths=(1, 2), gradients=True)
    assert state() == before


def in_parts(model):
    model.layers = nn.ModuleList(map(torch.compile, model.layers))
    return model


def in_place(model):
    model.compile()
    return model


def test_compiled_models_and_inputs_that_are_no_tensors_have_the_same_audit():
    def said(compile_it=lambda model: model, given=None):
        torch.manual_seed(0)
        arguments = {"architecture": blocks(), "roles": {"*.mlp.0": "up", "*.mlp.2": "mlp output"}}
        given = prompt(WIDTH) if given is None else given
        return str(si.audit.initialise(compile_it(Parallel()), "gpt2", given, **arguments).audit).split(": ", 2)[2]

    first, X = said(), prompt(WIDTH).numpy()
    assert first.startswith("attention.strength")
    assert {said(each) for each in (torch.compile, in_parts, in_place)} == {first}
    assert {said(given=given) for given in (X, {"x": X}, X.tolist())} == {first}


def trained():
    """A GPT-2 after some steps of training on random tokens, and the monitor of them."""
    torch.manual_seed(0)
    model = hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=99, n_embd=WIDTH, n_layer=LAYERS, n_head=4)).train()
    ids, optimiser = torch.randint(0, 99, (8, 16)), torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor = si.audit.Monitor(model, recipe="gpt2", every=10)
    for step in range(21):
        monitor(step)
        optimiser.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimiser.step()
    return model, monitor


def test_a_monitor_sees_training():
    _, monitor = trained()
    assert [each.passed for each in monitor.audits.values()] == [True, False, False]
    assert str(monitor).startswith("not at initialisation from step 10 on, in transformer.h.")


def quantised():
    model = gpt2(WIDTH, LAYERS)
    weight = model.h[0].mlp.c_fc.weight
    model.h[0].mlp.c_fc.weight = nn.Parameter((100 * weight).to(torch.int8), requires_grad=False)
    return model


def perturbed():
    model = gpt2(WIDTH, LAYERS)
    with torch.no_grad():
        model.h[2].mlp.c_proj.weight *= 2
    return model


COMMANDS = [
    (lambda: trained()[0], 1, "failed: GPT2LMHeadModel: "),
    (perturbed, 1, "failed: GPT2Model: "),
    (quantised, 2, "sdeinfer: model: h.0.mlp.c_fc.weight is torch.int8: quantised weights are not those of a recipe"),
]


def assert_command(path, recipe, code, start):
    result = CliRunner().invoke(app, ["audit", str(path), "--recipe", recipe])
    lines = result.output.strip().splitlines()
    assert result.exit_code == code, lines
    assert lines[-1].startswith(start)
    assert code < 2 or len(lines) == 1


@pytest.mark.parametrize(("make", "code", "start"), COMMANDS)
def test_the_command(make, code, start, tmp_path, monkeypatch):
    of_test = ModuleType("of_test")
    vars(of_test)["make"] = lambda seed: make()
    monkeypatch.setitem(sys.modules, "of_test", of_test)
    (tmp_path / "model.py").write_text("from of_test import make\n", encoding="utf-8")
    assert_command(tmp_path / "model.py", "gpt2", code, start)


def test_the_command_with_a_configuration(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(gpt2(WIDTH, LAYERS).config.to_json_string(use_diff=False), encoding="utf-8")
    assert_command(path, "gpt2", 0, "passed: GPT2Model: attention.strength ")
    assert_command(path, "lecun", 1, "failed: GPT2Model: ")
