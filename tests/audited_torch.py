"""Models of PyTorch and Hugging Face, and bugs in their initialisation, before and after the fix."""

import math

import torch  # pyright: ignore[reportMissingImports]
import transformers as hf  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

WIDTH, LAYERS, HEADS, SD = 256, 6, 4, 0.02
INIT = nn.init
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 1024}
X = torch.randn(1, 4, WIDTH, generator=torch.Generator().manual_seed(1))


def gpt2():
    model = hf.GPT2Model(hf.GPT2Config(vocab_size=99, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS))
    return drawn(model, lambda name, W: INIT.normal_(W, std=SD))


def llama(groups=HEADS):
    config = hf.LlamaConfig(**SIZES, num_key_value_heads=groups, vocab_size=99, pad_token_id=None)
    return drawn(hf.LlamaModel(config), lambda name, W: INIT.normal_(W, std=SD))


def vit():
    return hf.ViTModel(hf.ViTConfig(**SIZES, image_size=8, patch_size=4), add_pooling_layer=False)


def encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, batch_first=True), LAYERS)


def drawn(model, draw):
    """The model with the matrices of its layers drawn anew."""
    for name, W in model.named_parameters():
        if W.ndim == 2 and any(part.isdigit() for part in name.split(".")):
            draw(name, W)
    return model


def scaling_never_applied(seed, fixed):
    del seed
    model = gpt2()
    for name, W in model.named_parameters():
        if name.endswith("c_proj.weight") if fixed else name == "c_proj.weight":
            INIT.normal_(W, std=SD / math.sqrt(2 * LAYERS))
    return model


def scaling_of_queries(seed, fixed):
    del seed
    return scaled_down(llama(), ("o_proj.weight", "down_proj.weight") if fixed else ("q_proj.weight", "k_proj.weight"))


def scaling_of_up(seed, fixed):
    del seed
    return scaled_down(llama(), ("o_proj.weight", "down_proj.weight" if fixed else "up_proj.weight"))


def scaled_down(model, names):
    for name, W in model.named_parameters():
        if name.endswith(names):
            INIT.normal_(W, std=SD / math.sqrt(2 * LAYERS))
    return model


def transposed(seed, fixed):
    del seed  # Conv1D keeps (fan_in, fan_out)
    return drawn(
        gpt2(), lambda name, W: INIT.kaiming_normal_(W.T if fixed else W, mode="fan_in", nonlinearity="linear")
    )


def divided_by_width(seed, fixed):
    del seed
    ratio = WIDTH / 64
    return drawn(gpt2(), lambda name, W: INIT.normal_(W, std=SD / (math.sqrt(ratio) if fixed else ratio)))


def never_initialised(seed, fixed):
    del seed
    model = llama(groups=2)
    wrapped = "_checkpoint_wrapped_module."  # activation checkpointing adds it to names of parameters
    for layer in model.layers:
        for linear in (each for each in layer.modules() if isinstance(each, nn.Linear)):
            linear.reset_parameters()

    def draw(name, W):
        path = name.replace("self_attn.", f"self_attn.{wrapped}").replace("mlp.", f"mlp.{wrapped}")
        path = path.replace(wrapped, "") if fixed else path
        if path.split(".")[2:][0] in ("self_attn", "mlp") and path.split(".")[3].endswith("_proj"):
            INIT.normal_(W, std=SD)

    return drawn(model, draw)


def empty(seed, fixed):
    del seed
    with torch.device("meta"):
        model = vit()
    model.to_empty(device="cpu")
    for each in model.parameters():
        INIT.zeros_(each)  # what fresh memory often is
    for name, each in model.named_parameters():
        if fixed or "embeddings" in name:
            INIT.normal_(each, std=SD)
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif fixed and isinstance(module, nn.Linear):
            INIT.zeros_(module.bias)
    return model


def third_of_variance(seed, fixed):
    del seed

    def draw(name, W):
        bound = math.sqrt((3 if fixed else 1) / W.shape[1])
        INIT.uniform_(W, -bound, bound)

    return drawn(vit(), draw)


def copied_layers(seed, fixed):
    del seed
    model = encoder()
    for layer in model.layers if fixed else ():
        layer.self_attn._reset_parameters()
        for linear in (layer.self_attn.out_proj, layer.linear1, layer.linear2):
            linear.reset_parameters()
        layer.self_attn.out_proj.bias.data.zero_()
    return model


def shared_mlp(seed, fixed):
    del seed
    model = llama()
    for layer in () if fixed else model.layers[1:]:
        layer.mlp = model.layers[0].mlp
    return model


def fused(seed, fixed):
    del seed

    def draw(name, W):
        for part in W.chunk(3) if fixed and name.endswith("in_proj_weight") else (W,):
            INIT.xavier_uniform_(part)

    model = drawn(encoder(), draw)
    for name, each in model.named_parameters():
        if "bias" in name:
            INIT.zeros_(each)
    return model
