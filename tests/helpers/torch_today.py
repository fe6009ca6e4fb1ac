"""Models of today of Hugging Face's library, built small, and the blocks that they are."""

from typing import Any

from helpers.torch_models import hf, torch

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, Experts, LatentAttention, Parallel, SelfAttention

HEADS, EXPERTS, CHOSEN = 4, 8, 2
WORDS = {"vocab_size": 199, "num_attention_heads": HEADS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PLAIN = {"rope_type": "default", "rope_theta": 10_000.0}


def config_of(name: str, width: int, layers: int) -> Any:
    """The configuration of a model, with units of twice the width and an ε that does not count."""
    size = width // HEADS
    words = WORDS | {"hidden_size": width, "num_hidden_layers": layers, "intermediate_size": 2 * width}
    rms, layer_norm, full = (
        {"rms_norm_eps": 1e-9},
        {"layer_norm_eps": 1e-9},
        {"layer_types": ["full_attention"] * layers},
    )
    grouped, apart = {"num_key_value_heads": 2}, {"num_key_value_heads": HEADS}
    experts = {"num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "moe_intermediate_size": width}
    gemma = words | rms | full | grouped | {"head_dim": size, "query_pre_attn_scalar": size}
    match name:
        case "qwen3":
            return hf.Qwen3Config(**words, **rms, **grouped, head_dim=size)
        case "gemma2":
            return hf.Gemma2Config(**gemma)
        case "gemma3":
            return hf.Gemma3TextConfig(**gemma)
        case "olmo2":
            return hf.Olmo2Config(**words, **rms, **apart)
        case "gpt_neox":
            return hf.GPTNeoXConfig(**words, **layer_norm, rotary_pct=0.5)
        case "phi":
            return hf.PhiConfig(**words, **layer_norm)
        case "cohere":
            return hf.CohereConfig(**words, **layer_norm, **grouped)
        case "stablelm":
            return hf.StableLmConfig(**words, **layer_norm, **apart)
        case "mixtral":
            return hf.MixtralConfig(**words, **rms, **grouped, num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN)
        case "qwen3_moe":
            return hf.Qwen3MoeConfig(**words, **rms, **grouped, **experts, head_dim=size, norm_topk_prob=True)
        case "olmoe":
            return hf.OlmoeConfig(**words, **rms, **apart, num_experts=EXPERTS, num_experts_per_tok=CHOSEN)
        case "deepseek_v3":
            ranks = {"q_lora_rank": 32, "kv_lora_rank": 24, "qk_nope_head_dim": size, "qk_rope_head_dim": 8}
            choice = {"n_routed_experts": EXPERTS, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
            sizes = {"v_head_dim": size, "moe_intermediate_size": width, "num_experts_per_tok": CHOSEN}
            return hf.DeepseekV3Config(**words, **rms, **apart, **ranks, **choice, **sizes)
        case "gpt_oss":
            choice = {"num_local_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "rope_parameters": PLAIN}
            return hf.GptOssConfig(**words, **rms, **full, **grouped, **choice, head_dim=size)
    raise KeyError(name)


TODAY = ("qwen3 gemma2 gemma3 olmo2 gpt_neox phi cohere stablelm mixtral qwen3_moe olmoe deepseek_v3 gpt_oss").split()
"""Names of the models."""


def model_of(name: str, width: int, layers: int) -> Any:
    """The model with fresh weights, of its library's own law."""
    return hf.AutoModel.from_config(config_of(name, width, layers)).eval()


def blocks_of(name: str, width: int) -> si.Stack:
    """The blocks that the configuration declares, with strengths, gains and temperatures of 1."""
    size = width // HEADS
    attention: dict[str, Any] = {"heads": HEADS, "rope": 10_000.0, "pattern": si.CAUSAL}
    grouped, both = attention | {"key_value_heads": 2}, {"norm": "rms"}
    swiglu = MLP(activation="silu", gated=True, expansion=2)
    geglu = MLP(activation="gelu_tanh", gated=True, expansion=2)
    experts = Experts(experts=EXPERTS, chosen=CHOSEN, expansion=2)
    match name:
        case "qwen3":
            branches = SelfAttention(**grouped, qk_norm="head"), swiglu
        case "gemma2":
            branches, both = (SelfAttention(**grouped, cap=50.0), geglu), both | {"output_norm": "rms"}
        case "gemma3":
            branches = SelfAttention(**grouped | {"rope": 1e6}, qk_norm="head"), geglu
            both |= {"output_norm": "rms"}
        case "olmo2":
            branches, both = (SelfAttention(**attention, qk_norm="all"), swiglu), {"output_norm": "rms"}
        case "gpt_neox" | "phi":
            mlp = MLP(activation="gelu" if name == "gpt_neox" else "gelu_tanh", expansion=2)
            branches, both = (SelfAttention(**attention, rope_size=size // 2), mlp), {"norm": "layer"}
        case "cohere":
            branches, both = (SelfAttention(**grouped | {"rope": 500_000.0}), swiglu), {"norm": "layer"}
        case "stablelm":
            branches, both = (SelfAttention(**attention, rope_size=size // 4), swiglu), {"norm": "layer"}
        case "mixtral":
            branches = SelfAttention(**grouped | {"rope": 1e6}), experts
        case "qwen3_moe":
            branches = SelfAttention(**grouped, qk_norm="head"), Experts(experts=EXPERTS, chosen=CHOSEN, expansion=1)
        case "olmoe":
            chosen = Experts(experts=EXPERTS, chosen=CHOSEN, expansion=2, scores="all")
            branches = SelfAttention(**attention, qk_norm="all"), chosen
        case "deepseek_v3":
            sizes = {"heads": HEADS, "head_size": size, "rotated_size": 8, "value_size": size}
            latent = LatentAttention(**sizes, key_rank=24, query_rank=32, pattern=si.CAUSAL)
            scores = {"scores": "sigmoid", "scale": 2.5, "shared": 1.0, "expansion": 1.0}
            branches = latent, Experts(experts=EXPERTS, chosen=CHOSEN, **scores)
        case "gpt_oss":
            clamped = Experts(experts=EXPERTS, chosen=CHOSEN, expansion=2, activation="quick_gelu", offset=1.0)
            branches = SelfAttention(**grouped, sink=0.0), clamped
        case _:
            raise KeyError(name)
    blocks = [Block(branch, 1.0, **both) for branch in branches]
    return Parallel(blocks) if name in ("gpt_neox", "phi", "cohere") else si.Stack(blocks)


def inputs() -> dict[str, Any]:
    """Four different tokens."""
    return {"input_ids": torch.tensor([[5, 17, 80, 33]])}
