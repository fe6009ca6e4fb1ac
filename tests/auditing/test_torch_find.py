"""Branches, blocks and inputs of PyTorch's and Hugging Face's models, against those written by hand.

`SDEINFER_TORCH_PYTHON` names an interpreter with torch, transformers and the dependencies of this package; its default
is the one that runs the tests.
"""

import json

import pytest
import torch_interpreter

pytestmark = pytest.mark.torch

BERT = ("encoder.layer", "attention.self", "attention.output.dense", "intermediate.dense", "output.dense")
LLAMA = ("layers", "self_attn", "self_attn", "mlp", "mlp")
ENCODER = ("layers", "self_attn", "self_attn", "linear1", "linear2")
MODELS = {
    "gpt2": ("h", "attn", "attn", "mlp", "mlp"),
    "gpt2 with head": ("transformer.h", "attn", "attn", "mlp", "mlp"),
    **dict.fromkeys(("llama", "mistral", "qwen2", "phi3", "gemma", "starcoder2"), LLAMA),
    "gpt_neox": ("layers", "attention", "attention", "mlp", "mlp"),
    "opt": ("decoder.layers", "self_attn", "self_attn", "fc1", "fc2"),
    "bert": BERT,
    "roberta": BERT,
    "distilbert": ("transformer.layer", "attention", "attention", "ffn", "ffn"),
    "vit": ("layers", "attention", "attention", "mlp", "mlp"),
    "encoder": ENCODER,
    "encoder with norms first": ENCODER,
    "encoder with a mask": ENCODER,
    "nanogpt": ("transformer.h", "attn", "attn", "mlp", "mlp"),
}
"""The list of layers, and inside a layer the reader and the writer of attention and of the MLP."""

WITHOUT_CONFIGURATION = ("encoder", "encoder with norms first", "encoder with a mask", "nanogpt")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict:
    """The results that the script writes."""
    file = tmp_path_factory.mktemp("descriptions") / "written.json"
    torch_interpreter.run("torch_descriptions.py", file)
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", MODELS)
def test_descriptions(name, written):
    found, (path, *ends) = written["models"][name], MODELS[name]
    layers = [f"{path}.{number}" for number in range(2)]
    branches = [
        [kind, *(f"{layer}.{end}" for end in own)]
        for layer in layers
        for kind, own in (("attention", ends[:2]), ("mlp", ends[2:]))
    ]
    assert found["layers"] == layers
    assert found["branches"] == branches
    assert found["same"]
    assert found["sd"] == {"starcoder2": 0.018042}.get(name, None if name in WITHOUT_CONFIGURATION else 0.02)
    assert found["observed"] == [reader for _, reader, _ in branches]
    assert found["tokens"] == (5 if name == "vit" else 4)


def test_default_inputs(written):
    found = written["inputs"]
    assert found["ids"] == [[3, 4, 5, 6]]  # 0, 1 and 2 are special
    assert found["shape"] == [1, 3, 8, 8]
    assert found["again"]
    assert found["largest correlation"] < 0.9
    assert len({round(each, 9) for each in found["mean squares"]}) == 5


MESSAGES = {
    "gemma2": "branches: layers.0 of Gemma2Model has a norm after a branch (post_feedforward_layernorm): increments "
    "that are normalised have another law",
    "gemma3": "branches: layers.0 of Gemma3TextModel has a norm after a branch (post_feedforward_layernorm): ",
    "qwen3": "model: Qwen3Model has normalised queries and keys (layers.0.self_attn.q_norm), for which there is no law "
    "of blocks",
    "decoder": "branches: decoder.layers.0 of Transformer has cross-attention (multihead_attn), for which there is no "
    "law",
    "activation": "model: TransformerEncoder has the activation <function elu at ",
    "int8": "model: ffn.weight is torch.int8: quantised weights are not those of a recipe",
    "window": "inputs: a sliding window of 2 tokens is below the 4 tokens to observe",
    "vocabulary": "inputs: needed for LlamaModel: its vocabulary has 3 usual tokens",
}


@pytest.mark.parametrize("name", MESSAGES)
def test_what_is_wrong_is_said_in_one_line(name, written):
    message = written["errors"][name]
    assert message.startswith(MESSAGES[name])
    assert "\n" not in message
