"""Models of PyTorch and Hugging Face, and bugs in their initialisation, before and after the fix."""

import math

import torch_models
from audited import bug
from torch_models import nn, prompt, torch

import sdeinfer as si

WIDTH, LAYERS, HEADS, SD = 256, 6, 4, 0.02
INIT = nn.init
RECIPES = si.audit.recipes
MUP = RECIPES.mup(base_width=64, base_head_size=WIDTH // HEADS)
ROOT_MISSING = "the factor 1/√(2L) of the attention and mlp output matrix is missing"
X = prompt(WIDTH)


def gpt2():
    return drawn(torch_models.gpt2(WIDTH, LAYERS), lambda name, W: INIT.normal_(W, std=SD))


def llama(groups=HEADS):
    return drawn(torch_models.llama(WIDTH, LAYERS, groups=groups), lambda name, W: INIT.normal_(W, std=SD))


def vit():
    return torch_models.vit(WIDTH, LAYERS)


def encoder():
    return torch_models.encoder(WIDTH, LAYERS)


def drawn(model, draw):
    """The model with the matrices of its layers drawn anew."""
    for name, W in model.named_parameters():
        if W.ndim == 2 and any(part.isdigit() for part in name.split(".")):
            draw(name, W)
    return model


@bug("GPT-2", "huggingface/transformers/issues/47458", RECIPES.gpt2(), ROOT_MISSING)
def scaling_never_applied(fixed, _):
    """the residual scale 1/√(2L) is never applied: names of parameters do not match"""
    model = gpt2()
    for name, W in model.named_parameters():
        if name.endswith("c_proj.weight") if fixed else name == "c_proj.weight":
            INIT.normal_(W, std=SD / math.sqrt(2 * LAYERS))
    return model


@bug("Llama", "", RECIPES.gpt2(), ROOT_MISSING)
def scaling_of_queries(fixed, _):
    """1/√(2L) on queries and keys in place of the last matrices"""
    return scaled_down(llama(), ("o_proj.weight", "down_proj.weight") if fixed else ("q_proj.weight", "k_proj.weight"))


@bug("Llama", "karpathy/llama2.c/issues/579", RECIPES.gpt2(), ROOT_MISSING)
def scaling_of_up(fixed, _):
    """1/√(2L) on the up projection in place of the down projection"""
    return scaled_down(llama(), ("o_proj.weight", "down_proj.weight" if fixed else "up_proj.weight"))


def scaled_down(model, names):
    for name, W in model.named_parameters():
        if name.endswith(names):
            INIT.normal_(W, std=SD / math.sqrt(2 * LAYERS))
    return model


@bug("GPT-2", "pytorch/pytorch/pull/130122", RECIPES.kaiming("linear"), "one matrix, whose fan_in and fan_out are")
def transposed(fixed, _):
    """Kaiming's fan_in of Conv1D's transposed weights"""
    # Conv1D keeps (fan_in, fan_out).
    return drawn(gpt2(), lambda name, W: INIT.kaiming_normal_(W.T if fixed else W, nonlinearity="linear"))


@bug("GPT-2", "EleutherAI/gpt-neox/pull/1087", MUP, "is there twice, or squared")
def divided_by_width(fixed, _):
    """μP divides the standard deviation by the ratio of widths, not by its root"""
    ratio = WIDTH / 64
    return drawn(gpt2(), lambda name, W: INIT.normal_(W, std=SD / (math.sqrt(ratio) if fixed else ratio)))


@bug("Llama", "Modalities/modalities/pull/460", RECIPES.normal(), "the default 1/√(3 fan_in) of torch.nn.Linear")
def never_initialised(fixed, _):
    """names of wrapped modules match no rule: nn.Linear's default is kept"""
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


@bug("ViT", "NVIDIA-BioNeMo/bionemo-recipes/pull/1368", RECIPES.normal(), "its weights are zero, as if never")
def empty(fixed, _):
    """weights of the meta device are never initialised, and zero"""
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


@bug("ViT", "pytorch/pytorch/issues/5168", RECIPES.lecun(), "the default 1/√(3 fan_in) of torch.nn")
def third_of_variance(fixed, _):
    """uniform within ±1/√fan_in has a third of the variance 1/fan_in"""

    def draw(name, W):
        bound = math.sqrt((3 if fixed else 1) / W.shape[1])
        INIT.uniform_(W, -bound, bound)

    return drawn(vit(), draw)


@bug("TransformerEncoder", "pytorch/pytorch/issues/86274", RECIPES.pytorch(), "have the same weights", inputs=X)
def copied_layers(fixed, _):
    """layers are copies of one layer"""
    model = encoder()
    for layer in model.layers if fixed else ():
        layer.self_attn._reset_parameters()
        for linear in (layer.self_attn.out_proj, layer.linear1, layer.linear2):
            linear.reset_parameters()
        layer.self_attn.out_proj.bias.data.zero_()
    return model


@bug("Llama", "habla-liaa/encodecmae/issues/3", RECIPES.normal(), "have the same weights")
def shared_mlp(fixed, _):
    """all layers share one MLP"""
    model = llama()
    for layer in () if fixed else model.layers[1:]:
        layer.mlp = model.layers[0].mlp
    return model


@bug("TransformerEncoder", "pytorch/pytorch/issues/166378", RECIPES.xavier(), "initialised as one", inputs=X)
def fused(fixed, _):
    """Xavier of queries, keys and values as one matrix"""

    def draw(name, W):
        for part in W.chunk(3) if fixed and name.endswith("in_proj_weight") else (W,):
            INIT.xavier_uniform_(part)

    model = drawn(encoder(), draw)
    for name, each in model.named_parameters():
        if "bias" in name:
            INIT.zeros_(each)
    return model
