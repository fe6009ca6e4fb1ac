"""Residual branches of PyTorch's and Hugging Face's models, against the inputs of the norms around them.

No hook of the references is at a branch itself.
"""

import json

import numpy as np
import pytest
from helpers.branch_references import assert_branches
from helpers.torch_models import TORCH, bert, encoder, gpt2, hf, nn, prompt, run, sizes, torch

import sdeinfer as si
from sdeinfer.observation import validate_branches

pytestmark = TORCH

WIDTH, LAYERS, UNITS = SMALL = 32, 2, 64
IDS = {"input_ids": torch.tensor([[3, 1, 4, 15, 9]])}
GEMMA = sizes(*SMALL) | {"vocab_size": 99, "num_key_value_heads": 2, "head_dim": 8}


class Normed(nn.Module):
    """PyTorch's own encoder, in evaluation mode the fused kernel's case."""

    def __init__(self):
        super().__init__()
        self.encoder = encoder(*SMALL, norm_first=True)
        self.encoder.norm = nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.encoder(x)


MODELS = {
    "gpt2": (
        lambda: gpt2(WIDTH, LAYERS),
        IDS,
        lambda model: model.h,
        (("ln_1", "ln_2"), "ln_f"),
        ("h.0.attn", "h.1.mlp"),
    ),
    "gemma3": (  # norms after the branches, too
        lambda: hf.Gemma3TextModel(hf.Gemma3TextConfig(**GEMMA)),
        IDS,
        lambda model: model.layers,
        (("input_layernorm", "pre_feedforward_layernorm"), "norm"),
        ("layers.0.self_attn", "layers.1.mlp"),
    ),
    "encoder": (
        Normed,
        prompt(WIDTH, tokens=3, batch=2, dtype=torch.float64),
        lambda model: model.encoder.layers,
        (("norm1", "norm2"), "encoder.norm"),
        ("encoder.layers.0.self_attn", "encoder.layers.1"),
    ),
}
"""Models, inputs, blocks, names inside them of norms, that of the last norm, and those of two branches."""


def flat(tensors):
    return np.stack([each.detach().reshape(-1, WIDTH).numpy() for each in tensors])


def streams(model, modules, inputs):
    """What each module reads."""
    seen = {}
    for module in modules:
        module.register_forward_pre_hook(lambda module, arguments: seen.update({module: arguments[0]}))
    torch.backends.mha.set_fastpath_enabled(False)
    run(model, inputs)
    torch.backends.mha.set_fastpath_enabled(True)
    return [seen[module] for module in modules]


def before_norms(model, inputs, blocks, names, last):
    """U, D and the stream of blocks with norms before their branches."""
    norms = [block.get_submodule(name) for block in blocks(model) for name in names]
    stream = streams(model, [*norms, model.get_submodule(last)], inputs)
    U = flat([norm(x) for norm, x in zip(norms, stream[:-1], strict=True)])
    return U, np.diff(flat(stream), axis=0), flat(stream)


def double(make):
    """A function that draws models in double precision, and the models it drew."""
    drawn = []

    def draw(seed):
        drawn.append(make().double())
        return drawn[-1]

    return draw, drawn


def assert_observed(data, U, D, ends, tolerance=1e-9) -> None:
    assert_branches(validate_branches(data), np.stack(U), np.stack(D), tolerance)
    assert data["kind"].values.tolist() == ["attention", "mlp"] * LAYERS
    assert tuple(data["name"].values[[0, -1]]) == ends


@pytest.mark.parametrize("name", MODELS)
def test_branches_are_what_is_between_the_norms(name):
    make, inputs, blocks, (norms, last), ends = MODELS[name]
    draw, drawn = double(make)
    data = si.observe_branches(draw, inputs, networks=2)
    U, D, stream = zip(*(before_norms(model, inputs, blocks, norms, last) for model in drawn), strict=True)
    if name == "gemma3":
        # What it adds is the norm of an increment, which is observed as it is before.
        after = ("post_attention_layernorm", "post_feedforward_layernorm")
        D = [
            flat(streams(model, [block.get_submodule(norm) for block in blocks(model) for norm in after], inputs))
            for model in drawn
        ]
    # Gemma computes norms and probabilities in float32, which rounds otherwise in two passes.
    assert_observed(data, U, D, ends, tolerance=1e-6 if name == "gemma3" else 1e-9)
    pattern = {"prompts": "3,3"} if name == "encoder" else {"causal": 1.0}
    assert {**data.attrs}.items() >= ({"reads": "branch"} | pattern).items()
    assert "blocks" in data.attrs
    if name == "gpt2":
        of_stream = si.observe_branches(np.stack(stream), ("attention", "mlp"), pattern=si.CAUSAL)
        for variable in ("increment", "between", "kurtosis"):
            np.testing.assert_allclose(of_stream[variable], data[variable], rtol=1e-9, atol=1e-12)


