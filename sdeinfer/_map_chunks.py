"""Map a function over chunks of data by Dask: on the current `distributed.Client`, or by its configured scheduler.

Tests: `tests/infer/test_chunks.py`.
"""

import uuid
from collections.abc import Callable, Sequence
from functools import partial

import jax

from sdeinfer._files import InputError, first_line


def map_chunks[C, T](function: Callable[[C], T], chunks: Sequence[C], *, name: str) -> list[T]:
    """The results of a function for each chunk, in order, which must be small; in the precision of this process.

    Arguments:
        function: function of a chunk, importable on the workers.
        chunks: they say where the data are, and hold none.
        name: of the tasks, as in Dask's dashboard.
    """
    from dask.base import compute
    from dask.delayed import delayed

    run, pass_of = partial(_in_precision, bool(jax.config.jax_enable_x64), function), uuid.uuid4().hex
    # A chunk is part of its function: in an argument, Dask would look for data to compute.
    tasks = [
        delayed(partial(run, chunk), pure=False)(dask_key_name=f"{name}-{pass_of}-{number}")
        for number, chunk in enumerate(chunks)
    ]
    try:
        return list(compute(*tasks))
    except Exception as error:
        if type(error).__name__ != "KilledWorker":
            raise
        raise InputError(
            f"{name}: one chunk killed several workers; give them more memory, or rechunk the data into "
            f"fewer networks each ({first_line(error)})"
        ) from error


def _in_precision[C, T](x64: bool, function: Callable[[C], T], chunk: C) -> T:  # noqa: FBT001
    with jax.enable_x64(x64):
        return function(chunk)
