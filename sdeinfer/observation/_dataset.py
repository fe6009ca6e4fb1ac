"""Observed covariances, outputs and tokens as xarray Datasets, and their validation."""

from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import xarray as xr
from jaxtyping import Int
from numpy.typing import ArrayLike

from sdeinfer._arguments import checked, shown
from sdeinfer._files import InputError
from sdeinfer.layers import AbstractLayer, template
from sdeinfer.layers._templates import attributes_of_layer
from sdeinfer.observation._arrays import as_array, in_order, labels_of_networks
from sdeinfer.observation._doubts import first_fault, labels_of, last_marks, require_different

DIMS = ("network", "layer", "token_a", "token_b")

INCOMPLETE = "incomplete"
"""Attribute of a Dataset that lacks tokens to which its tokens would attend, if the layers had attention."""

TOKENS = "tokens"
"""Attribute of a Dataset: its number of tokens, which tells one that was cut by other means than `take`."""

SHORTCUT = "shortcut"
"""Coordinate over networks and layers of observed hidden states: ⟨X_ℓ, X_ℓ₋₁⟩/⟨X_ℓ₋₁, X_ℓ₋₁⟩, on average λ^k for a
layer of k residual branches; NaN at the first layer. Data in chunks (Dask) have none."""

OUTPUTS = "outputs"
"""Attribute that holds q, in a Dataset whose last covariances are sample covariances of q outputs."""

TOKEN_DIMS = ("network", "layer", "token", "component")


@checked
def covariance_dataset(
    covariance: ArrayLike,
    *,
    width: ArrayLike,
    layers: ArrayLike | None = None,
    architecture: str | AbstractLayer | None = None,
    truth: Mapping[str, float] | None = None,
) -> xr.Dataset:
    """Label observed covariances.

    Arguments:
        covariance: V of every network after every observed layer, shape (networks, layers, tokens, tokens). An
            xarray.DataArray may have its dimensions in any order, and brings its numbers of layers and its labels.
        width: n, one number or one per network.
        layers: numbers of the observed layers; None for 0, 1, 2, ….
        architecture: the name of the architecture, or a layer whose parameters do not matter, if known.
        truth: the networks' true parameters, if known.

    Returns:
        A valid Dataset with the variable `covariance` over network, layer, token_a, token_b; `layer` holds the layer
        numbers, `width` is a coordinate on network, and the attributes hold the number of `tokens`, `architecture`, its
        sizes that are not 1 and `truth_<name>`.

    Raises:
        InputError: for another number of widths or layers, and see `validate`.
    """
    labels = labels_of_networks(covariance)
    if isinstance(covariance, xr.DataArray):
        layers = covariance["layer"].values if layers is None and "layer" in covariance.coords else layers
        covariance = in_order(covariance, DIMS, "covariance")
    V = as_array(covariance, "covariance")
    if V.ndim != 4:
        hint = ": of one network give covariance[None]" if V.ndim == 3 else ""
        raise InputError(f"covariance: shape (networks, layers, tokens, tokens) is needed, got {V.shape}{hint}")
    if np.shape(width) not in ((), V.shape[:1]):
        raise InputError(f"width: one number, or one for each of {V.shape[0]} networks, is needed, got {shown(width)}")
    if layers is not None and np.shape(layers) != V.shape[1:2]:
        raise InputError(f"layers: one number for each of {V.shape[1]} layers is needed, got {shown(layers)}")
    data = xr.Dataset(
        {"covariance": (DIMS, V)},
        coords={
            "network": np.arange(V.shape[0]),
            "layer": np.arange(V.shape[1]) if layers is None else np.asarray(layers),
            "width": ("network", np.broadcast_to(np.asarray(width), V.shape[:1]).copy()),
        },
        attrs={TOKENS: V.shape[-1]} | ({} if architecture is None else attributes_of_layer(template(architecture))),
    )
    known = truth_of({f"truth_{name}": value for name, value in (truth or {}).items()})
    data.attrs.update({f"truth_{name}": value for name, value in known.items()})
    return validate(data.assign_coords(labels))


def truth_of(attrs: Mapping[Hashable, Any]) -> dict[str, float]:
    """The networks' true parameters from the attributes of data or of a fit; empty if unknown."""
    truth = {}
    for name, value in attrs.items():
        if str(name).startswith("truth_"):
            number = np.asarray(value)
            if number.size != 1 or number.dtype.kind not in "biuf":
                raise InputError(f"{name}: a number is needed, got {value!r}")
            truth[str(name).removeprefix("truth_")] = float(number.item())
    return truth


