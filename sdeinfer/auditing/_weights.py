"""The weight matrices of residual branches by the names of their modules, and new ones in their place."""

import dataclasses
import fnmatch
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from sdeinfer._files import InputError
from sdeinfer.auditing._describe import Description, Library
from sdeinfer.auditing._find import children, module_at, modules
from sdeinfer.auditing._recipe import Matrix, Recipe, Role, roles_of
from sdeinfer.blocks._order import BlockOrder

type Roles = tuple[Role, ...]
"""The matrices that an array has, in the order of their outputs."""

NAMES: Mapping[str, Mapping[Roles, tuple[str, ...]]] = {
    "attention": {
        ("query",): ("q_proj", "query", "query_proj", "q_lin", "to_q", "wq", "q", "qkv.0"),
        ("key",): ("k_proj", "key", "key_proj", "k_lin", "to_k", "wk", "k", "qkv.1"),
        ("value",): ("v_proj", "value", "value_proj", "v_lin", "to_v", "wv", "v", "qkv.2"),
        ("query", "key", "value"): ("c_attn", "qkv_proj", "qkv", "in_proj", "Wqkv", "query_key_value"),
        ("attention output",): (
            *("o_proj", "out_proj", "output_proj", "c_proj", "dense", "out_lin", "out", "to_out", "wo"),
        ),
    },
    "mlp": {
        ("gate",): ("gate_proj", "gate", "w_gate"),
        ("gate", "up"): ("gate_up_proj",),
        ("up",): ("up_proj", "c_fc", "fc1", "linear1", "lin1", "dense_h_to_4h", "intermediate.dense", "up", "layers.0"),
        ("mlp output",): (
            *("down_proj", "c_proj", "fc2", "linear2", "lin2", "dense_4h_to_h", "output.dense", "down"),
            *("w_down", "layers.1"),
        ),
    },
}  # fmt: skip
"""Names of modules by the kind of their branch and their matrices."""


@dataclasses.dataclass(frozen=True)
class Weights:
    """An array of weights: the path of its module and its name there, its matrices, its layer and kind of branch."""

    path: str
    attribute: str
    roles: Roles
    layer: int
    kind: str

    @property
    def bias(self) -> str | None:
        """The name of the bias that is added after it; None if that of the array tells none."""
        name = self.attribute.replace("weight", "bias").replace("kernel", "bias")
        return None if name == self.attribute else name


def weights_of(network: Any, described: Description, roles: Mapping[str, Any] | None = None) -> list[Weights]:
    """The arrays of all branches, which have each matrix of their block once; `roles` are those of `initialise`."""
    paths, layers, found = {id(node): path for path, node in modules(network).items()}, {}, []
    needed = {block.branch.kind: roles_of(block) for block in BlockOrder.of(described.architecture, depth=1).blocks}
    _check_roles(roles or {}, paths.values())
    for kind, reader, writer in described.branches(network):
        if kind not in needed:
            raise InputError(f"model: {paths[id(reader)]} is of the kind {kind}, which the given blocks do not have")
        layer = layers[kind] = layers.get(kind, -1) + 1
        inside = dict.fromkeys(path for end in (reader, writer) for path in _inside(paths[id(end)], end))
        mine = [
            Weights(path, name, _roles(path, name, kind, roles or {}), layer, kind)
            for path in inside
            for name in _arrays(module_at(network, path))
        ]
        own = [role for each in mine for role in each.roles]
        for role in {*needed[kind], *own}:
            if own.count(role) != (role in needed[kind]):
                count = f"{own.count(role)} arrays for the {role}, where its block has {int(role in needed[kind])}"
                raise InputError(f"model: the {kind} branch at {paths[id(reader)]} has {count}")
        found += mine
    arrays = [getattr(module_at(network, each.path), each.attribute) for each in found]
    places = {id(array): each.path for array, each in zip(arrays, found, strict=True)}
    for array, each in zip(arrays, found, strict=True):
        if places[id(array)] != each.path:
            raise InputError(f"model: {each.path} and {places[id(array)]} are one array")
        if getattr(array, "is_meta", False):
            raise InputError(f"model: {each.path} is on the device 'meta': give it memory, as by model.to_empty()")
    return found


def _check_roles(roles: Mapping[str, Any], paths: Iterable[str]) -> None:
    for glob, given in roles.items():
        for role in (given,) if isinstance(given, str) else given:
            if role not in get_args(Role):
                raise InputError(f"roles: one of {', '.join(get_args(Role))} is needed for {glob!r}, got {role!r}")
        if not fnmatch.filter(paths, glob):
            raise InputError(f"roles: {glob!r} matches no module")


def width_of(network: Any, weights: Sequence[Weights]) -> int:
    """n: the number of inputs of a first matrix."""
    for each in weights:
        if not {"attention output", "mlp output"} & {*each.roles}:
            module = module_at(network, each.path)
            return int(getattr(module, each.attribute).shape[0 if _outputs_last(module, each) else -1])
    raise InputError("model: its branches have last matrices alone")


