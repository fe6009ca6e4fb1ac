"""Data in chunks on the command line."""

import contextlib

import dask
import pytest
import xarray as xr
from cli.test_fits import SMALL_FIT, SMALL_NETWORKS, refused, run

from sdeinfer.observation import read, read_posterior


@pytest.fixture
def data(tmp_path):
    assert run("observe", *SMALL_NETWORKS, "--out", tmp_path / "data.zarr").exit_code == 0
    return tmp_path / "data.zarr"


def test_parts_and_workers_write_the_same_ensemble(data, tmp_path, monkeypatch):
    """24 networks in parts of 10, 10 and 4."""
    monkeypatch.setattr("sdeinfer.cli._networks._networks_at_once", lambda tokens, layers: 10)
    assert run("observe", *SMALL_NETWORKS, "--out", tmp_path / "parts.zarr").exit_code == 0
    monkeypatch.setattr("sdeinfer.cli._networks.at_work", lambda *_: contextlib.nullcontext(enter_result=True))
    with dask.config.set(scheduler="threads"):
        result = run("observe", *SMALL_NETWORKS, "--workers", 2, "--out", tmp_path / "workers.zarr")
    assert result.exit_code == 0, result.output
    assert "24 networks, 11 layers, 3 tokens" in result.stdout
    written, parts = read(tmp_path / "workers.zarr"), read(tmp_path / "parts.zarr")
    xr.testing.assert_identical(written, parts)
    xr.testing.assert_allclose(parts, read(data), rtol=1e-5)
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


def test_errors(data, tmp_path):
    refused(run("fit", data, "--workers", "2", "--scheduler", "tcp://a:1"), "--workers", "omit one")
    refused(run("observe", "--workers", "2", "--out", tmp_path / "a.nc"), "Zarr")
    refused(run("fit", data, "--leave-out-damaged", "--out", tmp_path / "a.nc"), "leave_out_damaged")