def validate(data: xr.Dataset) -> xr.Dataset:
    """Check a Dataset of covariances from any source, and put it in canonical order.

    Layers and networks that were recorded twice are refused: they would count as further data.

    Arguments:
        data: a Dataset with the variable `covariance`; its dimensions may come in any order. Where Dask backs it, the
            covariances are read into memory.

    Returns:
        The Dataset with the dimensions in order (network, layer, token_a, token_b).

    Raises:
        InputError: one line that says what is wrong and where.
    """
    data = validate_labels(data).compute()
    V = data["covariance"].values
    fault = first_fault(V)
    if fault is not None:
        network, layer, reason = fault
        raise InputError(
            f"covariance: network {labels_of(data)[network]}, layer {data['layer'].values[layer]}: {reason}"
        )
    require_different(last_marks(V), labels_of(data))
    return data


def validate_labels(data: xr.Dataset) -> xr.Dataset:
    """As `validate`, without the values of the covariances, which are not read."""
    if not isinstance(data, xr.Dataset):
        raise InputError(
            f"data: a Dataset of covariances is needed, got {type(data).__name__}; sdeinfer.observe makes one of "
            "hidden states"
        )
    if "covariance" not in data:
        raise InputError(f"data: no variable `covariance`, only {sorted(map(str, data.data_vars)) or 'none'}")
    dims = tuple(map(str, data["covariance"].dims))
    if sorted(dims) != sorted(DIMS):
        raise InputError(f"covariance: needs dimensions {', '.join(DIMS)}, got {', '.join(dims)}")
    data = data.transpose(*DIMS, ...)
    V = data["covariance"]
    if not np.issubdtype(V.dtype, np.floating):
        raise InputError(f"covariance: real floating-point numbers are needed, got {V.dtype}")
    if V.shape[2] < 1:
        raise InputError("covariance: no token in the data")
    if V.shape[2] != V.shape[3]:
        raise InputError(f"covariance: token_a and token_b must have one length, got {V.shape[2]} and {V.shape[3]}")
    if V.shape[0] < 1:
        raise InputError("covariance: no network in the data")
    if V.shape[1] < 2:
        raise InputError(f"covariance: at least 2 layers are needed to see a transition, got {V.shape[1]}")
    if V.chunks is not None:
        data = data.drop_vars(SHORTCUT, errors="ignore")
    _validate_layers(data)
    data = _with_width_of_each_network(data)
    truth_of(data.attrs)
    return data


def _validate_layers(data: xr.Dataset) -> None:
    if "layer" not in data.coords:
        raise InputError("layer: a coordinate with the numbers of the observed layers is needed")
    layers = data["layer"].values
    if layers.dtype.kind not in "iuf" or not np.isfinite(layers).all() or (layers % 1 != 0).any():
        raise InputError("layer: layer numbers must be whole numbers")
    if layers[0] < 0 or (np.diff(layers) <= 0).any():
        raise InputError("layer: layer numbers must start at 0 or later and increase")


def _with_width_of_each_network(data: xr.Dataset) -> xr.Dataset:
    if "width" not in data.coords:
        raise InputError("width: a coordinate on network with each network's width is needed")
    width = data["width"]
    if width.dims not in ((), ("network",)):
        raise InputError(f"width: must be one number per network, got dimensions {', '.join(map(str, width.dims))}")
    if width.dtype.kind not in "iuf" or not (np.isfinite(width.values) & (width.values >= 1)).all():
        raise InputError("width: every width must be at least 1")
    if (width.values < data.sizes["token_a"]).any():
        raise InputError(
            f"width: must be at least the number of tokens, {data.sizes['token_a']}, got {width.values.min():g}: "
            "the covariances are singular"
        )
    return data.assign_coords(width=("network", np.broadcast_to(width.values, data.sizes["network"]).copy()))


