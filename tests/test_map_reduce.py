"""The order in which results of chunks are combined."""

import random
import time

import dask
import pytest

from sdeinfer._map_reduce import map_chunks, passes_by, reduce_chunks, tree
from sdeinfer._parts import Parts, Unfinished


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


def test_parts_meet_in_a_folder(tmp_path):
    def run(part: int | None) -> str:
        with passes_by(Parts(tmp_path / "parts", part, None if part is None else 3).results):
            return reduce_chunks(named, range(7), paired, name="test")

    for part in (1, 2):
        with pytest.raises(Unfinished, match="lacks part 3 of 3|lacks part 2, 3 of 3"):
            run(part)
    with pytest.raises(Unfinished, match="lacks part 3 of 3"):
        run(None)
    assert run(3) == run(1) == run(None) == "(((01)(23))((45)6))"


def test_parts_of_other_work_are_refused(tmp_path):
    def run(chunks, part, parts=2):
        with passes_by(Parts(tmp_path, part, parts).results):
            return reduce_chunks(named, chunks, paired, name="test")

    with pytest.raises(Unfinished):
        run(range(4), 1)
    with pytest.raises(ValueError, match="is of other data"):
        run(range(5), 2)
    (tmp_path / "pass_01_test_1_of_2.part").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(ValueError, match="is damaged .*remove it"):
        run(range(5), 2)
    with pytest.raises(Unfinished):
        run(range(4), 1, 3)
    with pytest.raises(ValueError, match="parts of different numbers, 2, 3"):
        Parts(tmp_path, None, None)
