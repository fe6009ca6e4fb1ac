"""Audits of PyTorch's and Hugging Face's models: correct ones pass, planted faults are found and named."""

import math

import numpy as np
import pytest
from helpers import reported_models as own
from helpers.torch_models import TORCH, encoder, hf, nn, sizes, torch

import sdeinfer as si

pytestmark = TORCH

N, LAYERS = 64, 4
SIZES = sizes(N, LAYERS, 128) | {"vocab_size": 199}
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 16}
CONFIGURATIONS = {
    "gpt2": hf.GPT2Config(n_embd=N, n_layer=LAYERS, n_head=4, vocab_size=199),
    "bert": hf.BertConfig(**SIZES),
    "llama": hf.LlamaConfig(**GROUPED),
    "qwen3": hf.Qwen3Config(**GROUPED),
    "gemma3": hf.Gemma3TextConfig(**GROUPED),
    "olmo2": hf.Olmo2Config(**GROUPED | {"pad_token_id": 1}),
    "mixtral": hf.MixtralConfig(**GROUPED, num_local_experts=4),
    "t5": hf.T5Config(
        d_model=N, d_kv=16, d_ff=128, num_layers=LAYERS, num_decoder_layers=LAYERS, num_heads=4, vocab_size=199
    ),
    "dinov2": hf.Dinov2Config(**SIZES | {"image_size": 32, "patch_size": 8}),
    "mamba": hf.MambaConfig(hidden_size=N, num_hidden_layers=LAYERS, vocab_size=199),
    "whisper": hf.WhisperConfig(
        d_model=N,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        vocab_size=199,
        num_mel_bins=16,
        max_source_positions=32,
        pad_token_id=1,
        bos_token_id=1,
        eos_token_id=1,
        decoder_start_token_id=1,
    ),
    "granite": hf.GraniteConfig(**GROUPED, residual_multiplier=0.22),
    "neox": hf.GPTNeoXConfig(**SIZES),
    "glm4v_vision": hf.Glm4vVisionConfig(
        depth=LAYERS, hidden_size=N, out_hidden_size=N, intermediate_size=128, num_heads=4, image_size=32, patch_size=8
    ),
}


def model(name, seed=0):
    torch.manual_seed(seed)
    return hf.AutoModel.from_config(CONFIGURATIONS[name])


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_correct_models_pass(name):
    found = si.audit(model(name), recipe="auto")
    assert found.passed, found.verdict
    assert found.layers == LAYERS
    without = si.audit(model(name))
    assert without.passed is None
    assert str(without).startswith("nothing declared: ")


def test_a_mask_is_no_stream():
    vision = sizes(32, 1) | {"image_size": 32, "patch_size": 16}
    torch.manual_seed(0)
    network = hf.AutoModel.from_config(hf.GitConfig(**SIZES, vision_config=vision))
    found = si.audit(network, recipe="auto")
    assert found.passed, found.verdict
    assert len(found.account.streams[-1]) == 2 * LAYERS


def test_norms_of_a_library_divide_by_the_root():
    """Their rows may look otherwise, as those of norms over a batch of images do."""
    torch.manual_seed(0)
    network = hf.AutoModel.from_config(hf.MobileViTConfig(image_size=64))
    found = si.audit(network, {"pixel_values": torch.randn(2, 3, 64, 64)}, recipe="auto")
    assert found.passed, found.verdict


def test_positions_that_count_tokens_are_no_embedding_of_tokens():
    torch.manual_seed(0)
    network = hf.AutoModel.from_config(hf.RobertaConfig(**SIZES))
    account = si.audit(network, recipe="auto").account
    assert account.matrices["embeddings.position_embeddings.weight"].role == "position"
    assert account.matrices["embeddings.word_embeddings.weight"].role == "embedding"


