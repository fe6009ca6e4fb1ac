"""Checkpoints: the progress of a fit, saved after every chunk, from which an interrupted fit resumes."""

import dataclasses
import hashlib
import importlib.metadata
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, PyTree

from sdeinfer._files import InputError, first_line, staged_file


class Progress(NamedTuple):
    """Progress of a sampler.

    Attributes:
        iterations: number of completed iterations, including warmup.
        state: state of the sampler, any pytree of arrays and keys.
        chunks: kept draws of each chunk: arrays with leading axes (chain, draw) by group and name.
    """

    iterations: int
    state: PyTree
    chunks: tuple[dict[str, dict[str, Any]], ...]

    @property
    def draws(self) -> dict[str, dict[str, Any]]:
        """All kept draws, concatenated; empty if there are none."""
        if not self.chunks:
            return {}
        return jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *self.chunks)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A file with the sampler's state and the draws kept so far.

    Arrays are stored exactly, so a resumed fit gives the same draws as an uninterrupted one.

    Attributes:
        path: path of the file.
        resume: resume from the file if it exists; otherwise start anew and overwrite it.
    """

    path: str | Path
    resume: bool = False

    @property
    def file(self) -> Path:
        """The path as a `pathlib.Path`."""
        return Path(self.path)

    def for_limit(self) -> "Checkpoint":
        """The checkpoint of the second sampler in a fit by both laws."""
        return Checkpoint(self.file.with_name(f"{self.file.name}-limit"), self.resume)

    def load(self, fingerprint: str, start: PyTree) -> Progress:
        """Read the progress; return the initial progress if there is no file to resume from.

        Arguments:
            fingerprint: fingerprint of the fit to resume.
            start: initial state of the sampler.

        Raises:
            InputError: for a file that is not a checkpoint, or the checkpoint of another fit.
        """
        if not self.resume or not self.file.exists():
            return Progress(0, start, ())
        try:
            with np.load(self.file, allow_pickle=False) as file:
                saved = dict(file)
            found, iterations = str(saved.pop("fingerprint")), int(saved.pop("iterations"))
        except (OSError, ValueError, TypeError, KeyError, EOFError, BadZipFile) as error:
            raise InputError(f"{self.path}: cannot be read as a checkpoint ({first_line(error)})") from error
        if found != fingerprint:
            raise InputError(
                f"{self.path}: is the checkpoint of another fit (other data, settings, seed, versions or machine); "
                "start anew without resuming"
            )
        leaves, tree = jax.tree.flatten(start)
        state = [_as_leaf(saved.pop(f"state/{i}"), leaf) for i, leaf in enumerate(leaves)]
        draws: dict[str, dict[str, Any]] = {}
        for place, array in saved.items():
            _, group, name = place.split("/", 2)
            draws.setdefault(group, {})[name] = array
        return Progress(iterations, jax.tree.unflatten(tree, state), (draws,) if draws else ())

    def save(self, fingerprint: str, progress: Progress) -> None:
        """Overwrite the file atomically."""
        arrays = {"fingerprint": np.array(fingerprint), "iterations": np.array(progress.iterations)}
        arrays |= {f"state/{i}": _as_array(leaf) for i, leaf in enumerate(jax.tree.leaves(progress.state))}
        for group, values in progress.draws.items():
            arrays |= {f"draws/{group}/{name}": value for name, value in values.items()}
        with staged_file(self.file) as temporary, temporary.open("wb") as file:
            np.savez(file, **arrays)  # pyright: ignore[reportArgumentType]

    def remove(self) -> None:
        """Remove the files, if they exist: the fit is complete and saved, or starts anew."""
        for checkpoint in (self, self.for_limit()):
            checkpoint.file.unlink(missing_ok=True)


def fingerprint(*parts: Any) -> str:
    """Hash of the values on which a fit's draws depend: arrays by their bytes, other values by their `repr`."""
    digest = hashlib.sha256()
    versions = [importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpyro", "sdeinfer")]
    for leaf in [str(jax.tree.structure(parts)), jax.default_backend(), *versions, *jax.tree.leaves(parts)]:
        array = _as_array(leaf) if isinstance(leaf, jax.Array | np.ndarray) else None
        text = repr(leaf) if array is None else f"{array.dtype}{array.shape}"
        content = text.encode() + (b"" if array is None else array.tobytes())
        digest.update(f"{len(content)}:".encode() + content)
    return digest.hexdigest()


def _is_key(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _as_array(leaf: Any) -> np.ndarray:
    return np.asarray(jr.key_data(leaf) if _is_key(leaf) else leaf)


def _as_leaf(array: np.ndarray, like: Any) -> Array | np.ndarray:
    if _is_key(like):
        return jr.wrap_key_data(jnp.asarray(array), impl=jr.key_impl(like))
    return jnp.asarray(array) if isinstance(like, jax.Array) else array
