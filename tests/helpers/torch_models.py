"""PyTorch, Hugging Face's library and small models of both; tests with this are skipped where they are missing."""

import os

import numpy as np
import pytest

os.environ["HF_HUB_OFFLINE"] = "1"

torch = pytest.importorskip("torch")
hf = pytest.importorskip("transformers")
nn = torch.nn

TORCH = [pytest.mark.torch, pytest.mark.filterwarnings("default")]
"""Marks of a module of such tests; warnings are those of the libraries."""


def gpt2(width, layers, **options):
    words = {"vocab_size": 99, "n_embd": width, "n_layer": layers, "n_head": 4}
    return hf.GPT2Model(hf.GPT2Config(**words | options))


def sizes(width, layers, units=None):
    """The words of most configurations."""
    return {
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": units or 4 * width,
    }


def llama(width, layers, units=None, **options):
    words = sizes(width, layers, units) | {"vocab_size": 99, "num_key_value_heads": 2, "pad_token_id": None}
    return hf.LlamaModel(hf.LlamaConfig(**words | options))


def bert(width, layers, units=None, **options):
    words = sizes(width, layers, units) | {"vocab_size": 99}
    return hf.BertModel(hf.BertConfig(**words | options), add_pooling_layer=False)


def vit(width, layers, units=None):
    config = hf.ViTConfig(**sizes(width, layers, units), image_size=8, patch_size=4)
    return hf.ViTModel(config, add_pooling_layer=False)


def encoder(width, layers, units=None, **options):
    """PyTorch's encoder, whose layers are copies of one."""
    layer = nn.TransformerEncoderLayer(width, 4, units or 4 * width, batch_first=True, **options)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def prompt(width, *, tokens=4, batch=1, **options):
    """A batch of tokens, the same each time."""
    return torch.randn(batch, tokens, width, generator=torch.Generator().manual_seed(1), **options)


def run(model, inputs):
    """The output in evaluation mode, without gradients."""
    with torch.no_grad():
        return model.eval()(**inputs) if isinstance(inputs, dict) else model.eval()(inputs)


def covariances(states):
    """XXᵀ/n of each hidden state, over all tokens."""
    flat = [each.detach().double().numpy().reshape(-1, each.shape[-1]) for each in states]
    return np.array([X @ X.T / X.shape[1] for X in flat])


def log_norms_and_correlations(V, V0) -> np.ndarray:
    """The mean log norm over tokens and the mean correlation over pairs, for each V."""
    norms = np.sqrt(np.diagonal(V, axis1=1, axis2=2))
    rho = V / (norms[:, :, None] * norms[:, None])
    pairs = rho[:, *np.triu_indices(len(V0), 1)]
    return np.stack([np.log(norms**2 / np.diag(V0)).mean(axis=1), pairs.mean(axis=1)], axis=1)