@checked
def observe_outputs(
    outputs: ArrayLike,
    initial: ArrayLike,
    *,
    width: ArrayLike,
    depth: int,
    architecture: str | AbstractLayer | None = None,
    truth: Mapping[str, float] | None = None,
) -> xr.Dataset:
    """Reduce outputs X_out ~ N(0, V_T ⊗ I_q) (Eq. 21) to their sample covariance, which is sufficient for V_T.

    Arguments:
        outputs: X_out of every network, shape (networks, tokens, q).
        initial: covariance of the initial tokens, shape (tokens, tokens), or (networks, tokens, tokens).
        width: n, one number or one per network.
        depth: d, the number of layers before the outputs.
        architecture: the architecture or its name, if known.
        truth: the networks' true parameters, if known.

    Returns:
        A Dataset of two layers: 0 with the initial covariance, and d with X_out X_outᵀ/q; its attribute `outputs` is q.

    Raises:
        InputError: for arrays of other shapes, outputs that are not finite, and an `initial` that is not a covariance.
    """
    X = as_array(outputs, "outputs").astype(np.float64)
    V0 = as_array(initial, "initial").astype(np.float64)
    if X.ndim != 3 or 0 in X.shape:
        raise InputError(f"outputs: shape (networks, tokens, outputs) is needed, got {X.shape}")
    if not np.isfinite(X).all():
        raise InputError(f"outputs: {np.count_nonzero(~np.isfinite(X))} entries are NaN or infinite")
    shape = (*X.shape[:2], X.shape[1])
    if V0.shape not in (shape, shape[1:]):
        raise InputError(f"initial: shape {shape} or {shape[1:]} is needed, got {V0.shape}")
    S = X @ np.swapaxes(X, -1, -2) / X.shape[-1]
    covariance = np.stack([np.broadcast_to(V0, shape), S], axis=1)
    data = covariance_dataset(
        covariance, width=width, layers=np.array([0, depth]), architecture=architecture, truth=truth
    )
    return data.assign_attrs({OUTPUTS: X.shape[-1]})


def outputs_of(data: xr.Dataset | Mapping[Hashable, object]) -> int:
    """The number of outputs per network, from a Dataset or its attributes; 0 if covariances were observed directly."""
    attrs = data.attrs if isinstance(data, xr.Dataset) else data
    count = attrs.get(OUTPUTS, 0)
    if not isinstance(count, int | np.integer) or (OUTPUTS in attrs and count < 1):
        raise InputError(f"outputs: a positive whole number is needed, got {count!r}")
    return int(count)


def validate_tokens(data: xr.Dataset) -> xr.Dataset:
    """Check a Dataset of observed tokens from any source, and put it in canonical order.

    Raises:
        InputError: one line that says what is wrong and where: other dimensions or types, fewer than two layers, tokens
            that are not on the unit sphere, and numbers of layers that do not increase.
    """
    if "tokens" not in data or set(data["tokens"].dims) != set(TOKEN_DIMS):
        raise InputError(f"data: a Dataset with `tokens` over {', '.join(TOKEN_DIMS)} is needed, see tokens_dataset")
    data = data.transpose(*TOKEN_DIMS, ...)
    x = data["tokens"].values
    if not np.issubdtype(x.dtype, np.floating):
        raise InputError(f"tokens: real floating-point numbers are needed, got {x.dtype}")
    if 0 in x.shape or x.shape[1] < 2:
        raise InputError(f"tokens: a network, two layers and a token are needed at least, got shape {x.shape}")
    off = ~(np.abs(np.linalg.norm(x, axis=-1) - 1) <= np.finfo(x.dtype).eps ** 0.5)
    if off.any():
        place = ", ".join(f"{name} {number}" for name, number in zip(TOKEN_DIMS[:-1], np.argwhere(off)[0], strict=True))
        raise InputError(f"tokens: {place} is not on the unit sphere: tokens_dataset scales them")
    if "layer" in data.coords and not (np.diff(data["layer"].values) > 0).all():
        raise InputError(f"layer: increasing numbers are needed, got {data['layer'].values.tolist()}")
    return data


class Groups(NamedTuple):
    """The partition of networks into groups."""

    labels: np.ndarray
    group: Int[np.ndarray, " networks"]

    def __len__(self) -> int:
        return len(self.labels)

    def members(self, number: int) -> Int[np.ndarray, " members"]:
        """The indices of a group's networks."""
        return np.flatnonzero(self.group == number)


def groups_of(data: xr.Dataset) -> Groups:
    """The groups of networks that the coordinate `group` of a Dataset defines."""
    if "group" not in data.coords:
        raise InputError("group: a coordinate on network with the label of each network's group is needed")
    coordinate = data["group"]
    if coordinate.dims != ("network",):
        dims = ", ".join(map(str, coordinate.dims)) or "none"
        raise InputError(f"group: must be one label per network, got dimensions {dims}")
    group, labels = pd.factorize(coordinate.values)
    if (group < 0).any():
        raise InputError(f"group: network {labels_of(data)[np.argmin(group)]} has no label")
    if len(labels) < 2:
        raise InputError(f"group: at least 2 groups are needed, got {labels[0]!s} alone; use models.full_path")
    return Groups(np.array(list(labels)), group)
