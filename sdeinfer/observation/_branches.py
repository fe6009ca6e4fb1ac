"""Observed residual branches as one xarray Dataset, and its validation.

A branch reads U of shape (m tokens, n features) and adds D of the same shape to the residual stream.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._matrix import covariance_fault
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.observation._arrays import as_array

BRANCH_DIMS = {
    "input": ("network", "branch", "token_a", "token_b"),
    "mean": ("network", "branch", "token_a"),
    "cross": ("network", "branch", "token_a", "token_b"),
    "increment": ("network", "branch", "token_a", "token_b"),
    "between": ("network", "branch", "other_branch", "token_a", "token_b"),
    "kurtosis": ("network", "branch"),
}
"""Dimensions of each variable of a Dataset of branches."""


@checked
def branches_dataset(
    *,
    input: ArrayLike,
    mean: ArrayLike,
    cross: ArrayLike,
    increment: ArrayLike,
    between: ArrayLike,
    kurtosis: ArrayLike,
    width: ArrayLike,
    kinds: Sequence[str],
    names: Sequence[str] | None = None,
    pattern: Pattern = EVERY_TOKEN,
    reads: str = "branch",
) -> xr.Dataset:
    """Label what was observed of residual branches, in the order in which the network applies them.

    Arguments:
        input: U Uᵀ/n, shape (networks, branches, tokens, tokens).
        mean: U 1/n, the mean over the features, shape (networks, branches, tokens).
        cross: U Dᵀ/n, shape as `input`.
        increment: S = D Dᵀ/n, shape as `input`.
        between: D_b D_cᵀ/n of branches b and c, shape (networks, branches, branches, tokens, tokens).
        kurtosis: the mean over the columns d of D of (dᵀ S⁻¹ d)²/(m(m + 2)), which is 1 for Gaussian features; shape
            (networks, branches).
        width: n, one number or one per network.
        kinds: the kind of each branch, as "attention" or "mlp".
        names: the name of each branch, as "h.0.attn"; None for its kind and number, as "attention.0".
        pattern: which tokens each token attends to.
        reads: "branch" if U is what the branch reads, "stream" if U is the residual stream before the branch.

    Returns:
        A valid Dataset with these variables in float64, the coordinates `width` on network, `kind` and `name` on
        branch, and the pattern and `reads` as attributes.

    Raises:
        InputError: for numbers of kinds or names other than that of the branches, and see `validate_branches`.
    """
    given = {"input": input, "mean": mean, "cross": cross, "increment": increment, "between": between}
    arrays = {name: as_array(values, name) for name, values in (given | {"kurtosis": kurtosis}).items()}
    for name, values in arrays.items():
        if values.ndim != len(BRANCH_DIMS[name]):
            raise InputError(f"{name}: dimensions {', '.join(BRANCH_DIMS[name])} are needed, got shape {values.shape}")
    networks, branches, tokens = arrays["mean"].shape
    sizes = {"network": networks, "branch": branches, "other_branch": branches, "token_a": tokens, "token_b": tokens}
    for name, values in arrays.items():
        needed = tuple(sizes[dim] for dim in BRANCH_DIMS[name])
        if values.shape != needed:
            raise InputError(f"{name}: shape {needed} is needed beside `mean`, got {values.shape}")
    names = [f"{kind}.{number}" for number, kind in enumerate(kinds)] if names is None else names
    for argument, labels in (("kinds", kinds), ("names", names)):
        if isinstance(labels, str) or len(labels) != branches:
            raise InputError(f"{argument}: one for each of {branches} branches is needed, got {labels!r}")
    if np.shape(width) not in ((), (networks,)):
        raise InputError(f"width: one number, or one for each of {networks} networks, is needed, got {np.shape(width)}")
    data = xr.Dataset(
        {name: (BRANCH_DIMS[name], values) for name, values in arrays.items()},
        coords={
            "network": np.arange(networks),
            "branch": np.arange(branches),
            "other_branch": np.arange(branches),
            "width": ("network", np.broadcast_to(np.asarray(width), networks).copy()),
            "kind": ("branch", np.asarray(kinds, str)),
            "name": ("branch", np.asarray(names, str)),
        },
        attrs=pattern.attributes() | {"reads": reads},
    )
    return validate_branches(data)


def validate_branches(data: xr.Dataset) -> xr.Dataset:
    """Check a Dataset of residual branches from any source, and put it in canonical order.

    Arguments:
        data: the Dataset of `branches_dataset`; the dimensions of its variables may come in any order.

    Returns:
        The Dataset in float64, with its dimensions in order.

    Raises:
        InputError: one line that says what is wrong and where: a variable or a coordinate that is missing, matrices
            that are not finite, symmetric and positive semi-definite, increments of linearly dependent tokens, and
            networks that were recorded twice.
    """
    data = _validate_labels(data)
    for number, network in enumerate(data["network"].values):
        branches = data.isel(network=number)
        names = [f"network {network}, branch {b} ({name})" for b, name in enumerate(branches["name"].values)]
        for variable, matrices in _covariances(branches):
            fault = covariance_fault(matrices)
            if fault is not None:
                raise InputError(f"{variable}: {names[fault[0][0]]}: {fault[1]}")
        for S, where in zip(branches["increment"].values, names, strict=True):
            require_regular(S, where)
        faulty = _between_fault(branches)
        if faulty.any():
            b, c = np.argwhere(faulty)[0]
            raise InputError(f"between: {names[b]}: disagrees with `increment`, or with its transpose at branch {c}")
        for kurtosis, where in zip(branches["kurtosis"].values, names, strict=True):
            if not 0 <= kurtosis < np.inf:
                raise InputError(f"kurtosis: {where}: a positive number is needed, got {kurtosis:g}")
    require_different_increments(data)
    return data


def require_reads(reads: Any) -> None:
    """Check the word for where U is seen: at a branch's input, after any norm before it, or in the residual stream."""
    if reads not in ("branch", "stream"):
        raise InputError(f"reads: one of branch, stream is needed, got {reads!r}")


