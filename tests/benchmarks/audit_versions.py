"""Audits of GPT-2 as published versions of transformers initialise it.

Old versions do not run beside a new PyTorch: `_init_weights` is taken from the source of each and applied to the model
of the installed one. Run `pip download --no-deps transformers==4.9.2 transformers==…` and then
`python tests/benchmarks/audit_versions.py *.whl`.
"""

import math
import sys
import textwrap
import zipfile

import torch
import transformers as hf
from transformers.pytorch_utils import Conv1D

import sdeinfer as si


def initialiser(wheel: str):
    """The function `_init_weights` of GPT-2 in a wheel."""
    lines = zipfile.ZipFile(wheel).read("transformers/models/gpt2/modeling_gpt2.py").decode().splitlines()
    start = next(k for k, line in enumerate(lines) if line.startswith("    def _init_weights("))
    body = [lines[start]]
    for line in lines[start + 1 :]:
        if line.strip() and not line.startswith("        "):
            break
        body.append(line)
    names: dict = {"math": math, "nn": torch.nn, "Conv1D": Conv1D}
    exec(textwrap.dedent("\n".join(body)), names)
    return names["_init_weights"]


def main() -> None:
    for wheel in sys.argv[1:]:
        own = initialiser(wheel)
        for seed in range(10):
            torch.manual_seed(seed)
            model = hf.GPT2Model(hf.GPT2Config(n_embd=128, n_layer=6, n_head=4, vocab_size=199))
            model.apply(lambda module, own=own, model=model: own(model, module))
            print(wheel.split("/")[-1], seed, si.audit(model, recipe="auto"), flush=True)


if __name__ == "__main__":
    main()
