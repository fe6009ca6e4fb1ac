"""A factor of 3 (or 1 in the place of 0) in one parameter of each kind, by "auto": how many audits find and name it.

Run `OMP_NUM_THREADS=1 python tests/benchmarks/audit_planted.py [TYPE …]`. Parameters whose names differ in their places
in lists alone are one kind, of which the last is changed.
"""

import contextlib
import functools
import os
import sys
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
warnings.filterwarnings("ignore")

import torch  # noqa: E402
import transformers as hf  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from audit_sweep import SIZES, built  # noqa: E402

import sdeinfer as si  # noqa: E402
from sdeinfer.auditing._tests import pattern_of  # noqa: E402

TYPES = (
    "gpt2 bert llama qwen3 gemma3_text olmo2 mixtral t5 dinov2 mamba mamba2 rwkv gpt_neox vit beit swin whisper "
    "gpt_oss qwen3_next deberta-v2"
).split()


OWN = {"mamba2": {"hidden_size": 64, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1}}
"""Sizes that small ones do not fit."""


@functools.cache
def sizes_of(kind: str) -> dict:
    """The first sizes at which a type can be audited."""
    for sizes in SIZES.values():
        with contextlib.suppress(Exception):
            si.audit(built(hf.CONFIG_MAPPING[kind], sizes))
            return sizes
    raise ValueError(kind)


def made(kind: str):
    if kind not in OWN:
        return built(hf.CONFIG_MAPPING[kind], sizes_of(kind))
    torch.manual_seed(0)
    return hf.AutoModel.from_config(hf.CONFIG_MAPPING[kind](**OWN[kind], num_hidden_layers=3, vocab_size=199))


def main() -> None:
    hf.logging.set_verbosity_error()
    planted = found = untested = 0
    for kind in sys.argv[1:] or TYPES:
        network = made(kind)
        first = si.audit(network, recipe="auto")
        print(kind, first.passed, "" if first.passed else first.verdict[:300], flush=True)
        names = {pattern_of(name): name for name, _ in network.named_parameters()}
        for name in names.values():
            network = made(kind)
            parameter = dict(network.named_parameters())[name]
            with torch.no_grad():
                parameter.mul_(3.0) if parameter.abs().max() > 0 else parameter.fill_(1.0)
            audit = si.audit(network, recipe="auto")
            named = any(name in each for test in audit.failed for each in (*test.names, test.says))
            planted, found = planted + 1, found + named
            said = any(name in test.names for test in audit.tests if test.passed is None)
            untested += said and not named
            if not named:
                print(f"  {name} {tuple(parameter.shape)}: {'not tested' if said else audit.verdict[:160]}", flush=True)
    print(f"{planted} planted, {found} found and named, {untested} said to be not tested")


if __name__ == "__main__":
    main()