def require_regular(S: Float[np.ndarray, "m m"], where: str) -> None:
    """Check that the increments of the tokens are linearly independent; no law has a density otherwise."""
    scale = np.sqrt(np.diagonal(S))
    if not scale.any():
        raise InputError(f"increment: {where}: is zero: its weights are zero, as if never initialised")
    if not scale.all():
        raise InputError(f"increment: {where}: token {int(np.argmin(scale))} gets no increment, which has no density")
    correlation = S / scale[:, None] / scale
    eigenvalues, vectors = np.linalg.eigh(correlation)
    if eigenvalues[0] <= 1e-12 * len(S):  # float32 leaves some 10⁻¹⁴ of tokens that are equal
        tokens = ", ".join(map(str, np.flatnonzero(np.abs(vectors[:, 0]) > 1e-3)))
        raise InputError(
            f"increment: {where}: tokens {tokens} get linearly dependent increments, as equal tokens or uniform "
            "attention do, which have no density: leave one of them out"
        )


def _validate_labels(data: xr.Dataset) -> xr.Dataset:
    """Check everything but the values of the variables."""
    if not isinstance(data, xr.Dataset):
        raise InputError(f"data: a Dataset of residual branches is needed, got {type(data).__name__}")
    for name, dims in BRANCH_DIMS.items():
        if name not in data:
            raise InputError(f"data: no variable `{name}`, only {sorted(map(str, data.data_vars)) or 'none'}")
        if sorted(map(str, data[name].dims)) != sorted(dims):
            raise InputError(f"{name}: needs dimensions {', '.join(dims)}, got {', '.join(map(str, data[name].dims))}")
        if not np.issubdtype(data[name].dtype, np.floating):
            raise InputError(f"{name}: real floating-point numbers are needed, got {data[name].dtype}")
    data = data.assign({name: data[name].transpose(*dims).astype(np.float64) for name, dims in BRANCH_DIMS.items()})
    for size in ("network", "branch", "token_a"):
        if data.sizes[size] < 1:
            raise InputError(f"data: no {size.removesuffix('_a')} in it")
    for row, column in (("token_a", "token_b"), ("branch", "other_branch")):
        if data.sizes[row] != data.sizes[column]:
            raise InputError(
                f"data: {row} and {column} must have one length, got {data.sizes[row]}, {data.sizes[column]}"
            )
    for name, dim in (("width", "network"), ("kind", "branch"), ("name", "branch"), ("network", "network")):
        if name not in data.coords or data[name].dims != (dim,):
            raise InputError(f"{name}: a coordinate on {dim} is needed")
    tokens, width = data.sizes["token_a"], data["width"].values
    if width.dtype.kind not in "iuf" or not np.isfinite(width).all() or (width < tokens).any() or (width % 1).any():
        raise InputError(f"width: whole numbers of at least {tokens}, the number of tokens, are needed, got {width}")
    require_reads(data.attrs.get("reads"))
    Pattern.in_attributes(data.attrs).mask(tokens)
    return data.assign_coords({name: ("branch", data[name].values.astype(str)) for name in ("kind", "name")})


def _covariances(branches: xr.Dataset) -> Iterator[tuple[str, Any]]:
    """The matrices of a network's branches that must be covariances, by the variable to blame."""
    U, mean, cross, S = (branches[name].values for name in ("input", "mean", "cross", "increment"))
    yield "input", U
    yield "increment", S
    yield "mean", U - mean[..., :, None] * mean[..., None, :]
    yield "cross", np.concatenate([np.concatenate([U, cross], -1), np.concatenate([cross.mT, S], -1)], -2)


def _between_fault(branches: xr.Dataset) -> Bool[np.ndarray, "branches branches"]:
    """Whether D_b D_cᵀ is the transpose of D_c D_bᵀ, and D_b D_bᵀ is `increment`."""
    between, S = branches["between"].values, branches["increment"].values
    scale = np.sqrt(np.trace(S, axis1=-2, axis2=-1))
    close = np.abs(between - between.swapaxes(0, 1).mT).max((-2, -1)) <= 1e-8 * scale[:, None] * scale
    diagonal = np.arange(len(S))
    close[diagonal, diagonal] &= np.abs(between[diagonal, diagonal] - S).max((-2, -1)) <= 1e-8 * scale**2
    return ~close


def require_different_increments(data: xr.Dataset) -> None:
    """Check that no two networks have the same increments, which those with weights of their own never have."""
    seen: dict[bytes, Any] = {}
    for network, S in zip(data["network"].values, data["increment"].values, strict=True):
        twin = seen.setdefault(S.tobytes(), network)
        if twin is not network:
            raise InputError(
                f"increment: networks {twin} and {network}: the same increments, so that one network was recorded "
                "twice; every network needs weights of its own"
            )
