"""Find the residual branches of a model by the names of its modules, whose path is as "h.0.attn" in any library."""

import fnmatch
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx

from sdeinfer._arguments import shown
from sdeinfer._files import InputError

type Ends = tuple[str, str]
"""Paths of the reader and the writer of a branch."""

ATTENTION = (
    ("attention.self", "attention.output.dense"),  # as BERT: `attention` has the sum and the norm inside
    "attn",
    "self_attn",
    "attention",
    "self_attention",
    "mha",
)
MLP = (
    ("intermediate.dense", "output.dense"),
    "mlp",
    "ffn",
    "feed_forward",
    "feedforward",
    "mlp_block",
    ("linear1", "linear2"),
    ("fc1", "fc2"),
    ("mlp.c_fc", "mlp.c_proj"),
)
"""Names of a branch inside its layer, one or those of (reader, writer); the first that a layer has is taken."""


def find(
    model: Any, patterns: Mapping[str, Any] | None = None
) -> tuple[Callable[[Any], list[tuple[str, Any, Any]]], Callable[[Any], list[Any]]]:
    """Functions that return the branches and the layers of a model, and of others with modules of the same names.

    Patterns are those of `audit`; None for well-known names. Branches are in the order of what stands for `*`, and of
    the kinds within that.
    """
    tree, name = modules(model), type(model).__name__
    found = _layers(tree, name) if patterns is None else {}
    named = [] if patterns is None else _named(tree, patterns, name)
    places = [branch for layer in found.values() for branch in layer] + named

    def branches(network: Any) -> list[tuple[str, Any, Any]]:
        return [(kind, module_at(network, reader), module_at(network, writer)) for kind, (reader, writer) in places]

    def layers(network: Any) -> list[Any]:
        return [module_at(network, path) for path in found]

    return branches, layers


def modules(model: Any) -> dict[str, Any]:
    """All modules of a model by their paths, from the outside in, and each in the first of its places."""
    found, seen = {}, set()

    def visit(path: str, node: Any) -> None:
        if id(node) not in seen:
            seen.add(id(node))
            found[path] = node
            for name, child in children(node):
                visit(_inside(path, name), child)

    visit("", model)
    return found


def module_at(model: Any, path: str) -> Any:
    """The module at a path."""
    node = model
    for name in filter(None, path.split(".")):
        if isinstance(node, Mapping):
            node = {str(key): value for key, value in node.items()}[name]
        elif isinstance(node, Sequence):
            node = node[int(name)]
        else:
            node = getattr(node, name)  # of a tapped module of Equinox, too, whose attributes are not its own
    return node


def children(node: Any) -> Iterator[tuple[str, Any]]:
    """Names and modules that are directly inside a module or a container."""
    if hasattr(node, "named_children"):
        yield from node.named_children()
        return
    if isinstance(node, Mapping):
        named = ((str(key), value) for key, value in node.items())
    elif isinstance(node, Sequence):
        named = ((str(number), value) for number, value in enumerate(node))
    else:
        named = ((name, value) for name, value in vars(node).items() if not name.startswith("_pytree__"))
    yield from ((name, value) for name, value in named if _is_node(value))


def multihead(module: Any) -> bool:
    """Whether it is the attention of PyTorch, Equinox or Flax."""
    return _is_a(module, ("MultiheadAttention", "MultiHeadAttention"))


def _is_node(value: Any) -> bool:
    flax = getattr(sys.modules.get("flax.nnx"), "Module", eqx.Module)
    return hasattr(value, "named_children") or isinstance(value, Mapping | list | tuple | eqx.Module | flax)


