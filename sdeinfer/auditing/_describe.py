"""A model as an audit knows it before it runs: its library, residual branches, and the structure of its blocks."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import equinox as eqx
import jax.random as jr

from sdeinfer._arguments import shown
from sdeinfer._files import InputError, first_line
from sdeinfer.auditing._find import find, modules, multihead
from sdeinfer.auditing._structure import of_configuration, of_encoder_layer, unknown
from sdeinfer.blocks import SelfAttention
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.covariance import Pattern
from sdeinfer.layers import AbstractLayer, Stack
from sdeinfer.observation._capture import torch_network

Library = Literal["torch", "flax", "equinox"]


@dataclasses.dataclass(frozen=True, eq=False)
class Description:
    """A model's residual branches and the structure of its blocks.

    Attributes:
        library: the library of the model.
        branches: returns (kind, reader, writer) for each branch of such a model, in the order of their calls.
        layers: returns the modules whose input and output are the residual stream; none if they are not known.
        architecture: the blocks of one layer; strengths, gains and biases are those of a recipe.
        sd: standard deviation of weights in the model's configuration, or None.
        name: what the model is, for sentences: "GPT2Model".
    """

    library: Library
    branches: Callable[[Any], list[tuple[str, Any, Any]]]
    layers: Callable[[Any], list[Any]]
    architecture: Stack
    sd: float | None
    name: str


def describe(
    model: Any,
    *,
    patterns: Mapping[str, Any] | None = None,
    architecture: AbstractLayer | None = None,
    pattern: Pattern | None = None,
) -> Description:
    """The library, the branches and the blocks of a model.

    Arguments:
        model: a module of PyTorch, Flax (NNX) or Equinox, or a function that draws one from a seed, `nnx.Rngs` or a
            key, which is called once.
        patterns: names of the branches, see `find`; None for well-known ones.
        architecture: the blocks of one layer; None for those that a Hugging Face configuration or PyTorch's
            `nn.TransformerEncoderLayer` tells.
        pattern: which tokens each token attends to; None for that of the configuration or the architecture, and for
            PyTorch's encoder no mask.

    Raises:
        InputError: as `find`, for quantised weights, for blocks that the model does not tell or that have another law,
            and for an architecture with other heads or another pattern.
    """
    network, library = drawn(model)
    branches, layers = find(network, patterns)
    _require_floats(network, library)
    if architecture is None:
        blocks = _of_model(network, layers(network), pattern)
    else:
        blocks = _checked(architecture, branches(network), pattern)
    config = configuration_of(network)
    sd = getattr(config, "initializer_range", None) or getattr(config, "init_std", None)
    return Description(library, branches, layers, blocks, sd, type(network).__name__)


def drawn(model: Any, *, seed: int = 0) -> tuple[Any, Library]:
    """A module and its library; of a function, the module that it makes of a seed."""
    libraries = list(_libraries(seed))
    for library, kind, _ in libraries:
        if isinstance(model, kind):
            return model, library
    needed = (
        "a module of PyTorch, Flax (NNX) or Equinox, or a function that makes one (PyTorch: `lambda seed: …`; Flax: "
        "`lambda rngs: …`, of nnx.Rngs; Equinox: `lambda key: …`)"
    )
    if not callable(model):
        raise InputError(f"model: {needed} is needed, got {shown(model)}")
    problems = []
    for library, kind, draw in libraries:
        try:
            network = draw(model)
        except Exception as error:  # a function of another library's argument raises what it will
            problems.append(f"{library}: {first_line(error)}")
            continue
        if isinstance(network, kind):
            return network, library
        problems.append(f"{library}: it makes {shown(network)}")
    raise InputError(f"model: {needed} is needed; {'; '.join(problems)}")


def configuration_of(network: Any) -> Any:
    """The configuration of a Hugging Face model, or of the first one inside a module; None if there is none."""
    kind = getattr(sys.modules.get("transformers.modeling_utils"), "PreTrainedModel", None)
    if kind is None:
        return None
    model = next((each for each in modules(network).values() if isinstance(each, kind)), None)
    return None if model is None else model.config.get_text_config()


def _libraries(seed: int) -> Iterator[tuple[Library, type, Callable[[Callable], Any]]]:
    """Each imported library, as no other can have made a module: its class of modules, and how it calls a function."""
    if torch := sys.modules.get("torch"):
        yield "torch", torch.nn.Module, lambda make: torch_network(torch, make, seed, 0)
    if nnx := sys.modules.get("flax.nnx"):
        yield "flax", nnx.Module, lambda make: make(nnx.Rngs(seed))
    yield "equinox", eqx.Module, lambda make: make(jr.key(seed))


def _require_floats(network: Any, library: Library) -> None:
    """Check that no weights of a PyTorch module are quantised."""
    if library != "torch":
        return
    for path, module in modules(network).items():
        source = type(module).__module__
        if "bitsandbytes" in source or "quantized" in source:
            raise InputError(f"model: {path} is a {type(module).__name__}: quantised weights are not those of a recipe")
    for path, weights in network.named_parameters():
        if not weights.is_floating_point():
            raise InputError(f"model: {path} is {weights.dtype}: quantised weights are not those of a recipe")


def _of_model(network: Any, layers: list[Any], pattern: Pattern | None) -> Stack:
    """The blocks that a model tells."""
    name, config = type(network).__name__, configuration_of(network)
    if config is not None:
        for path in modules(network):  # of these norms not every configuration tells
            if path.rpartition(".")[2] in ("q_norm", "k_norm", "q_layernorm", "k_layernorm"):
                what = f"normalised queries and keys ({path})"
                raise InputError(f"model: {name} has {what}, for which there is no law of blocks")
        return of_configuration(config, name, pattern)
    encoder = getattr(getattr(sys.modules.get("torch"), "nn", None), "TransformerEncoderLayer", None)
    if encoder is not None and layers and all(isinstance(layer, encoder) for layer in layers):
        return of_encoder_layer(layers[0], name, pattern)
    raise unknown(name)


def _checked(architecture: AbstractLayer, found: list[tuple[str, Any, Any]], pattern: Pattern | None) -> Stack:
    """A user's architecture, if its heads and pattern are those of the model."""
    order = BlockOrder.of(architecture, depth=1)
    blocks = [block.branch for block in order.blocks if isinstance(block.branch, SelfAttention)]
    for _, reader, _ in found:
        heads = getattr(reader, "num_heads", None)
        if blocks and multihead(reader) and all(block.heads != heads for block in blocks):
            raise InputError(
                f"architecture: heads={blocks[0].heads}, where the model's {type(reader).__name__} has {heads}"
            )
    if blocks and pattern is not None and pattern != order.pattern:
        raise InputError(
            f"pattern: {pattern}, where the architecture has {order.pattern}: give both the same si.Pattern"
        )
    return Stack(order.blocks)
