"""Audits of every model type of transformers that a small configuration builds, as its library initialises it.

Run `OMP_NUM_THREADS=1 python tests/benchmarks/audit_sweep.py OUT.json [TYPE …]`; each row has the verdicts without a
recipe and by "auto", or why the model was not built or not audited, with seconds.
"""

import contextlib
import json
import sys
import time
import warnings
from pathlib import Path

import torch
import transformers as hf
from limited import TimeOut, limited

import sdeinfer as si

warnings.filterwarnings("ignore")

SMALL = {
    64: "hidden_size d_model n_embd dim embed_dim embedding_size hidden_dim decoder_hidden_size "
    "encoder_hidden_size model_dim cross_hidden_size",
    3: "num_hidden_layers n_layer num_layers n_layers encoder_layers decoder_layers num_encoder_layers "
    "num_decoder_layers depth",
    4: "num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads n_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts decoder_num_attention_heads "
    "linear_num_value_heads cross_num_attention_heads cross_num_key_value_heads",
    2: "num_key_value_heads num_kv_heads num_experts_per_tok num_experts_per_token moe_topk moe_k linear_num_key_heads",
    128: "intermediate_size ffn_dim d_ff encoder_ffn_dim decoder_ffn_dim n_inner decoder_intermediate_size "
    "ffn_hidden_size max_position_embeddings",
    16: "head_dim d_kv kv_channels attention_head_size qk_nope_head_dim v_head_dim kv_lora_rank "
    "linear_key_head_dim linear_value_head_dim cross_head_dim",
    8: "qk_rope_head_dim",
    32: "moe_intermediate_size image_size shared_expert_intermediate_size q_lora_rank expert_ffn_hidden_size",
    199: "vocab_size",
}
NAMES = {name: value for value, names in SMALL.items() for name in names.split()}
NAMES |= {"n_group": 1, "topk_group": 1, "patch_size": 8, "max_source_positions": 32, "num_mel_bins": 16}
NAMES |= {"first_k_dense_replace": 1, "rotary_dim": 8, "sliding_window": 16}
FEW = {name: 2 for value in (3,) for name in SMALL[value].split()} | {"vocab_size": 199}
"""Only layers and words are few: of a configuration whose other sizes depend on each other."""
FEW |= {name: 4 for name in NAMES if "experts" in name and "per_tok" not in name} | {"num_experts_per_tok": 2}
SECONDS = 40
"""Time after which a type is given up: on a busy machine."""

SIZES = {
    "small": NAMES,
    "heads of 64": NAMES | dict.fromkeys(SMALL[64].split(), 256) | dict.fromkeys(SMALL[16].split(), 64),
    "heads of 128": NAMES | dict.fromkeys(SMALL[64].split(), 512) | dict.fromkeys(SMALL[16].split(), 128),
    "its own": FEW,
}
"""Sizes that are tried in turn: rotations of some types are cut into sections that fit heads of 64 or 128 entries."""

LARGEST = 300_000_000
"""Number of parameters beyond which a model is not built."""


def small(config_class, sizes: dict) -> dict:
    """Arguments of a configuration, and of those in it: sizes that it knows are small."""
    try:
        default = config_class()
    except Exception:
        return {}
    arguments = {}
    known = default.to_dict()
    for name, value in known.items():
        expected = isinstance(value, int) and not isinstance(value, bool) or (value is None and "per_tok" in name)
        if name in sizes and expected:
            arguments[name] = sizes[name]
        part = getattr(default, name, None)
        if isinstance(value, dict) and isinstance(part, hf.PretrainedConfig):
            arguments[name] = small(type(part), sizes) | {"model_type": value.get("model_type", "")}
        if name.endswith("token_id") and isinstance(value, int) and value > 198:
            arguments[name] = 1
    if sizes is not FEW:
        if known.get("num_attention_heads") is not None and known["num_attention_heads"] == known.get(
            "num_key_value_heads"
        ):
            arguments["num_key_value_heads"] = NAMES["num_attention_heads"]
        if "qk_rope_head_dim" in arguments and "head_dim" in known:
            arguments["head_dim"] = NAMES["qk_rope_head_dim"]
        for name, value in known.items():
            if isinstance(value, dict) and "mrope_section" in value:
                arguments[name] = value | {"mrope_section": [4, 2, 2] if sizes is NAMES else [16, 24, 24]}
    return arguments


def built(config_class, sizes: dict):
    config = config_class(**small(config_class, sizes))
    torch.manual_seed(0)
    for auto in (hf.AutoModelForCausalLM, hf.AutoModel, hf.AutoModelForSeq2SeqLM):
        try:
            if type(config) not in auto._model_mapping:
                continue
        except KeyError:
            continue
        count = 0
        with contextlib.suppress(NotImplementedError, RuntimeError), torch.device("meta"):
            count = sum(each.numel() for each in auto.from_config(config).parameters())
        if count > LARGEST:
            raise ValueError(f"{count:.2g} parameters")
        return auto.from_config(config)
    raise TypeError("no model")


def row_of(kind: str, config_class) -> dict:
    """The row of a type at small sizes; if it cannot be built or run so, larger, or at its own with two layers."""
    best: dict = {}
    for name, sizes in SIZES.items():
        row = row_at(kind, config_class, sizes) | {"sizes": name}
        if not best or "without" in row or ("tensors" in row and "tensors" not in best):
            best = row
        if "without" in best or "no model" in best["built"]:
            break
    return best


def row_at(kind: str, config_class, sizes: dict) -> dict:
    row: dict = {"type": kind}
    with limited(row, SECONDS):
        try:
            model = built(config_class, sizes)
        except TimeOut:
            return row | {"built": "too slow"}
        except Exception as error:
            return row | {"built": f"{type(error).__name__}: {str(error)[:150]}"}
        row |= {"built": type(model).__name__, "tensors": len(list(model.parameters()))}
        start = time.perf_counter()
        row["without"] = str(si.audit(model))
        row["seconds"] = round(time.perf_counter() - start, 2)
        found = si.audit(model, recipe="auto")
        row["auto"], row["passed"] = str(found), found.passed
    return row


def main() -> None:
    hf.logging.set_verbosity_error()
    out, chosen = Path(sys.argv[1]), sys.argv[2:]
    rows = []
    for kind in chosen or list(hf.CONFIG_MAPPING):
        rows.append(row_of(kind, hf.CONFIG_MAPPING[kind]))
        out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
        print(kind, rows[-1].get("passed", rows[-1].get("refused", rows[-1]["built"])), flush=True)
    done = [row for row in rows if "tensors" in row]
    audited = [row for row in done if "without" in row]
    passed = sum(bool(row.get("passed")) for row in audited)
    print(f"{len(rows)} types, {len(done)} built, {len(audited)} audited, {passed} passed")


if __name__ == "__main__":
    main()
