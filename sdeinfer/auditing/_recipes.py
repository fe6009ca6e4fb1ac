"""Recipes of initialisation in use, each with its source. Tests: `tests/auditing/test_audit.py`."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from sdeinfer._files import InputError
from sdeinfer.auditing._recipe import Recipe
from sdeinfer.auditing._recipe import of_rules as of_rules
from sdeinfer.passes._account import IN_BLOCKS, Matrix

GPT2_SD = 0.02
"""The standard deviation of GPT-2, BERT and Llama, the default `initializer_range` of their configurations."""


def gpt2(sd: float = GPT2_SD) -> Recipe:
    """All weights N(0, sd²), and the last of each branch N(0, sd²/(2L)); biases are 0.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", §2.3; `_init_weights` in
    transformers/models/gpt2/modeling_gpt2.py.
    """

    def scaled(matrix: Matrix) -> float | None:
        return sd / math.sqrt(2 * matrix.layers) if matrix.last else sd if _drawn(matrix) else None

    return Recipe("gpt2", "Radford et al. 2019, §2.3; modeling_gpt2.py", scaled, law=_normal)


def normal(sd: float = GPT2_SD) -> Recipe:
    """All weights N(0, sd²), biases are 0: Llama, Mistral, Qwen, Gemma, BERT, ViT.

    Source: Devlin et al. 2018, arXiv 1810.04805, whose code truncates at 2 sd; `_init_weights` in
    transformers/modeling_utils.py, which does not.
    """
    source = "transformers/modeling_utils.py: _init_weights"
    return Recipe("normal", source, lambda matrix: sd if _drawn(matrix) else None, law=_normal)


def pytorch(*, biases: bool = True) -> Recipe:
    """The defaults of `torch.nn.MultiheadAttention` and `Linear`, as in `torch.nn.TransformerEncoderLayer`.

    Queries, keys and values are one matrix of shape (3n, n), Xavier uniform, with biases 0; the last matrix of
    attention is uniform within ±1/√fan_in, with biases 0; those of the MLP and their biases are within ±1/√fan_in.

    Source: `_reset_parameters` in torch/nn/modules/activation.py; `reset_parameters` in torch/nn/modules/linear.py.

    Arguments:
        biases: whether there are any.
    """

    def sd(matrix: Matrix) -> float | None:
        if matrix.role in ("query", "key", "value"):
            return math.sqrt(2 / (matrix.width + 3 * matrix.width))
        return _linear(matrix) if matrix.linear and matrix.role != "input" else None

    def bias_sd(matrix: Matrix) -> float | None:
        of_attention = matrix.of in ("query", "key", "value", "attention output")
        return _linear(matrix) if biases and not of_attention else 0.0

    return Recipe("pytorch", "torch/nn/modules/activation.py and linear.py", sd, bias_sd, _uniform)


def pytorch_linear(*, biases: bool = True) -> Recipe:
    """The default of `torch.nn.Linear` for every matrix: weights and biases are uniform within ±1/√fan_in.

    Source: `reset_parameters` in torch/nn/modules/linear.py; equinox/nn/_linear.py has the same.

    Arguments:
        biases: whether there are any.
    """

    def sd(matrix: Matrix) -> float | None:
        return 1.0 if matrix.role == "embedding" else _linear(matrix) if matrix.linear else None

    bias_sd = _linear if biases else lambda matrix: 0.0
    return Recipe("pytorch_linear", "torch/nn/modules/linear.py: reset_parameters", sd, bias_sd, _uniform)


def lecun() -> Recipe:
    """Variance 1/fan_in, biases are 0: the default of Flax.

    Source: LeCun et al. 1998, "Efficient BackProp", §4.6; `default_kernel_init` in flax/nnx/nn/linear.py.
    """
    return _of_fans("lecun", "LeCun et al. 1998, §4.6; flax/nnx/nn/linear.py", lambda matrix: matrix.fan_in**-0.5)


def xavier(gain: float = 1.0) -> Recipe:
    """Variance 2 gain²/(fan_in + fan_out), with one matrix each for queries, keys and values; biases are 0.

    Source: Glorot and Bengio 2010, PMLR 9:249–256, Eq. 16; `xavier_normal_` in torch/nn/init.py.
    """
    source = "Glorot and Bengio 2010, Eq. 16; torch/nn/init.py"
    return _of_fans("xavier", source, lambda matrix: gain * math.sqrt(2 / (matrix.fan_in + matrix.fan_out)))


def kaiming(mode: str = "fan_in", gain: float = 2**0.5) -> Recipe:
    """Variance gain²/fan, biases are 0.

    Source: He et al. 2015, arXiv 1502.01852, Eq. 10 (fan_in) and 14 (fan_out); `kaiming_normal_` in torch/nn/init.py.

    Arguments:
        mode: "fan_in" or "fan_out".
        gain: √2 for ReLU, 1 for none; others in `torch.nn.init.calculate_gain`.

    Raises:
        InputError: for an unknown mode.
    """
    if mode not in ("fan_in", "fan_out"):
        raise InputError(f"mode: 'fan_in' or 'fan_out' is needed, got {mode!r}")
    source = "arXiv 1502.01852, Eq. 10 and 14; torch/nn/init.py"
    return _of_fans("kaiming", source, lambda matrix: gain * getattr(matrix, mode) ** -0.5)


def mup(sd: float = GPT2_SD, *, base_width: int, base_head_size: float = 1.0) -> Recipe:
    """μP: hidden weights N(0, sd² base_width/n), logits over d_k in place of √d_k; biases are 0.

    Source: Yang et al. 2022, arXiv 2203.03466, Table 3 and Definition 4.1; mup/init.py.

    Arguments:
        sd: standard deviation at the base width.
        base_width: n of the base model; hidden sizes have one ratio to n.
        base_head_size: head size at which logits are as usual, `attn_mult` in the examples of mup, which multiply them
            by its root; 1 for qᵀk/d_k.
    """
    _at_least_one(base_width=base_width)
    source = "arXiv 2203.03466, Table 3 and Definition 4.1; mup/init.py"
    hidden = _of_fans("mup", source, lambda matrix: sd * math.sqrt(base_width / matrix.width))
    # The head is multiplied by base_width/n, before or after it, or drawn so.
    return dataclasses.replace(hidden, temperature=lambda size: math.sqrt(size / base_head_size), free_readout=True)


def completep(
    sd: float = GPT2_SD, *, base_width: int, base_layers: int, alpha: float = 1.0, base_head_size: float = 1.0
) -> Recipe:
    """CompleteP: μP, and every branch is multiplied by (L/base_layers)^−α; depth-μP is α = ½.

    Source: Dey et al. 2025, arXiv 2505.01618, Table 1; the branch completep of EleutherAI/nanoGPT-mup, model.py. For
    α = ½ Yang et al. 2023, arXiv 2310.02244.

    Arguments:
        sd: standard deviation at the base width.
        base_width: n of the base model.
        base_layers: L of the base model.
        alpha: α.
        base_head_size: see `mup`.
    """
    _at_least_one(base_layers=base_layers)
    return dataclasses.replace(
        mup(sd, base_width=base_width, base_head_size=base_head_size),
        name="completep",
        source="arXiv 2505.01618, Table 1; EleutherAI/nanoGPT-mup, branch completep, model.py",
        multiplier=lambda layers: (layers / base_layers) ** -alpha,
    )


def deepnet(base: Recipe | None = None) -> Recipe:
    """DeepNorm, of encoders alone or decoders alone: x′ = norm(αx + f(x)) with α = (2L)^¼.

    Weights are Xavier normal; those of the MLP, the values and the last of attention have the gain β = (8L)^−¼.

    Source: Wang et al. 2022, arXiv 2203.00555, Figure 2; torchscale/architecture/encoder.py multiplies the weights and
    biases of `pytorch_linear` by β.

    Arguments:
        base: the recipe whose weights and biases are multiplied by β; None for `xavier()`.
    """
    base = xavier() if base is None else base

    def scaled(sd: Callable[[Matrix], float | None], matrix: Matrix) -> float | None:
        value = sd(matrix)
        beta = 1.0 if {matrix.role, matrix.of} & {"query", "key"} else (8 * matrix.layers) ** -0.25
        return None if value is None else value * beta

    return dataclasses.replace(
        base,
        name="deepnet",
        source="arXiv 2203.00555, Figure 2; torchscale/architecture/encoder.py",
        sd=functools.partial(scaled, base.sd),
        bias_sd=functools.partial(scaled, base.bias_sd),
        skip=lambda layers: (2 * layers) ** 0.25,
    )


RECIPES: dict[str, Callable[..., Recipe]] = {
    make.__name__: make
    for make in (gpt2, normal, pytorch, pytorch_linear, lecun, xavier, kaiming, mup, completep, deepnet)
}
"""Functions that make recipes, by name."""


def _of_fans(name: str, source: str, sd: Callable[[Matrix], float]) -> Recipe:
    """A rule that says nothing of embeddings, the head, and what is outside of layers."""
    return Recipe(
        name,
        source,
        lambda matrix: sd(matrix) if matrix.role in IN_BLOCKS else None,
        lambda matrix: 0.0 if matrix.of in IN_BLOCKS else None,
    )


def _drawn(matrix: Matrix) -> bool:
    return matrix.linear or matrix.role in ("embedding", "position")


def _linear(matrix: Matrix) -> float:
    """Uniform within ±1/√fan_in."""
    return 1 / math.sqrt(3 * max(matrix.fan_in, 1))


def _normal(matrix: Matrix) -> str:
    return "normal"


def _uniform(matrix: Matrix) -> str | None:
    return None if matrix.role == "embedding" else "uniform"


def _at_least_one(**sizes: Any) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 1:
            raise InputError(f"{name}: a whole number of at least 1 is needed, got {size!r}")
