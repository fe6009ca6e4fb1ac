"""Networks with bugs in their initialisation, from public threads, and the audits of each before and after its fix.

    python audited_bugs.py --seeds 10

prints a table in Markdown: how often the audit found the bug, named it, and raised a false alarm after the fix; with
`--json FILE` it writes the verdicts, and `--bugs` chooses rows. The interpreter needs torch, transformers, flax and
this package; nothing is downloaded.
"""

import argparse
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import audited_jax as of_jax
import torch  # pyright: ignore[reportMissingImports]
import transformers as hf  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]

import sdeinfer as si
from sdeinfer.auditing import Recipe

WIDTH, LAYERS, HEADS, SD = 256, 6, 4, 0.02
RECIPES, INIT, GITHUB = si.audit.recipes, nn.init, "https://github.com/"
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "intermediate_size": 1024}
X = torch.randn(1, 4, WIDTH, generator=torch.Generator().manual_seed(1))


@dataclasses.dataclass(frozen=True)
class Bug:
    """A bug.

    Attributes:
        model: what has it.
        says: the bug.
        thread: where it was reported, below `GITHUB`.
        make: of a seed and whether it is fixed, the network.
        recipe: what is declared.
        cause: what the verdict must say.
        inputs: of the network, and the blocks of one that does not tell them; arguments of `audit`.
    """

    model: str
    says: str
    thread: str
    make: Callable[[int, bool], Any]
    recipe: Recipe
    cause: str
    inputs: dict[str, Any] = dataclasses.field(default_factory=dict)


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
    model = llama()
    for name, W in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight") if fixed else ("q_proj.weight", "k_proj.weight")):
            INIT.normal_(W, std=SD / math.sqrt(2 * LAYERS))
    return model


def scaling_of_up(seed, fixed):
    del seed
    model = llama()
    for name, W in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight" if fixed else "up_proj.weight")):
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


