"""Residual branches reduced to covariances while networks run, one branch at a time.

Tests: `tests/observation/test_branches.py`.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import xarray as xr

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer.covariance import Pattern
from sdeinfer.covariance._pattern import EVERY_TOKEN
from sdeinfer.observation._branches import (
    branches_dataset,
    require_different_increments,
    require_reads,
    require_regular,
)
from sdeinfer.observation._doubts import spacing_of
from sdeinfer.observation._observer import TokenReader


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
        require_reads(reads)
        self.reads = reads
        self.network = network
        self._reader = TokenReader(width=width, tokens=tokens, pattern=pattern)
        self._labels: list[tuple[str, str]] = []
        self._increments: list[np.ndarray] = []
        self._moments: list[dict[str, Any]] = []

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
        number = len(self._moments)
        name = f"{kind}.{number}" if name is None else name
        where = f"network {self.network}, branch {number} ({name})"
        U, D = self._read(input, f"input: {where}"), self._read(increment, f"increment: {where}")
        tokens, n = D.shape
        S = D @ D.T / n
        require_regular(S, where)
        norms = np.sum(D * np.linalg.solve(S, D), axis=0)
        self._increments.append(D)
        self._moments.append(
            {
                "input": U @ U.T / n,
                "mean": U.mean(axis=1),
                "cross": U @ D.T / n,
                "increment": S,
                "between": [D @ earlier.T / n for earlier in self._increments],
                "kurtosis": np.mean(norms**2) / (tokens * (tokens + 2)),
            }
        )
        self._labels.append((kind, name))

    def dataset(self) -> xr.Dataset:
        """The branches so far, as the Dataset of `branches_dataset`.

        Raises:
            InputError: without a branch, and see `validate_branches`.
        """
        if not self._moments:
            raise InputError("branches: no branch was given")
        names = ("input", "mean", "cross", "increment", "kurtosis")
        stacked = {name: np.stack([moments[name] for moments in self._moments])[None] for name in names}
        between = np.empty((len(self._moments), *stacked["increment"].shape[1:]))
        for b, moments in enumerate(self._moments):
            for c, matrix in enumerate(moments["between"]):
                between[b, c], between[c, b] = matrix, matrix.T
        kinds, names = zip(*self._labels, strict=True)
        labels = {"kinds": kinds, "names": names, "reads": self.reads, "width": np.array(self._reader.width)}
        data = branches_dataset(**stacked, between=between[None], **labels)
        return data.assign_coords(network=[self.network]).assign_attrs(self._reader.attributes)

    def _read(self, values: Any, where: str) -> np.ndarray:
        """The observed tokens of U or D, checked, in float64."""
        X = self._reader.read(values, where)
        if spacing_of(X.dtype) > 0:
            raise InputError(f"{where}: {X.dtype} rounds the sums inside the branch: run the network in float32")
        if not np.isfinite(X).all():
            raise InputError(f"{where}: {np.count_nonzero(~np.isfinite(X))} entries are NaN or infinite")
        return X.astype(np.float64)


def joined_branches(parts: Iterable[BranchObserver | xr.Dataset]) -> xr.Dataset:
    """Join several networks, each observed by a `BranchObserver`.

    Arguments:
        parts: the observer, or its Dataset, of each network; the networks are numbered in their order.

    Returns:
        The Dataset of `branches_dataset`.

    Raises:
        InputError: for networks that differ in branches, tokens or prompts, and as `validate_branches`.
    """
    datasets = [part.dataset() if isinstance(part, BranchObserver) else part for part in parts]
    if not datasets:
        raise InputError("branches: no network was given")
    labels = [
        {
            "branches": part["name"].values.tolist(),
            "kinds": part["kind"].values.tolist(),
            "tokens": part.sizes["token_a"],
            "attributes": part.attrs,
        }
        for part in datasets
    ]
    for place, network_labels in enumerate(labels):
        for name, label in network_labels.items():
            if label != labels[0][name]:
                raise InputError(f"branches: network {place} has {name} {label}, where network 0 has {labels[0][name]}")
    data = xr.concat(datasets, "network", data_vars="minimal", coords="minimal", compat="override", join="override")
    data = data.assign_coords(network=np.arange(len(datasets)))
    require_different_increments(data)
    return data