class Turned(nn.Module):
    """Queries that are divided by √d_k before a half of each is rotated."""

    def forward(self, x):
        first, second = x[..., :8], x[..., 8:]
        angle = torch.arange(x.shape[1], dtype=x.dtype)[:, None] / 10 ** torch.arange(4.0).repeat(2)
        half = torch.cat([-first[..., 4:], first[..., :4]], dim=-1)
        return torch.cat([first * angle.cos() + half * angle.sin(), second], dim=-1)


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(199, 16)
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16, bias=False) for _ in range(4))
        self.turned = Turned()

    def forward(self, tokens):
        x = self.embedding(tokens)
        logits = self.turned(self.q(x) / 4) @ self.turned(self.k(x)).transpose(1, 2)
        x = x + self.o(logits.softmax(-1) @ self.v(x))
        return x + torch.randn(len(x), 1, 1) * torch.randn_like(x) * 1e-3


def test_a_factor_before_rotations_of_a_half_is_seen_and_noise_is_no_dropout():
    torch.manual_seed(0)
    found = si.audit(Head(), torch.arange(16).reshape(2, 8))
    (logits,) = found.account.logits
    assert logits.factor == pytest.approx(1 / 4, rel=1e-3)
    assert "dropout" not in {test.topic for test in found.failed}


def matrices(network, part):
    return [each for name, each in network.named_parameters() if part in name and each.dim() > 1]


PARTS = {
    "whisper": "fc1",
    "gpt2": "mlp.c_fc",
    "qwen3": "mlp.up_proj",
    "gemma3": "mlp.up_proj",
    "olmo2": "mlp.up_proj",
    "mixtral": "experts.down_proj",
    "t5": "DenseReluDense.wi",
    "dinov2": "mlp.fc1",
    "mamba": "mixer.in_proj",
}


def of_one_kind(network, part):
    for each in matrices(network, part):
        each.mul_(1.05)


def of_one_matrix(network, part):
    matrices(network, part)[2].mul_(1.1)


def copied(network, part):
    first, *_, last = matrices(network, part)
    last.copy_(first)


def shards(network, part):
    each = matrices(network, part)[1].flatten(0, -2)
    half = len(each) // 2
    each[half : 2 * half].copy_(each[:half])


def of_the_stream(network, part):
    """Every sum of the stream multiplies what was there, or what is added."""

    def scaled(module, arguments, output):
        first = output[0] if isinstance(output, tuple) else output
        return (1.25 * first, *output[1:]) if isinstance(output, tuple) else 1.25 * first

    for module in layers_of(network):
        module.register_forward_hook(scaled)


def of_one_layer(network, part):
    """The second branch, or its norm, adds twice its output."""
    branch_of(network).register_forward_hook(lambda module, arguments, output: 2 * output)


def of_dropout(network, part):
    """A dropout of functions whose `training` is True by default."""
    branch_of(network).register_forward_hook(lambda module, arguments, output: nn.functional.dropout(output, 0.1))


def branch_of(network):
    """The last module of a branch of the second layer."""
    names = ("post_feedforward_layernorm", "mlp", "DenseReluDense", "mixer", "fc2")
    found = dict(layers_of(network)[1].named_modules())
    return next(each for last in names for name, each in found.items() if name.split(".")[-1] == last)


def layers_of(network):
    return next(each for each in network.modules() if isinstance(each, nn.ModuleList) and len(each) == LAYERS)


FAULTS = {
    of_one_kind: "1.0",
    of_one_matrix: "1.1",
    copied: "are equal",
    shards: "equal slices",
    of_the_stream: "the stream is multiplied by 1.25",
    of_one_layer: "is multiplied by 2, declared 1",
    of_dropout: "dropout",
}


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(name, fault):
    network, part = model(name), PARTS[name]
    if name == "mixtral" and fault in (shards, of_one_layer):
        pytest.skip("experts are of three axes, and weighted by their router")
    with torch.no_grad():
        fault(network, part)
    found = si.audit(network, recipe="auto")
    assert found.passed is False
    assert FAULTS[fault] in found.verdict.replace("1.09", "1.1"), found.verdict
    names = {name for test in found.failed for name in test.names}
    assert fault in (of_the_stream, of_one_layer, of_dropout) or any(part in each for each in names)


