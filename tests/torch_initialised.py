"""Models of PyTorch, tuned and initialised: `python torch_initialised.py FOLDER [INITIALISATIONS [MODEL …]]`.

Writes for each model the verdict of the audit, and what was promised beside what initialisations of the model have.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

import jax.random as jr
import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers as hf  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

import sdeinfer as si
from sdeinfer import criteria as of

WIDTH, LAYERS, HEADS, TOKENS, PATHS = 64, 4, 4, 4, 2048
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "intermediate_size": 4 * WIDTH,
}
WORDS = {**SIZES, "vocab_size": 99, "pad_token_id": None}
NEOX: dict[str, Any] = {"rotary_pct": 1.0, "use_parallel_residual": False, "layer_norm_eps": 1e-8}
MODELS = {
    "gpt2": lambda: hf.GPT2Model(hf.GPT2Config(vocab_size=99, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS)),
    "gpt_neox": lambda: hf.GPTNeoXModel(hf.GPTNeoXConfig(**WORDS, **NEOX)),
    "llama": lambda: hf.LlamaModel(hf.LlamaConfig(**WORDS, num_key_value_heads=2)),
    "phi3": lambda: hf.Phi3Model(hf.Phi3Config(**WORDS, num_key_value_heads=2, rms_norm_eps=1e-8)),
    "bert": lambda: hf.BertModel(hf.BertConfig(**SIZES, vocab_size=99), add_pooling_layer=False),
    "vit": lambda: hf.ViTModel(hf.ViTConfig(**SIZES, image_size=8, patch_size=4), add_pooling_layer=False),
    "encoder": lambda: nn.TransformerEncoder(
        nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True, norm_first=True, activation="gelu"),
        LAYERS,
        enable_nested_tensor=False,
    ),
}  # fmt: skip
PROMPT = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))


def layers_of(model):
    """The Transformer layers."""
    lists = [each for each in model.modules() if isinstance(each, nn.ModuleList) and len(each) == LAYERS]
    return lists[0]


def stream(model, inputs):
    """Covariances of the residual stream before the first and after the last layer."""
    found, layers = [], layers_of(model)

    def keep(X):
        X = (X[0] if isinstance(X, tuple) else X)[0, :TOKENS].double()
        found.append((X @ X.T / X.shape[1]).numpy())

    def first(module, arguments, keywords):
        del module
        keep(arguments[0] if arguments else keywords["hidden_states"])

    handles = [
        layers[0].register_forward_pre_hook(first, with_kwargs=True),
        layers[-1].register_forward_hook(lambda module, arguments, output: keep(output)),
    ]
    with torch.no_grad():
        model(**inputs) if isinstance(inputs, dict) else model(inputs)
    for handle in handles:
        handle.remove()
    return found


def study(name, initialisations):
    """One model: the verdict, and criteria as promised and of initialisations."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    given = PROMPT if name == "encoder" else None
    inputs = si.auditing.default_inputs(model) if given is None else given
    blocks = si.audit(model, given).architecture
    V0 = stream(model, inputs)[0]
    post = blocks.layers[0].position == "post"
    goal = of.expectation(of.MeanCorrelation()) <= 0.6 if post else of.probability(of.NormFactor(), below=3) >= 0.9
    tuned = si.tune(
        blocks,
        V0,
        width=WIDTH,
        depth=LAYERS,
        maximise="strength",
        subject_to=goal,
        fixed={"temperature": 0.5, "gain": 1.0},
        paths=PATHS,
        key=jr.key(1),
    )
    first = tuned.initialise(model, given, seed=1)
    before = {path: x.clone() for path, x in model.named_parameters()}
    try:
        tuned.initialise(model, {"nothing": torch.zeros(1)}, seed=2)
    except Exception as error:  # the model's own
        refused = type(error).__name__
    else:
        refused = ""
    unchanged = all(torch.equal(x, before[path]) for path, x in model.named_parameters())
    rows = []
    for seed in range(initialisations):
        tuned.initialise(model, given, seed=100 + seed, audited=False)
        V = stream(model, inputs)[1]
        norms = np.sqrt(np.diag(V))
        upper = np.triu_indices(len(V), 1)
        rows.append([np.log(np.diag(V) / np.diag(V0)).mean(), (V / np.outer(norms, norms))[upper].mean()])
    measured = np.array(rows)
    chains = si.sample_networks(
        tuned.layer, V0, width=WIDTH, depth=LAYERS, observe_every=LAYERS, networks=PATHS, key=jr.key(2)
    )["covariance"].values[:, 1]
    norms = np.sqrt(np.diagonal(chains, axis1=1, axis2=2))
    rho = chains / (norms[:, :, None] * norms[:, None])
    promised = np.stack(
        [np.log(norms**2 / np.diag(V0)).mean(axis=1), rho[:, *np.triu_indices(len(V0), 1)].mean(axis=1)], axis=1
    )
    return {
        "passed": first.audit.passed,
        "verdict": first.audit.verdict,
        "matrices": len(first.matrices),
        "refused": refused,
        "unchanged": unchanged,
        "strength": tuned.values["strength"],
        "criterion": tuned.criteria[["value", "error"]].iloc[0].tolist(),
        "promised": promised.mean(axis=0).tolist(),
        "promised_sd": promised.std(axis=0).tolist(),
        "promised_error": (promised.std(axis=0) / math.sqrt(len(promised))).tolist(),
        "measured": measured.mean(axis=0).tolist(),
        "measured_sd": measured.std(axis=0).tolist(),
        "measured_error": (measured.std(axis=0) / math.sqrt(len(measured))).tolist(),
    }


if __name__ == "__main__":
    folder, count = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200
    names = sys.argv[3:] or MODELS
    (folder / "initialised.json").write_text(json.dumps({name: study(name, count) for name in names}))