ROOT_MISSING = "the factor 1/√(2L) of the {} matrix is missing"
LECUN, KAIMING = RECIPES.lecun(), RECIPES.kaiming("linear")
ENCODER, OF_JAX = {"inputs": X}, {"inputs": of_jax.TOKENS, "architecture": of_jax.BLOCKS}
BUGS = {
    bug.make.__name__: bug
    for bug in (
        Bug(
            "GPT-2",
            "the residual scale 1/√(2L) is never applied: names of parameters do not match",
            "huggingface/transformers/issues/47458",
            scaling_never_applied,
            RECIPES.gpt2(),
            ROOT_MISSING.format("attention output"),
        ),
        Bug(
            "Llama",
            "1/√(2L) on queries and keys in place of the last matrices",
            "",
            scaling_of_queries,
            RECIPES.gpt2(),
            ROOT_MISSING.format("mlp output"),
        ),
        Bug(
            "Llama",
            "1/√(2L) on the up projection in place of the down projection",
            "karpathy/llama2.c/issues/579",
            scaling_of_up,
            RECIPES.gpt2(),
            ROOT_MISSING.format("mlp output"),
        ),
        Bug(
            "GPT-2",
            "Kaiming's fan_in of Conv1D's transposed weights",
            "pytorch/pytorch/pull/130122",
            transposed,
            KAIMING,
            "one matrix, whose fan_in and fan_out are exchanged",
        ),
        Bug(
            "Equinox",
            "Kaiming's mode is fan_out in place of fan_in",
            "vballoli/nfnets-pytorch/issues/30",
            of_jax.kaiming_mode,
            KAIMING,
            "fan_in and fan_out are exchanged",
            OF_JAX,
        ),
        Bug(
            "GPT-2",
            "μP divides the standard deviation by the ratio of widths, not by its root",
            "EleutherAI/gpt-neox/pull/1087",
            divided_by_width,
            RECIPES.mup(base_width=64, base_head_size=WIDTH // HEADS),
            "is there twice, or squared",
        ),
        Bug(
            "Flax",
            "the variance is taken for the standard deviation",
            "llm-random/llm-random/pull/508",
            of_jax.variance_as_sd,
            LECUN,
            "the variance is taken for the standard deviation",
            OF_JAX,
        ),
        Bug(
            "Llama",
            "names of wrapped modules match no rule: nn.Linear's default is kept",
            "Modalities/modalities/pull/460",
            never_initialised,
            RECIPES.normal(),
            "the default 1/√(3 fan_in) of torch.nn.Linear, as if never initialised",
        ),
        Bug(
            "ViT",
            "weights of the meta device are never initialised, and zero",
            "NVIDIA-BioNeMo/bionemo-recipes/pull/1368",
            empty,
            RECIPES.normal(),
            "its weights are zero, as if never initialised",
        ),
        Bug(
            "ViT",
            "uniform within ±1/√fan_in has a third of the variance 1/fan_in",
            "pytorch/pytorch/issues/5168",
            third_of_variance,
            LECUN,
            "the default 1/√(3 fan_in) of torch.nn.Linear",
        ),
        Bug(
            "TransformerEncoder",
            "layers are copies of one layer",
            "pytorch/pytorch/issues/86274",
            copied_layers,
            RECIPES.pytorch(),
            "have the same weights",
            ENCODER,
        ),
        Bug(
            "Llama",
            "all layers share one MLP",
            "habla-liaa/encodecmae/issues/3",
            shared_mlp,
            RECIPES.normal(),
            "have the same weights",
        ),
        Bug(
            "TransformerEncoder",
            "Xavier of queries, keys and values as one matrix",
            "pytorch/pytorch/issues/166378",
            fused,
            RECIPES.xavier(),
            "queries, keys and values are initialised as one matrix",
            ENCODER,
        ),
        Bug(
            "Flax",
            "a normal law is cut off at 2 standard deviations, without a correction",
            "keras-team/keras/issues/8048",
            of_jax.truncated,
            LECUN,
            "a normal law that is cut off at two standard deviations",
            OF_JAX,
        ),
        Bug(
            "Flax",
            "logits are not divided by √d_k",
            "PAIR-code/tiny-transformers/issues/71",
            of_jax.logits_not_scaled,
            LECUN,
            "1/√d_k of the logits is missing",
            OF_JAX,
        ),
        Bug(
            "Equinox",
            "logits are divided by √n in place of √d_k",
            "omihub777/ViT-CIFAR/pull/11",
            of_jax.logits_over_width,
            LECUN,
            "logits are divided by √n in place of √d_k",
            OF_JAX,
        ),
        Bug(
            "Equinox",
            "queries, keys and values have the fan_in of one head",
            "clankur/einygpt/pull/3",
            of_jax.fan_of_a_head,
            LECUN,
            "the query, key and value matrices: fan_in is that of one head",
            OF_JAX,
        ),
    )
}


def verdict(bug: Bug, seed: int, *, fixed: bool) -> str:
    """The verdict of an audit, or the message of its refusal."""
    torch.manual_seed(seed)
    try:
        return si.audit(bug.make(seed, fixed), recipe=bug.recipe, **bug.inputs).verdict
    except si.InputError as error:
        return f"failed: {error}"


def row(bug: Bug, before: list[str], after: list[str]) -> str:
    """The row of the table."""
    found = sum(not each.startswith("passed") for each in before)
    named = sum(bug.cause in each for each in before)
    alarms = sum(not each.startswith("passed") for each in after)
    thread = f"[{bug.thread}]({GITHUB}{bug.thread})" if bug.thread else ""
    return f"| {bug.model} | {bug.says} | {thread} | {found} | {named} | {alarms} |"


def main():
    """Audit every network."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--bugs", nargs="+", default=list(BUGS), choices=list(BUGS))
    parser.add_argument("--json", type=Path, help="write all verdicts to this file")
    given = parser.parse_args()
    si.use_compilation_cache()
    verdicts = {}
    print(f"| model | bug | thread | found of {given.seeds} | named | false alarms after the fix |")
    print("|---|---|---|---|---|---|")
    for name in given.bugs:
        bug = BUGS[name]
        before, after = ([verdict(bug, seed, fixed=fixed) for seed in range(given.seeds)] for fixed in (False, True))
        verdicts[name] = {"cause": bug.cause, "before": before, "after": after}
        print(row(bug, before, after), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(verdicts, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