def test_one_expert_and_one_part_are_found():
    network = model("mixtral")
    with torch.no_grad():
        matrices(network, "experts.down_proj")[1][2].mul_(1.1)
    assert "layers.1.mlp.experts.down_proj" in si.audit(network, recipe="auto").verdict
    network = model("gpt2")
    with torch.no_grad():
        network.h[1].attn.c_attn.weight[:, N : 2 * N].mul_(1.1)
    assert "h.1.attn.c_attn.weight[key] is 1.1" in si.audit(network, recipe="auto").verdict


def test_one_layer_unlike_the_others_without_a_recipe():
    network = own.Net(layers=6)
    with torch.no_grad():
        network.layers[3].mlp.w2.weight.mul_(1.2)
    assert "σ of mlp output layers.3.mlp.w2.weight is 1.2" in str(si.audit(network))


def test_a_declaration_takes_a_finding_off():
    network = own.Net()
    own.copied(network)
    assert si.audit(network).passed is False
    assert si.audit(network, allow=["copies"]).passed is None


def test_the_encoder_of_pytorch_copies_one_layer():
    torch.manual_seed(0)
    found = si.audit(encoder(N, LAYERS), np.random.default_rng(0).standard_normal((2, 8, N)), recipe="pytorch")
    assert "are equal" in found.verdict
    each = encoder(N, LAYERS)
    each.layers = nn.ModuleList([encoder(N, 1).layers[0] for _ in range(LAYERS)])
    found = si.audit(each, np.random.default_rng(0).standard_normal((2, 8, N)), recipe="pytorch")
    assert found.passed, found.verdict


def test_two_implementations_of_one_model():
    torch.manual_seed(0)
    first, second, spoiled = (own.Net(**own.LLAMA) for _ in range(3))
    assert si.audit(first, like=second).passed
    with torch.no_grad():
        own.scaled(spoiled)
    assert "attention output" in str(si.audit(spoiled, like=second))


def test_a_model_is_left_as_it_was():
    network = model("gpt2").train()
    network.h[1].eval()
    for each in network.parameters():
        each.grad = torch.randn_like(each)

    def state():
        return {
            "modes": [module.training for module in network.modules()],
            "weights": [float(each.detach().double().sum()) for each in network.parameters()],
            "gradients": [float(each.grad.double().sum()) for each in network.parameters()],
            "generator": torch.get_rng_state().tolist(),
            "threads": torch.get_num_threads(),
        }

    before = state()
    assert si.audit(network, recipe="gpt2").passed
    assert state() == before


def test_a_monitor_sees_training():
    network = model("gpt2")
    monitor = si.audit.Monitor(network, recipe="gpt2", every=2)
    for step in range(3):
        monitor(step)
        if step == 1:
            with torch.no_grad():
                network.h[0].mlp.c_fc.weight.mul_(1.2)
    assert str(monitor).startswith("not at initialisation from step 2 on: failed: GPT2Model")
    assert list(monitor.to_frame().columns) == [0, 2]


def test_exponents_over_depth():
    sizes = {"widths": [own.N], "depths": [2, 4, 8], "recipe": "gpt2"}
    assert si.audit.scaling(lambda n, L: own.Net(layers=L, scaled=True), **sizes).passed
    assert not si.audit.scaling(lambda n, L: own.Net(layers=L), **sizes).passed


def test_an_assertion_for_test_suites():
    si.audit.assert_initialised(model("gpt2"))
    spoiled = model("gpt2")
    with torch.no_grad():
        of_one_kind(spoiled, "mlp.c_fc")
    with pytest.raises(AssertionError, match=r"h\.0\.mlp\.c_fc\.weight  up  σ 0\.02"):
        si.audit.assert_initialised(spoiled)


def test_wrong_guesses_are_met_half_way():
    verdict = str(si.audit(model("llama"), recipe="gpt2"))
    assert "the factor 1/√(2L) of the attention output matrices is missing" in verdict
    assert verdict.endswith("'normal' would pass")


def test_a_frame_and_a_table_of_a_notebook():
    found = si.audit(model("gpt2"), recipe="gpt2")
    frame = found.to_frame()
    assert frame.loc["h.0.mlp.c_proj.weight", "declared"] == pytest.approx(0.02 / math.sqrt(2 * LAYERS))
    assert "GPT2Model" in found._repr_html_()
