"""Templates: layers that give a fit everything but the values of the parameters. Tests: `tests/test_parameters.py`."""

import dataclasses
import inspect
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import numpy as np

from sdeinfer._arguments import shown
from sdeinfer._files import InputError
from sdeinfer.covariance import CAUSAL, Pattern
from sdeinfer.layers._attention import ShapedAttention
from sdeinfer.layers._base import AbstractLayer, limit_of, limit_on_host, own_sizes, sizes_of
from sdeinfer.layers._feedforward import ResidualFeedForward, ShapedMLP
from sdeinfer.layers._over_depth import OverDepth
from sdeinfer.layers._stack import ShapedTransformer
from sdeinfer.parameters import Coordinates, Parameter

ARCHITECTURES: dict[str, type[AbstractLayer]] = {
    str(kind.architecture): kind for kind in (ShapedTransformer, ShapedAttention, ResidualFeedForward, ShapedMLP)
}
"""Types of layers by their names in files and on the command line."""

SIZES: dict[str, Callable[[Any], str]] = {
    "heads": lambda heads: f"{heads} head{'s' if heads > 1 else ''}",
    "output_projection": lambda projects: "an output projection" if projects else "no output projection",
    "expansion": lambda expansion: f"expansion {expansion:g}",
    "pattern": str,
}
"""The sizes that some of these types have by name, with their values in words."""


def template(kind: str | AbstractLayer | type[AbstractLayer], **sizes: Any) -> AbstractLayer:
    """The layer of a name, of a type or of another layer, with its parameters at coordinates 0.

    They are plain numbers, so that templates are hashable and compared by value: equal templates share compiled
    programs. `template("attention", heads=4)` is the kind of attention with four heads.

    Arguments:
        kind: the name, the type, or a layer whose own parameters do not matter.
        sizes: other sizes than its own.

    Raises:
        InputError: for an unknown name, for what is no layer, for a size that it does not have, for arrays that are not
            parameters, and for a layer whose parameters change with depth.
    """
    match kind:
        case str():
            layer = _of_type(_type_named(kind))
        case type() if issubclass(kind, AbstractLayer):
            layer = _of_type(kind)
        case OverDepth():
            raise InputError("architecture: the layer's parameters change with depth; give the layer within it")
        case AbstractLayer():
            layer = kind
        case _:
            raise InputError(f"architecture: a name, a layer or its type is needed, got {shown(kind)}")
    for size in sizes:
        if size not in layer.sizes:
            lack = "no attention to be masked" if size == "pattern" else "no such size"
            raise InputError(f"{size}: {layer.name} has {lack}")
    if sizes or is_named(layer):
        layer = _of_type(type(layer), **layer.sizes | sizes)
    layer = layer.with_coordinates(np.zeros(len(layer.coordinates)))
    if any(np.ndim(leaf) for leaf in jax.tree.leaves(layer)):
        raise InputError(_undeclared(layer))
    return jax.tree.map(float, layer)


def _type_named(name: str) -> type[AbstractLayer]:
    if name not in ARCHITECTURES:
        raise InputError(f"architecture: must be one of {', '.join(ARCHITECTURES)}, got {name!r}")
    return ARCHITECTURES[name]


def _of_type(kind: type[AbstractLayer], **sizes: Any) -> AbstractLayer:
    """A layer of a type, whose arguments without a default have to be parameters."""
    needed = [
        argument.name for argument in inspect.signature(kind).parameters.values() if argument.default is argument.empty
    ]
    known: dict[str, Parameter] = {
        name: field.metadata["parameter"]
        for name, field in kind.__dataclass_fields__.items()
        if "parameter" in field.metadata
    }
    if inspect.isabstract(kind) or not known.keys() >= set(needed):
        others = ", ".join(name for name in needed if name not in known)
        raise InputError(f"architecture: give a layer, not its type: {kind.__name__} needs {others or 'forward'}")
    coordinates = Coordinates({name: known[name] for name in needed})
    return kind(**coordinates.constrained(np.zeros(len(coordinates))), **sizes)


def _undeclared(layer: AbstractLayer) -> str:
    return (
        f"architecture: {type(layer).__name__} has {len(jax.tree.leaves(layer))} arrays, of which "
        f"{len(layer.declared())} are parameters; make each a field by `Parameter.field`, or static"
    )


def check_fittable(kind: AbstractLayer) -> None:
    """Check that a template has a limit with the package's noise, and no numbers but its parameters."""
    if is_named(kind):
        return
    if len(jax.tree.leaves(kind)) != len(kind.declared()):
        raise InputError(_undeclared(kind))
    for term in jax.eval_shape(limit_of, kind).others:
        if term.columns:
            raise InputError(f"architecture: a fit has no noise of other terms, got {type(term).__name__} with noise")
    # A gain has a limit at 1 only, and the template's coordinates are 0.
    if all(parameter.prior or parameter.of for parameter in kind.declared().values()):
        limit_on_host(kind)


def is_named(layer: AbstractLayer) -> bool:
    """Whether files can name the layer: by its type, without parameters that the type does not need."""
    fields = (field for field in dataclasses.fields(layer) if "parameter" in field.metadata)
    needed = {field.name for field in fields if field.default is dataclasses.MISSING}
    return type(layer) is ARCHITECTURES.get(layer.architecture or "") and layer.declared().keys() == needed


def masked_as(kind: AbstractLayer, pattern: Pattern) -> AbstractLayer:
    """A template with an attention pattern, if it has attention."""
    return template(kind, pattern=pattern) if "pattern" in kind.sizes else kind


def sizes_in_words(layer: AbstractLayer) -> dict[str, str]:
    """Each size in words, such as "4 heads" or "no output projection"."""
    return {name: SIZES[name](value) for name, value in layer.sizes.items()}


def kind_in_words(layer: AbstractLayer) -> str:
    """The name, and the sizes that are not the default, such as "attention, 4 heads"."""
    words = sizes_in_words(layer)
    return ", ".join([layer.name, *(words[name] for name in own_sizes(layer))])


def call_of(layer: AbstractLayer) -> str:
    """The call that makes the template of a named layer."""
    sizes = (f"{name}={_literal(value)}" for name, value in own_sizes(layer).items())
    return f"si.layers.template({', '.join([repr(layer.name), *sizes])})"


def _literal(size: Any) -> str:
    """A size as a user writes it."""
    if size == CAUSAL:
        return "si.CAUSAL"
    return f"si.{size!r}" if isinstance(size, Pattern) else repr(size)


def attributes_of_layer(layer: AbstractLayer) -> dict[str, Any]:
    """Dataset attributes: the name, and the sizes that differ from their defaults, if files can name the layer."""
    if not is_named(layer):
        return {"architecture": layer.name}
    sizes = {name: float(value) for name, value in own_sizes(layer).items() if name != "pattern"}
    return {"architecture": layer.name, **sizes, **layer.pattern.attributes()}


def architecture_in(attributes: Mapping[Hashable, Any]) -> AbstractLayer | None:
    """The template of the layer that the attributes of a Dataset name; None if they name none."""
    name = attributes.get("architecture")
    if name is None:
        return None
    known = sizes_of(_type_named(str(name)))
    sizes: dict[str, Any] = {}
    for size in known.keys() & set(attributes):
        try:
            number = float(attributes[size])
        except (TypeError, ValueError) as error:
            raise InputError(f"{size}: a number is needed ({error})") from error
        sizes[size] = bool(number) if known[size].default is False else int(number) if number % 1 == 0 else number
    pattern = {"pattern": Pattern.in_attributes(attributes)} if "pattern" in known else {}
    return template(str(name), **sizes, **pattern)
