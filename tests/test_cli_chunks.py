"""Data in chunks on the command line."""

import contextlib

import dask
import numpy as np
import pytest
import xarray as xr
from test_cli import SMALL_FIT, SMALL_NETWORKS, refused, run

from sdeinfer.observation import open_in_chunks, read, read_posterior


@contextlib.contextmanager
def _in_this_process(data, workers, scheduler):
    assert workers is None
    assert scheduler is None
    yield open_in_chunks(data)


@pytest.fixture
def data(tmp_path):
    assert run("observe", *SMALL_NETWORKS, "--out", tmp_path / "data.zarr").exit_code == 0
    return tmp_path / "data.zarr"


def test_ensembles_are_written_in_parts(data, tmp_path, monkeypatch):
    monkeypatch.setattr("sdeinfer.cli._networks._networks_at_once", lambda tokens, layers: 10)
    result = run("observe", *SMALL_NETWORKS, "--out", tmp_path / "parts.zarr")
    assert result.exit_code == 0, result.output
    assert "24 networks, 11 layers, 3 tokens" in result.stdout
    xr.testing.assert_allclose(read(tmp_path / "parts.zarr"), read(data), rtol=1e-5)


def test_workers_write_the_same_ensemble(tmp_path, monkeypatch):
    """24 networks in parts of 10, 10 and 4, each written to its region of the folder."""
    monkeypatch.setattr("sdeinfer.cli._networks._networks_at_once", lambda tokens, layers: 10)
    assert run("observe", *SMALL_NETWORKS, "--out", tmp_path / "parts.zarr").exit_code == 0
    monkeypatch.setattr("sdeinfer.cli._networks.workers_of", lambda *_: contextlib.nullcontext(enter_result=True))
    with dask.config.set(scheduler="threads"):
        result = run("observe", *SMALL_NETWORKS, "--workers", 2, "--out", tmp_path / "workers.zarr")
    assert result.exit_code == 0, result.output
    assert "24 networks, 11 layers, 3 tokens" in result.stdout
    written = read(tmp_path / "workers.zarr")
    xr.testing.assert_identical(written, read(tmp_path / "parts.zarr"))
    assert written.attrs["architecture"] == "transformer"


@pytest.mark.slow
def test_a_scheduler_observes_and_fits(tmp_path):
    """By the worker of a scheduler that runs already, as without one, to the last bit."""
    distributed = pytest.importorskip("distributed")
    sizes = ["--tokens", 2, "--width", 32, "--depth", 4, "--networks", 64]
    with distributed.LocalCluster(n_workers=1, threads_per_worker=1, dashboard_address="127.0.0.1:0") as cluster:
        to = ["--scheduler", cluster.scheduler_address]
        for name, flags in (("here", []), ("there", to)):
            assert run("observe", *sizes, *flags, "--out", tmp_path / f"{name}.zarr").exit_code == 0
        xr.testing.assert_identical(read(tmp_path / "here.zarr"), read(tmp_path / "there.zarr"))
        for name, flags in (("by_scheduler", to), ("by_workers", ["--workers", 2])):
            out = ["--out", tmp_path / f"{name}.nc"]
            result = run("fit", tmp_path / "there.zarr", *SMALL_FIT, *flags, *out)
            assert result.exit_code == 0, result.output
    fits = [
        read_posterior(tmp_path / f"{name}.nc")["posterior"].to_dataset() for name in ("by_scheduler", "by_workers")
    ]
    xr.testing.assert_identical(*(fit.drop_attrs() for fit in fits))  # times of creation differ


def test_parts_of_a_job_array_give_the_fit(data, tmp_path, monkeypatch):
    monkeypatch.setattr("sdeinfer.observation._chunks.LEAST", 1)
    flags = ["--folder", tmp_path / "parts"]
    fit = ["merge", data, *flags, *SMALL_FIT, "--out", tmp_path / "merged.nc"]
    refused(run(*fit), "no such folder")
    assert "lacks part 2 of 2" in run("reduce", data, "--part", "1/2", *flags).stdout
    refused(run(*fit), "lacks part 2 of 2", "run `sdeinfer reduce`")
    for _ in range(10):
        said = [run("reduce", data, "--part", f"{part}/2", *flags).stdout for part in (2, 1)]
        if all("complete" in each for each in said):
            break
    result = run(*fit)
    assert result.exit_code == 0, result.output
    refused(run(*fit, "--largest-logit", "0.3"), "other data, settings")
    monkeypatch.setattr("sdeinfer.cli._calibrate.observed_in", _in_this_process)
    with dask.config.set(scheduler="synchronous"):
        result = run("fit", data, *SMALL_FIT, "--out", tmp_path / "fitted.nc")
        assert result.exit_code == 0, result.output
    merged, fitted = (read_posterior(tmp_path / name) for name in ("merged.nc", "fitted.nc"))
    for name, draws in fitted["posterior"].data_vars.items():
        np.testing.assert_array_equal(draws, merged["posterior"][name])


def test_errors(data, tmp_path):
    refused(run("fit", data, "--workers", "2", "--scheduler", "tcp://a:1"), "--workers", "omit one")
    refused(run("reduce", data, "--part", "3/2", "--folder", tmp_path / "parts"), "--part", "i/N")
    refused(run("reduce", tmp_path / "no.zarr", "--part", "1/2", "--folder", tmp_path / "parts"), "no such file")
    refused(run("observe", "--workers", "2", "--out", tmp_path / "a.nc"), "Zarr")
    refused(run("fit", data, "--leave-out-damaged", "--out", tmp_path / "a.nc"), "leave_out_damaged")
