"""Residual branches of PyTorch's and Hugging Face's models, against the inputs of the norms around them.

No hook of the references is at a branch itself.
"""

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


def branches(blocks, attention, mlp):
    """A function from a model to the branches of its blocks, whose ends are tuples of names inside them."""

    def of(model):
        both = (("attention", attention), ("mlp", mlp))
        return [(kind, *map(block.get_submodule, ends)) for block in blocks(model) for kind, ends in both]

    return of


MODELS = {
    "gpt2": (
        lambda: gpt2(WIDTH, LAYERS),
        IDS,
        lambda model: model.h,
        (("attn",), ("mlp",), ("ln_1", "ln_2"), "ln_f"),
        ("h.0.attn", "h.1.mlp"),
    ),
    "gemma3": (  # norms after the branches, too
        lambda: hf.Gemma3TextModel(hf.Gemma3TextConfig(**GEMMA)),
        IDS,
        lambda model: model.layers,
        (
            ("self_attn", "post_attention_layernorm"),
            ("mlp", "post_feedforward_layernorm"),
            ("input_layernorm", "pre_feedforward_layernorm"),
            "norm",
        ),
        ("layers.0.self_attn", "layers.1.mlp"),
    ),
    "encoder": (
        Normed,
        prompt(WIDTH, tokens=3, batch=2, dtype=torch.float64),
        lambda model: model.encoder.layers,
        (("self_attn",), ("linear1", "linear2"), ("norm1", "norm2"), "encoder.norm"),
        ("encoder.layers.0.self_attn", "encoder.layers.1.linear1"),
    ),
}
"""Models, inputs, blocks, names inside them of branches and norms, that of the last norm, and those of two branches."""


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


def assert_observed(data, U, D, ends) -> None:
    assert_branches(validate_branches(data), np.stack(U), np.stack(D))
    assert data["kind"].values.tolist() == ["attention", "mlp"] * LAYERS
    assert tuple(data["name"].values[[0, -1]]) == ends


@pytest.mark.parametrize("name", MODELS)
def test_branches_are_what_is_between_the_norms(name):
    make, inputs, blocks, (attention, mlp, norms, last), ends = MODELS[name]
    (draw, drawn), pattern = double(make), si.Pattern() if name == "encoder" else si.CAUSAL
    find = branches(blocks, attention, mlp)
    data = si.observe_branches.torch(draw, inputs, find, networks=2, pattern=pattern)
    U, D, stream = zip(*(before_norms(model, inputs, blocks, norms, last) for model in drawn), strict=True)
    assert_observed(data, U, D, ends)
    assert data.attrs == {"reads": "branch"} | ({"prompts": "3,3"} if name == "encoder" else {"causal": 1.0})
    if name == "gpt2":
        of_stream = si.observe_branches(np.stack(stream), ("attention", "mlp"), pattern=si.CAUSAL)
        for variable in ("increment", "between", "kurtosis"):
            np.testing.assert_allclose(of_stream[variable], data[variable], rtol=1e-9, atol=1e-12)


def test_branches_of_bert():
    """Norms come after the sums, and read U + D."""
    draw, drawn = double(lambda: bert(*SMALL))
    parts = ("attention.self", "attention.output.dense"), ("intermediate.dense", "output.dense")
    find = branches(lambda model: model.encoder.layer, *parts)
    data, U, D = si.observe_branches.torch(draw, IDS, find, networks=2, seed=3), [], []
    for model in drawn:
        norms = [norm for b in model.encoder.layer for norm in (b.attention.output.LayerNorm, b.output.LayerNorm)]
        sums = streams(model, norms, IDS)
        outputs = [norm(x) for norm, x in zip(norms, sums, strict=True)]
        U.append(flat([model.embeddings(IDS["input_ids"]), *outputs[:-1]]))
        D.append(flat(sums) - U[-1])
    assert_observed(data, U, D, ("encoder.layer.0.attention.self", "encoder.layer.1.intermediate.dense"))
    assert data.attrs == {"reads": "branch"}


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.wide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, UNITS)

    def forward(self, x):
        self.wide(x)
        x = x + self.b(x)
        x = x + self.a(x)
        return x + self.a(x)


