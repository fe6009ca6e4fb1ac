"""Standard deviations of the weights of libraries' models at initialisation.

    python torch_recipes.py

prints, as JSON, for each model and matrix the standard deviation of its entries, with its error. The interpreter needs
torch, and transformers for its models, which are left out otherwise. Nothing is downloaded.
"""

import importlib.util
import json

import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

WIDTH, LAYERS, HEADS, GROUPS, UNITS = 256, 4, 4, 2, 1024


def estimate(tensors):
    """Root mean square of the entries and its standard error, by their fourth moment."""
    x = torch.cat([each.detach().flatten() for each in tensors]).double()
    square = (x**2).mean()
    return [square.sqrt().item(), (((x**4).mean() - square**2) / len(x)).sqrt().item() / (2 * square.sqrt().item())]


def pooled(layers):
    """Estimates by role, from a dict of matrices of each layer."""
    layers = list(layers)
    return {role: estimate([layer[role] for layer in layers]) for role in layers[0]}


def transformers():
    """GPT-2, Llama and BERT of transformers."""
    import transformers as hf  # pyright: ignore[reportMissingImports]

    common = {"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "hidden_size": WIDTH}
    gpt2 = hf.GPT2Model(hf.GPT2Config(vocab_size=99, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS))
    llama = hf.LlamaModel(
        hf.LlamaConfig(**common, num_key_value_heads=GROUPS, intermediate_size=UNITS, vocab_size=99, pad_token_id=None)
    )
    bert = hf.BertModel(hf.BertConfig(**common, intermediate_size=UNITS, vocab_size=99))

    def of_gpt2(block):
        q, k, v = block.attn.c_attn.weight.chunk(3, dim=1)
        attention = {"query": q, "key": k, "value": v, "attention output": block.attn.c_proj.weight}
        return attention | {"up": block.mlp.c_fc.weight, "mlp output": block.mlp.c_proj.weight}

    def of_llama(block):
        attention, mlp = block.self_attn, block.mlp
        return {
            "query": attention.q_proj.weight,
            "key": attention.k_proj.weight,
            "value": attention.v_proj.weight,
            "attention output": attention.o_proj.weight,
            "gate": mlp.gate_proj.weight,
            "up": mlp.up_proj.weight,
            "mlp output": mlp.down_proj.weight,
        }

    def of_bert(block):
        own = block.attention.self
        attention = {"query": own.query.weight, "key": own.key.weight, "value": own.value.weight}
        attention |= {"attention output": block.attention.output.dense.weight}
        return attention | {"up": block.intermediate.dense.weight, "mlp output": block.output.dense.weight}

    return {
        "gpt2": pooled(map(of_gpt2, gpt2.h)),
        "llama": pooled(map(of_llama, llama.layers)),
        "bert": pooled(map(of_bert, bert.encoder.layer)),
    }


def torch_layers():
    """`TransformerEncoderLayer`, with its biases."""
    layers = [nn.TransformerEncoderLayer(WIDTH, HEADS, UNITS) for _ in range(LAYERS)]

    def of(layer):
        q, k, v = layer.self_attn.in_proj_weight.chunk(3)
        return {
            "query": q,
            "key": k,
            "value": v,
            "attention output": layer.self_attn.out_proj.weight,
            "up": layer.linear1.weight,
            "mlp output": layer.linear2.weight,
            "up bias": layer.linear1.bias,
            "mlp output bias": layer.linear2.bias,
        }

    assert all(layer.self_attn.in_proj_bias.abs().max() == 0 for layer in layers)
    assert all(layer.self_attn.out_proj.bias.abs().max() == 0 for layer in layers)
    return {"pytorch": pooled(map(of, layers))}


def sizes():
    """(fan_out, fan_in) by role, as in Llama."""
    of_keys = WIDTH // HEADS * GROUPS
    attention = {"query": (WIDTH, WIDTH), "key": (of_keys, WIDTH), "value": (of_keys, WIDTH)}
    mlp = {"gate": (UNITS, WIDTH), "up": (UNITS, WIDTH), "mlp output": (WIDTH, UNITS)}
    return attention | {"attention output": (WIDTH, WIDTH)} | mlp


def functions():
    """Functions of `torch.nn.init`, and `Linear`."""

    def drawn(fill):
        return {role: estimate([fill(torch.empty(shape))]) for role, shape in sizes().items()}

    linears = {role: nn.Linear(fan_in, fan_out) for role, (fan_out, fan_in) in sizes().items()}
    of_linear = {role: estimate([linear.weight]) for role, linear in linears.items()}
    found = {"pytorch_linear": of_linear | {f"{role} bias": estimate([each.bias]) for role, each in linears.items()}}
    for name in ("normal", "uniform"):
        xavier, kaiming = (getattr(nn.init, f"{kind}_{name}_") for kind in ("xavier", "kaiming"))
        found[f"xavier {name}"] = drawn(lambda W, xavier=xavier: xavier(W, gain=0.5))
        for mode in ("fan_in", "fan_out"):
            for kind in ("relu", "tanh", "selu"):
                found[f"kaiming {kind} {mode} {name}"] = drawn(
                    lambda W, kaiming=kaiming, mode=mode, kind=kind: kaiming(W, mode=mode, nonlinearity=kind)
                )
    return found


def main():
    """Print the estimates of every library that is installed."""
    torch.manual_seed(0)
    found = torch_layers() | functions()
    if importlib.util.find_spec("transformers"):
        found |= transformers()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
