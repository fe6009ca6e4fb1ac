"""Map a function over chunks of data and combine the results, in an order that depends on the chunks alone.

Dask runs the maps: on the current `distributed.Client`, or by the scheduler of Dask's configuration.

Sums of floating-point numbers depend on their order. Here it is that of a tree over the numbers of the chunks, so that
the result has the same bits for any number of workers, and after any of them was killed.
Tests: `tests/infer/test_chunks.py`.
"""

import uuid
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from sdeinfer._files import InputError, first_line

type Combine[T] = Callable[[T, T], T]


class Task[C, T]:
    """A function of a chunk, with the chunk; no dataclass, in which Dask would look for data to compute.

    Arguments:
        function: function of the chunk, importable on the workers.
        chunk: the chunk; it says where the data are, and holds none.
    """

    def __init__(self, function: Callable[[C], T], chunk: C):
        self.function, self.chunk, self.x64 = function, chunk, bool(jax.config.jax_enable_x64)

    def __call__(self) -> T:
        """Run the function in the precision of the process that made the task."""
        with jax.enable_x64(self.x64):
            return self.function(self.chunk)


def map_chunks[C, T](function: Callable[[C], T], chunks: Sequence[C], *, name: str) -> list[T]:
    """The results of a function for each chunk, which must be small."""
    return _computed(_delayed(name, [Task(function, chunk) for chunk in chunks]), name)


def reduce_chunks[C, T](function: Callable[[C], T], chunks: Sequence[C], combine: Combine[T], *, name: str) -> T:
    """The combined results of a function for each chunk; `combine` takes two results, in the order of the chunks."""
    from dask.delayed import delayed

    tasks = [Task(function, chunk) for chunk in chunks]
    (result,) = _computed([tree(_delayed(name, tasks), delayed(combine, pure=False))], name)
    return result


def added[T](first: T, second: T) -> T:
    """The sums of the leaves of two trees of arrays."""
    return jax.tree.map(np.add, first, second)


def tree[T](leaves: Sequence[T], combine: Combine[T]) -> T:
    """Combine neighbours, then neighbouring pairs, and so on."""
    while len(leaves) > 1:
        pairs = [combine(*leaves[i : i + 2]) for i in range(0, len(leaves) - 1, 2)]
        leaves = pairs if len(leaves) % 2 == 0 else [*pairs, leaves[-1]]
    return leaves[0]


def _delayed(name: str, tasks: Sequence[Task]) -> list[Any]:
    from dask.delayed import delayed

    run, pass_of = delayed(_run, pure=False), uuid.uuid4().hex
    return [run(task, dask_key_name=f"{name}-{pass_of}-{number}") for number, task in enumerate(tasks)]


def _run(task: Task) -> Any:
    return task()


def _computed(results: Sequence[Any], name: str) -> list[Any]:
    from dask.base import compute

    try:
        return list(compute(*results, optimize_graph=False))
    except Exception as error:
        if type(error).__name__ != "KilledWorker":
            raise
        raise InputError(
            f"{name}: one chunk killed several workers; give them more memory, or rechunk the data into "
            f"fewer networks each ({first_line(error)})"
        ) from error