NOT_SEEN = "its input is not seen: the model does not call the module, or a fused kernel replaces it"
OUT_OF_ORDER = "is called twice or out of order"
REFUSED = [
    (Twice, lambda m: [("mlp", m.a)], f"branches: network 0, branch 0 (a): {OUT_OF_ORDER}"),
    (Twice, lambda m: [("mlp", m.a), ("mlp", m.b)], f"branches: network 0, branch 1 (b): {OUT_OF_ORDER}"),
    (
        Twice,
        lambda m: [("mlp", m.wide)],
        "branches: network 0, branch 0 (wide): reads shape (1, 5, 32) and adds (1, 5, 64): one shape is needed",
    ),
    (
        Normed,
        lambda m: [("mlp", m.encoder.layers[0].self_attn.out_proj)],
        f"branches: network 0, branch 0 (encoder.layers.0.self_attn.out_proj): {NOT_SEEN}",
    ),
    (
        lambda: Normed().bfloat16(),
        lambda m: [("mlp", m.encoder.layers[0].self_attn)],
        "input: network 0, branch 0 (encoder.layers.0.self_attn): bfloat16 rounds the sums inside the branch: run the",
    ),
    (
        lambda: nn.TransformerEncoderLayer(WIDTH, 4),
        lambda m: [("attention", m.self_attn)],
        "branches: self_attn takes (tokens, batch, width): make it with batch_first=True",
    ),
]


@pytest.mark.parametrize(("make", "find", "message"), REFUSED)
def test_branches_that_cannot_be_observed(make, find, message):
    x = prompt(WIDTH, tokens=5, dtype=next(make().parameters()).dtype)
    with pytest.raises(si.InputError) as caught:
        si.observe_branches.torch(lambda seed: make(), x, find)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (
            lambda m: [*m.h, nn.Linear(WIDTH, WIDTH)],
            "layers: network 0, layer 3 (?): its output is not seen: the model ",
        ),
        (lambda m: [m.h[1], m.h[0]], f"layers: network 0, layer 2 (h.0): {OUT_OF_ORDER}"),
        (lambda m: [m.h[0], m.h[0]], "layers: at least one module, and each only once, is needed, got 2"),
    ],
)
def test_layers_that_cannot_be_observed(layers, message):
    with pytest.raises(si.InputError) as caught:
        si.observe.torch(lambda seed: gpt2(WIDTH, LAYERS), IDS, layers=layers, networks=1, seed=0)
    assert str(caught.value).startswith(message)


def test_hidden_states_after_layers_are_those_that_the_library_returns():
    (draw, drawn), ids = double(lambda: gpt2(WIDTH, LAYERS)), IDS["input_ids"]
    settings = {"layers": lambda model: model.h[:1], "networks": 2, "tokens": [0, 2], "seed": 0}
    data, again = (si.observe.torch(draw, given, **settings) for given in (ids, IDS))
    with torch.no_grad():
        states = [model.eval()(ids, output_hidden_states=True).hidden_states[:2] for model in drawn[:2]]
    expected = si.observe(np.stack([[x[0].numpy() for x in each] for each in states]), tokens=[0, 2])
    np.testing.assert_allclose(data["covariance"], expected["covariance"], rtol=1e-9)
    assert data.attrs == expected.attrs
    assert again.identical(data)
    assert not np.allclose(*data["covariance"].values)  # networks differ


def test_the_model_and_pytorch_are_left_as_they_were():
    """A model in training mode with one part in evaluation mode; there is no dropout while it is observed."""
    model, find = gpt2(WIDTH, LAYERS).train(), branches(lambda model: model.h, ("attn",), ("mlp",))
    model.h[0].eval()
    modes, before = [module.training for module in model.modules()], torch.random.get_rng_state()
    one, other = (si.observe_branches.torch(model, IDS, find) for _ in range(2))
    si.observe_branches.torch(lambda seed: gpt2(WIDTH, LAYERS), IDS, find)
    assert modes == [module.training for module in model.modules()]
    assert torch.backends.mha.get_fastpath_enabled()
    assert before.equal(torch.random.get_rng_state())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert one.identical(other)
    assert torch.is_grad_enabled()
