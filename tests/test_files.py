"""A full disk, an interrupt, a kill, two writers of one place: results are whole or not there."""

import contextlib
import resource
import signal
import subprocess
import sys

import pytest
import xarray as xr
from helpers.internals import InputError, _fits, staged_file, staged_folder
from typer.testing import CliRunner

import sdeinfer as si
from sdeinfer.cli import app

KILLED = """
import os, signal, sys
from sdeinfer._files import staged_file, staged_folder
with {opened}(sys.argv[1]) as stage:
    target = stage / "data.nc" if stage.is_dir() else stage
    target.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def full_disk():
    """Files of this process may have 2,000 bytes; Python ignores the signal, so that a write is an error."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", ["data.nc", "data.zarr"])
def test_a_full_disk_is_one_line_and_leaves_what_was_there(networks, name, tmp_path, full_disk):
    """With NetCDF, HDF5 would end the process."""
    if name.endswith(".zarr"):
        pytest.importorskip("zarr")
    (tmp_path / "kept").mkdir()
    old = tmp_path / "kept" / "data.nc"
    old.write_text("old")
    for path in (tmp_path / name, old):
        with pytest.raises(InputError, match=rf"{path.name}: cannot be written .File too large"):
            si.write(networks, path)
    assert old.read_text() == "old"
    assert [path.name for path in tmp_path.rglob("*")] == ["kept", "data.nc"]


def test_an_interrupted_calibrate_leaves_nothing(tmp_path, monkeypatch):
    def interrupted(_, folder):
        (folder / "report.html").write_text("half")
        raise KeyboardInterrupt

    monkeypatch.setattr(_fits, "write_results", interrupted)
    monkeypatch.setattr(_fits.Fit, "posterior", lambda *_: xr.Dataset())
    out = ("--out", str(tmp_path / "new" / "out"))
    ended = CliRunner().invoke(app, ["calibrate", "--networks", "2", "--depth", "2", "--width", "16", *out])
    assert ended.exit_code not in (0, 2)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("opened", ["staged_file", "staged_folder"])
def test_a_killed_process_leaves_no_half_result(opened, tmp_path):
    target = tmp_path / ("data.nc" if opened == "staged_file" else "out")
    ended = subprocess.run([sys.executable, "-c", KILLED.format(opened=opened), str(target)], check=False)
    assert ended.returncode == -signal.SIGKILL
    assert not target.exists()
    assert all(left.name.startswith(".") for left in tmp_path.iterdir())


def test_two_writers_of_one_place_leave_the_whole_results_of_the_last(tmp_path):
    with contextlib.ExitStack() as first, contextlib.ExitStack() as second:
        stages = [each.enter_context(staged_folder(tmp_path / "out")) for each in (first, second)]
        files = [each.enter_context(staged_file(tmp_path / "data.nc")) for each in (first, second)]
        for writer, (stage, file) in enumerate(zip(stages, files, strict=True)):
            for path in (stage / "a.txt", stage / "b.txt", file):
                path.write_text(f"of {writer}")
        first.close()
        assert (tmp_path / "out" / "b.txt").read_text() == "of 0"
    assert {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()} == dict.fromkeys(
        ("a.txt", "b.txt", "data.nc"), "of 1"
    )