def filled(
    network: Any,
    described: Description,
    weights: Sequence[Weights],
    matrices: Mapping[str, Mapping[Role, Matrix]],
    recipes: Sequence[Recipe],
    *,
    heads: int,
    seed: int,
) -> Any:
    """The network with new weights: independent normals with the standard deviations of the recipes of layers.

    A network of PyTorch is changed in place, after all sizes are checked; of Flax and Equinox a new one is made.
    """
    # All sizes are checked before the first array is filled.
    sds = [_sds(network, each, matrices[each.kind], recipes[each.layer], heads) for each in weights]
    places: dict[Place, np.ndarray] = {}
    for each, (of_weights, of_bias) in zip(weights, sds, strict=True):
        places[each.path, each.attribute] = of_weights
        if each.bias is not None and getattr(module_at(network, each.path), each.bias, None) is not None:
            places[each.path, each.bias] = of_bias
        elif of_bias.any():
            raise InputError(f"model: {each.path} has no bias, where the recipe has one")

    def drawn() -> Iterator[tuple[Place, np.ndarray]]:
        for number, (place, sd) in enumerate(places.items()):
            rng = np.random.default_rng([seed, number])
            normals = rng.standard_normal(sd.shape, np.float32)
            normals *= sd
            yield place, normals.reshape(getattr(module_at(network, place[0]), place[1]).shape)

    return _replaced(network, described.library, drawn())


def _inside(path: str, module: Any) -> Iterator[str]:
    """The paths of a module and of all inside of it."""
    yield path
    for name, child in children(module):
        yield from _inside(f"{path}.{name}", child)


def _arrays(module: Any) -> list[str]:
    """Names of the arrays of a module that are matrices, or tensors that Flax makes of them."""
    if hasattr(module, "named_parameters"):
        named = module.named_parameters(recurse=False)
    else:
        named = getattr(module, "__dict__", {}).items()  # a list or dict of modules has none
    shaped = [name for name, value in named if len(getattr(value, "shape", ())) > 1 and not name.startswith("_")]
    return [name for name in shaped if "bias" not in name]  # Flax has biases of (heads, size)


def _roles(path: str, attribute: str, kind: str, given: Mapping[str, Any]) -> Roles:
    for glob, roles in given.items():
        if fnmatch.fnmatchcase(path, glob):
            return (roles,) if isinstance(roles, str) else tuple(roles)  # pyright: ignore[reportReturnType]
    whole = f".{path}.in_proj" if attribute == "in_proj_weight" else f".{path}"
    for roles, names in NAMES.get(kind, {}).items():
        if any(whole.endswith(f".{name}") for name in names):
            return roles
    raise InputError(f'model: what {path} is in its branch is not known; name it, as roles={{"{path}": "value"}}')


def _sds(
    network: Any, weights: Weights, matrices: Mapping[Role, Matrix], recipe: Recipe, heads: int
) -> tuple[Float[np.ndarray, "rows columns"], Float[np.ndarray, " outputs"]]:
    """Standard deviations of an array and of its bias, in the layout of the array."""
    own = [matrices[role] for role in weights.roles]
    module = module_at(network, weights.path)
    shape, inputs, sizes = getattr(module, weights.attribute).shape, own[0].fan_in, [each.fan_out for each in own]
    outputs = sum(sizes)
    if math.prod(shape) != inputs * outputs or shape[0] not in (inputs, outputs, heads):
        raise InputError(
            f"model: {weights.path} has the shape {tuple(shape)}, where its blocks have {inputs} inputs and {outputs} "
            "outputs"
        )
    of_weights, of_bias = ([f(each) for each in own] for f in (recipe.sd, recipe.bias_sd))
    if weights.path.endswith("query_key_value"):  # one head after the other
        if len(set(sizes)) > 1:
            raise InputError(f"model: the layout of {weights.path} is not known for keys of other sizes than queries")
        sizes = [size // heads for size in sizes]
        spread = [np.tile(np.repeat(sds, sizes), heads) for sds in (of_weights, of_bias)]
    else:
        spread = [np.repeat(sds, sizes) for sds in (of_weights, of_bias)]
    if _outputs_last(module, weights):
        return np.broadcast_to(spread[0], (inputs, outputs)), spread[1]
    return np.broadcast_to(spread[0][:, None], (outputs, inputs)), spread[1]


def _outputs_last(module: Any, weights: Weights) -> bool:
    """Whether outputs are the last axes, as in Flax and in Conv1D; in PyTorch and Equinox they are the first."""
    return weights.attribute == "kernel" or type(module).__name__ == "Conv1D"


type Place = tuple[str, str]
"""The path of a module, and the name of an array there."""


def _replaced(network: Any, library: Library, new: Iterable[tuple[Place, np.ndarray]]) -> Any:
    """The network with arrays in the places of others: of PyTorch the same object, of Flax and Equinox a new one."""
    if library == "equinox":
        arrays = dict(new)

        def places(tree: Any) -> list[Any]:
            return [getattr(module_at(tree, path), name) for path, name in arrays]

        pairs = zip(places(network), arrays.values(), strict=True)
        return eqx.tree_at(places, network, [jnp.asarray(array, old.dtype) for old, array in pairs])
    if library == "flax":
        network = sys.modules["flax.nnx"].clone(network)
    for (path, name), array in new:
        old = getattr(module_at(network, path), name)
        if library == "flax":
            old[...] = array.astype(old.dtype)
        else:
            old.data.copy_(sys.modules["torch"].from_numpy(array))
    return network
