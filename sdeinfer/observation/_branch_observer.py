"""Reduce what residual branches read and add to covariances, one branch at a time."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Float

from sdeinfer._arguments import at_least_one, checked, given
from sdeinfer._files import InputError
from sdeinfer.covariance import EVERY_TOKEN, Pattern
from sdeinfer.observation._arrays import as_array
from sdeinfer.observation._branches import READS, branches_dataset, require_different, require_regular
from sdeinfer.observation._choice import choose
from sdeinfer.observation._precision import spacing_of


class BranchObserver:
    """An accumulator of one network's residual branches: `add` each in order, then take the `dataset`.

    Of a branch that reads U and adds D it keeps covariances and D, both in float64; `between` needs D.

    Arguments:
        width: n, the number of features, to be checked; None for any.
        tokens: the tokens of each prompt to observe, as indices, a mask or a slice; None for all.
        pattern: which tokens each token attends to, before a choice; the prompts of a dimension of prompts are added.
        reads: "branch" if U is what the branch reads, "stream" if U is the residual stream before it.
        network: number of the network.

    Raises:
        InputError: for a width below 1, and another word for what was read.
    """

    @checked
    def __init__(
        self,
        width: int | None = None,
        *,
        tokens: Any = None,
        pattern: Pattern = EVERY_TOKEN,
        reads: str = "branch",
        network: int = 0,
    ):
        at_least_one(**given(width=width))
        if reads not in READS:
            raise InputError(f"reads: one of {', '.join(READS)} is needed, got {reads!r}")
        self.width = width
        self.reads = reads
        self.network = network
        self.kinds: list[str] = []
        self.names: list[str] = []
        self.attributes: dict[str, Any] = {}
        self._choice = {"tokens": tokens, "pattern": pattern}
        self._shape: tuple[int, ...] = ()
        self._observed = np.zeros(0, int)
        self._increments: list[np.ndarray] = []
        self._found: list[dict[str, Any]] = []

    def add(self, input: Any, increment: Any, *, kind: str, name: str | None = None) -> None:
        """Reduce the next branch.

        Arguments:
            input: U, shape (tokens, width) or (prompts, tokens, width), of any library that `observe` reads.
            increment: D, of the same shape.
            kind: the kind of the branch, as "attention" or "mlp".
            name: its name, as "h.0.attn"; None for its kind and number.

        Raises:
            InputError: for shapes that differ, fewer features than tokens, numbers that are not finite, half precision,
                and increments of linearly dependent tokens.
        """
        number = len(self._found)
        name = f"{kind}.{number}" if name is None else name
        where = f"network {self.network}, branch {number} ({name})"
        U, D = self._read(input, f"input: {where}"), self._read(increment, f"increment: {where}")
        tokens, n = D.shape
        S = D @ D.T / n
        require_regular(S, where)
        norms = np.sum(D * np.linalg.solve(S, D), axis=0)
        self._increments.append(D)
        self._found.append(
            {
                "input": U @ U.T / n,
                "mean": U.mean(axis=1),
                "cross": U @ D.T / n,
                "increment": S,
                "between": [D @ earlier.T / n for earlier in self._increments],
                "kurtosis": np.mean(norms**2) / (tokens * (tokens + 2)),
            }
        )
        self.kinds.append(kind)
        self.names.append(name)

    def dataset(self) -> xr.Dataset:
        """The branches so far, as the Dataset of `branches_dataset`.

        Raises:
            InputError: without a branch, and see `validate_branches`.
        """
        if not self._found:
            raise InputError("branches: no branch was given")
        names = ("input", "mean", "cross", "increment", "kurtosis")
        stacked = {name: np.stack([each[name] for each in self._found])[None] for name in names}
        between = np.empty((len(self._found), *stacked["increment"].shape[1:]))
        for b, each in enumerate(self._found):
            for c, matrix in enumerate(each["between"]):
                between[b, c], between[c, b] = matrix, matrix.T
        labels = {"kinds": self.kinds, "names": self.names, "reads": self.reads}
        data = branches_dataset(**stacked, between=between[None], width=np.array(self.width), **labels)
        return data.assign_coords(network=[self.network]).assign_attrs(self.attributes)

    def _read(self, values: Any, where: str) -> Float[np.ndarray, "m n"]:
        """The observed tokens of U or D, checked, in float64."""
        X = as_array(values, where)
        if spacing_of(X.dtype) > 0:
            raise InputError(f"{where}: {X.dtype} rounds the sums inside the branch: run the network in float32")
        if not self._shape:
            self._start(X.shape, where)
        if X.shape == (math.prod(self._shape[:-1]), self._shape[-1]):
            X = X.reshape(self._shape)  # OPT joins the dimensions of prompts and tokens before its MLP
        if X.shape != self._shape:
            raise InputError(f"{where}: has shape {X.shape}, where the first branch reads {self._shape}")
        X = X.reshape(-1, X.shape[-1])[self._observed].astype(np.float64)
        if not np.isfinite(X).all():
            raise InputError(f"{where}: {np.count_nonzero(~np.isfinite(X))} entries are NaN or infinite")
        return X

    def _start(self, shape: tuple[int, ...], where: str) -> None:
        """Find the observed tokens and their pattern from the shape of the first input."""
        if len(shape) not in (2, 3) or 0 in shape:
            raise InputError(f"{where}: shape (tokens, width) or (prompts, tokens, width) is needed, got {shape}")
        if self.width not in (None, shape[-1]):
            raise InputError(f"width: {where} has {shape[-1]} features, got width {self.width}")
        self._observed, self.attributes = choose(1 if len(shape) == 2 else shape[0], shape[-2], **self._choice)
        if shape[-1] < len(self._observed):
            raise InputError(
                f"{where}: {shape[-1]} features for {len(self._observed)} tokens make the covariances singular: "
                f"observe at most {shape[-1]} tokens, or wider networks"
            )
        self.width, self._shape = shape[-1], shape


def joined_branches(observers: Sequence[BranchObserver]) -> xr.Dataset:
    """Join several networks, each observed by a `BranchObserver`.

    Arguments:
        observers: one per network; the networks are numbered in their order.

    Returns:
        The Dataset of `branches_dataset`.

    Raises:
        InputError: for networks that differ in branches, tokens or prompts, and as `validate_branches`.
    """
    return joined_networks(each.dataset() for each in observers)


def joined_networks(parts: Iterable[xr.Dataset]) -> xr.Dataset:
    """As `joined_branches`, from the Dataset of each network, of which none is kept alive but its covariances."""
    parts = list(parts)
    if not parts:
        raise InputError("branches: no network was given")
    first = _labels(parts[0])
    for number, part in enumerate(parts):
        for what, label in _labels(part).items():
            if label != first[what]:
                raise InputError(f"branches: network {number} has {what} {label}, where network 0 has {first[what]}")
    data = xr.concat(parts, "network", data_vars="minimal", coords="minimal", compat="override", join="override")
    data = data.assign_coords(network=np.arange(len(parts)))
    require_different(data)
    return data


def _labels(part: xr.Dataset) -> dict[str, Any]:
    """Labels that all networks of a Dataset share."""
    names = {"branches": part["name"].values.tolist(), "kinds": part["kind"].values.tolist()}
    return names | {"tokens": part.sizes["token_a"], "attributes": part.attrs}
