"""The order in which results of chunks are combined."""

import random
import time

import dask
import pytest

from sdeinfer._map_reduce import map_chunks, reduce_chunks, tree


def named(chunk: int) -> str:
    time.sleep(random.Random(chunk).random() / 200)  # threads end in another order
    return str(chunk)


def paired(one: str, other: str) -> str:
    return f"({one}{other})"


@pytest.mark.parametrize(
    ("count", "expected"),
    [(1, "0"), (2, "(01)"), (3, "((01)2)"), (5, "(((01)(23))4)"), (7, "(((01)(23))((45)6))")],
)
@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_tree_is_that_of_the_numbers_of_chunks(count, expected, scheduler):
    with dask.config.set(scheduler=scheduler):
        assert reduce_chunks(named, range(count), paired, name="test") == expected
    assert tree([str(number) for number in range(count)], paired) == expected


def test_results_are_in_the_order_of_chunks(monkeypatch):
    monkeypatch.setattr("sdeinfer._map_reduce.AT_ONCE", 3)
    assert map_chunks(named, range(10), name="test") == [str(number) for number in range(10)]


def test_chunk_that_kills_workers_is_one_line(monkeypatch):
    class KilledWorker(Exception):
        """As that of `distributed`, which is not needed here."""

    def compute(*found, **settings):
        raise KilledWorker("Attempted to run task 4 times\nmore lines")

    monkeypatch.setattr("dask.base.compute", compute)
    with pytest.raises(
        ValueError, match=r"^test: one chunk killed several workers.*\(Attempted to run task 4 times\)$"
    ):
        map_chunks(named, range(2), name="test")