def test_branches_of_bert():
    """Norms come after the sums, and read U + D."""
    draw, drawn = double(lambda: bert(*SMALL))
    data, U, D = si.observe_branches(draw, IDS, networks=2, seed=3), [], []
    for model in drawn:
        norms = [norm for b in model.encoder.layer for norm in (b.attention.output.LayerNorm, b.output.LayerNorm)]
        sums = streams(model, norms, IDS)
        outputs = [norm(x) for norm, x in zip(norms, sums, strict=True)]
        U.append(flat([model.embeddings(IDS["input_ids"]), *outputs[:-1]]))
        D.append(flat(sums) - U[-1])
    assert_observed(data, U, D, ("encoder.layer.0.attention", "encoder.layer.1"))
    assert {each["position"] for each in json.loads(data.attrs["blocks"])} == {"post"}


class TwoStreams(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = encoder(*SMALL), encoder(*SMALL)

    def forward(self, x):
        return self.one(x), self.other(x)


class NoStream(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


REFUSED = [
    (TwoStreams, "stream: the model has 2 residual streams: name one, as by one.layers.*, other.layers.*"),
    (NoStream, "stream: the model has no residual stream"),
    (lambda: Normed().bfloat16(), "input: network 0, branch 0 (encoder.layers.0.self_attn): bfloat16 rounds the sums "),
]


@pytest.mark.parametrize(("make", "message"), REFUSED)
def test_branches_that_cannot_be_observed(make, message):
    x = prompt(WIDTH, tokens=5, dtype=next(make().parameters()).dtype)
    with pytest.raises(si.InputError) as caught:
        si.observe_branches(lambda seed: make(), x)
    assert str(caught.value).startswith(message)


def test_tokens_may_come_before_items():
    """Both have one model in double precision, and see the same prompts."""
    torch.manual_seed(0)
    first = nn.TransformerEncoderLayer(WIDTH, 4, UNITS).double()
    second = nn.TransformerEncoderLayer(WIDTH, 4, UNITS, batch_first=True).double()
    second.load_state_dict(first.state_dict())
    x = prompt(WIDTH, tokens=5, batch=2, dtype=torch.float64)
    one, other = si.observe_branches(first, x.transpose(0, 1)), si.observe_branches(second, x)
    np.testing.assert_allclose(one["increment"], other["increment"], rtol=1e-12)
    assert one.attrs["prompts"] == "5,5"


def test_hidden_states_after_layers_are_those_that_the_library_returns():
    (draw, drawn), ids = double(lambda: gpt2(WIDTH, LAYERS)), IDS["input_ids"]
    settings = {"networks": 2, "tokens": [0, 2], "seed": 0}
    data, again = (si.observe(draw, given, **settings) for given in (ids, IDS))
    with torch.no_grad():
        states = [model.eval()(ids, output_hidden_states=True).hidden_states for model in drawn[:2]]
    # The library's last entry has passed the last norm.
    expected = si.observe(np.stack([[x[0].numpy() for x in each[:-1]] for each in states]), tokens=[0, 2])
    np.testing.assert_allclose(data["covariance"][:, :-1], expected["covariance"], rtol=1e-9)
    assert again.identical(data)
    assert not np.allclose(*data["covariance"].values)  # networks differ


def test_the_model_and_pytorch_are_left_as_they_were():
    """A model in training mode with one part in evaluation mode; there is no dropout while it is observed."""
    model = gpt2(WIDTH, LAYERS).train()
    model.h[0].eval()
    modes, before = [module.training for module in model.modules()], torch.random.get_rng_state()
    one, other = (si.observe_branches(model, IDS) for _ in range(2))
    si.observe_branches(lambda seed: gpt2(WIDTH, LAYERS), IDS)
    assert modes == [module.training for module in model.modules()]
    assert torch.backends.mha.get_fastpath_enabled()
    assert before.equal(torch.random.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert one.identical(other)
    assert torch.is_grad_enabled()
