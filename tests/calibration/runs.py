"""Studies of many data sets in parallel processes, which go on where they were stopped; and their seeds.

Seeds below `HELD_OUT` are for development: rules may be chosen while looking at them. The others are held out
(`--held-out`): they are used once a release, for the figures that are published.
"""

import concurrent.futures
import hashlib
import json
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import sdeinfer as si

HELD_OUT = 2_000_000
"""The first seed that is held out."""


def run_all(judge: Callable[..., dict[str, Any]], cases: Sequence[tuple], folder: Path) -> list[dict[str, Any]]:
    """What `judge` says of every case, in the order of the cases; defects fail at the end.

    Arguments:
        judge: a function of a module that processes can import, from the elements of a case to what JSON can hold.
        cases: the cases, of strings and numbers.
        folder: keeps each result, by this source code; what it has is not run again.
    """
    file = folder / f"{judge.__module__}-{_source_hash()}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    done, defects = {tuple(case): found for case, found in map(json.loads, lines)}, []
    os.environ["JAX_ENABLE_X64"] = "1"  # for the processes, before they import JAX
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    context, workers = multiprocessing.get_context("spawn"), len(os.sched_getaffinity(0))
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool, file.open("a") as kept:
        left = {pool.submit(judge, *case): case for case in cases if case not in done}
        for future in concurrent.futures.as_completed(left):
            if future.exception() is not None:
                defects.append((left[future], "".join(traceback.format_exception(future.exception()))))
                continue
            done[left[future]] = future.result()
            print(json.dumps((left[future], future.result())), file=kept, flush=True)
    assert not defects, "\n".join(f"{case}: {text}" for case, text in defects)
    return [done[case] for case in cases]


def _source_hash() -> str:
    files = [*sorted(Path(si.__file__).parent.rglob("*.py")), *sorted(Path(__file__).parent.glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
