"""Networks with bugs in their initialisation, from public threads, and the audits of each before and after its fix.

    python audited_bugs.py --seeds 10

prints a table in Markdown: how often the audit found the bug, named it, and raised a false alarm after the fix; with
`--json FILE` it writes the verdicts, and `--bugs` chooses rows. The interpreter needs torch, transformers, flax and
this package; nothing is downloaded.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import audited_jax as of_jax
import audited_torch as of_torch
import records
import torch  # pyright: ignore[reportMissingImports]

import sdeinfer as si
from sdeinfer.auditing import Recipe

RECIPES, GITHUB = si.audit.recipes, "https://github.com/"


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


ROOT_MISSING = "the factor 1/√(2L) of the attention and mlp output matrix is missing"
LECUN, KAIMING = RECIPES.lecun(), RECIPES.kaiming("linear")
ENCODER, OF_JAX = {"inputs": of_torch.X}, {"inputs": of_jax.TOKENS, "architecture": of_jax.BLOCKS}
BUGS = {
    bug.make.__name__: bug
    for bug in (
        Bug(
            "GPT-2",
            "the residual scale 1/√(2L) is never applied: names of parameters do not match",
            "huggingface/transformers/issues/47458",
            of_torch.scaling_never_applied,
            RECIPES.gpt2(),
            ROOT_MISSING,
        ),
        Bug(
            "Llama",
            "1/√(2L) on queries and keys in place of the last matrices",
            "",
            of_torch.scaling_of_queries,
            RECIPES.gpt2(),
            ROOT_MISSING,
        ),
        Bug(
            "Llama",
            "1/√(2L) on the up projection in place of the down projection",
            "karpathy/llama2.c/issues/579",
            of_torch.scaling_of_up,
            RECIPES.gpt2(),
            ROOT_MISSING,
        ),
        Bug(
            "GPT-2",
            "Kaiming's fan_in of Conv1D's transposed weights",
            "pytorch/pytorch/pull/130122",
            of_torch.transposed,
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
            of_torch.divided_by_width,
            RECIPES.mup(base_width=64, base_head_size=of_torch.WIDTH // of_torch.HEADS),
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
            of_torch.never_initialised,
            RECIPES.normal(),
            "the default 1/√(3 fan_in) of torch.nn.Linear, as if never initialised",
        ),
        Bug(
            "ViT",
            "weights of the meta device are never initialised, and zero",
            "NVIDIA-BioNeMo/bionemo-recipes/pull/1368",
            of_torch.empty,
            RECIPES.normal(),
            "its weights are zero, as if never initialised",
        ),
        Bug(
            "ViT",
            "uniform within ±1/√fan_in has a third of the variance 1/fan_in",
            "pytorch/pytorch/issues/5168",
            of_torch.third_of_variance,
            LECUN,
            "the default 1/√(3 fan_in) of torch.nn.Linear",
        ),
        Bug(
            "TransformerEncoder",
            "layers are copies of one layer",
            "pytorch/pytorch/issues/86274",
            of_torch.copied_layers,
            RECIPES.pytorch(),
            "have the same weights",
            ENCODER,
        ),
        Bug(
            "Llama",
            "all layers share one MLP",
            "habla-liaa/encodecmae/issues/3",
            of_torch.shared_mlp,
            RECIPES.normal(),
            "have the same weights",
        ),
        Bug(
            "TransformerEncoder",
            "Xavier of queries, keys and values as one matrix",
            "pytorch/pytorch/issues/166378",
            of_torch.fused,
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


def row(bug: Bug, before: list[str], after: list[str]) -> list[str]:
    """The row of the table, without its name."""
    found = sum(not each.startswith("passed") for each in before)
    named = sum(bug.cause in each for each in before)
    alarms = sum(not each.startswith("passed") for each in after)
    thread = f"[{bug.thread}]({GITHUB}{bug.thread})" if bug.thread else ""
    return [bug.model, thread, str(found), str(named), str(alarms)]


def main():
    """Audit every network."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument(
        "--first", type=int, default=0, help="the first seed; rules were written while looking at 0 and 1"
    )
    parser.add_argument("--bugs", nargs="+", default=list(BUGS), choices=list(BUGS))
    parser.add_argument("--json", type=Path, help="write all verdicts to this file")
    parser.add_argument("--record", action="store_true", help="write the table to docs/records")
    given = parser.parse_args()
    si.use_compilation_cache()
    verdicts, rows = {}, {}
    for name in given.bugs:
        bug = BUGS[name]
        seeds = range(given.first, given.first + given.seeds)
        before, after = ([verdict(bug, seed, fixed=fixed) for seed in seeds] for fixed in (False, True))
        verdicts[name] = {"cause": bug.cause, "before": before, "after": after}
        rows[bug.says] = row(bug, before, after)
        print(bug.says, *rows[bug.says], sep=" | ", flush=True)
    if given.record:
        records.update("audited_bugs", rows)
    if given.json is not None:
        given.json.write_text(json.dumps(verdicts, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    main()