def _inside(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _layers(tree: Mapping[str, Any], name: str) -> dict[str, list[tuple[str, Ends]]]:
    """For each Transformer layer, by its path, the kinds and ends of its branches."""
    found: dict[str, list[tuple[str, Ends]]] = {}
    for path, module in tree.items():
        if any(not layer or path.startswith(f"{layer}.") for layer in found):
            continue
        by_class = tuple(child for child, node in children(module) if multihead(node))
        attention, mlp = _ends(tree, path, ATTENTION + by_class), _ends(tree, path, MLP)
        if attention and mlp:
            _require_plain(path, module, name)
            found[path] = [("attention", attention), ("mlp", mlp)]
    if not found:
        raise InputError(
            f"branches: no residual branch found in {name}: no module has attention and an MLP by well-known names; "
            'name them, as branches={"attention": "h.*.attn", "mlp": "h.*.mlp"}'
        )
    _require_own(tree, found, name)
    classes = dict.fromkeys(type(tree[path]).__name__ for path in found)
    if len(classes) > 1:
        raise InputError(
            f"branches: {name} has layers of {' and '.join(classes)}: one kind of layers is needed; name those of one, "
            'as branches={"attention": "h.*.attn", "mlp": "h.*.mlp"}'
        )
    return found


def _require_own(tree: Mapping[str, Any], found: Mapping[str, list[tuple[str, Ends]]], name: str) -> None:
    """Check that no other layer of the same class has a module of those that were found, which is listed once."""
    kinds = {type(tree[path]) for path in found}
    modules_found = {id(tree[reader]): reader for layer in found.values() for _, (reader, _) in layer}
    for path, module in tree.items():
        inside = any(path == layer or path.startswith(f"{layer}.") for layer in found)
        if inside or type(module) not in kinds:
            continue
        for child, node in children(module):
            if id(node) in modules_found:
                raise InputError(
                    f"branches: {_inside(path, child)} and {modules_found[id(node)]} of {name} are one module: these "
                    "layers have the same weights"
                )


def _ends(tree: Mapping[str, Any], path: str, choices: Sequence[str | Ends]) -> Ends | None:
    """The first choice that is inside a module."""
    for choice in choices:
        reader, writer = (_inside(path, end) for end in ((choice, choice) if isinstance(choice, str) else choice))
        if _called(tree.get(reader)) and _called(tree.get(writer)):
            return reader, writer
    return None


def _called(module: Any) -> bool:
    return callable(module) and not _is_a(module, ("ModuleList", "ModuleDict"))  # which PyTorch cannot call


def _is_a(module: Any, classes: Sequence[str]) -> bool:
    return any(kind.__name__ in classes for kind in type(module).__mro__)


def _require_plain(path: str, layer: Any, name: str) -> None:
    """Check that what branches return is added to the stream as it is, and that they read nothing else."""
    cross_attention = ("crossattention", "encoder_attn", "multihead_attn", "cross_attn", "cross_attention")
    # Between a branch and its sum; the `post_attention_layernorm` of a Llama is one before the MLP.
    norm_after = re.compile(r"post_(feedforward|feed_forward|ffn|mlp|self_attn)_?(layer)?norm")
    for child, module in children(layer):
        problem = None
        if norm_after.fullmatch(child):
            problem = f"a norm after a branch ({child}): increments that are normalised have another law"
        elif _is_a(module, ("LayerScale",)):
            problem = f"LayerScale ({child}): increments that are rescaled have another law"
        elif child in cross_attention:
            problem = f"cross-attention ({child}), for which there is no law"
        if problem:
            raise InputError(f"branches: {path or 'the layer'} of {name} has {problem}")


def _named(tree: Mapping[str, Any], patterns: Mapping[str, Any], name: str) -> list[tuple[str, Ends]]:
    """The kinds and ends of the branches that patterns name, in order."""
    found = []
    for place, (kind, given) in enumerate(patterns.items()):
        match given:
            case str():
                ends = given, given
            case (str(), str()):
                ends = tuple(given)
            case _:
                raise InputError(
                    f"branches: {kind}: a glob of paths, or (reader, writer), is needed, got {shown(given)}"
                )
        readers, writers = (_matches(tree, glob, kind, name) for glob in ends)
        if len(readers) != len(writers):
            counts = f"{ends[0]!r} matches {len(readers)} modules and {ends[1]!r} {len(writers)}"
            raise InputError(f"branches: {kind}: {counts}: each reader needs a writer")
        pairs = zip(readers, writers, strict=True)
        found += [(index, place, kind, (reader, writer)) for (index, reader), (_, writer) in pairs]
    return [(kind, ends) for *_, kind, ends in sorted(found)]


def _matches(tree: Mapping[str, Any], glob: str, kind: str, name: str) -> list[tuple[list[tuple], str]]:
    """The paths that a glob matches, with what stands for its wildcards, in the order of that; numbers by size."""
    parts, found = glob.split("."), []
    for path in tree:
        names = path.split(".")
        if len(names) == len(parts) and all(map(fnmatch.fnmatchcase, names, parts)):
            wild = [own for own, part in zip(names, parts, strict=True) if own != part]
            found.append(([(int(own) if own.isdigit() else -1, own) for own in wild], path))
    if not found:
        ending = next((path for path in tree if path and path.split(".")[-1] == parts[-1]), None)
        hint = f"; there is {ending!r}" if ending else ""
        raise InputError(f"branches: {kind}: {glob!r} matches no module of {name}{hint}")
    return sorted(found)
