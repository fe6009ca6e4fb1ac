import datetime

import numpy as np
import pytest
import xarray as xr

import sdeinfer as si
from sdeinfer._files import staged_folder
from sdeinfer.observation import read, read_posterior, write


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_round_trips(networks, fitted, suffix, tmp_path):
    if suffix == ".zarr":
        pytest.importorskip("zarr")
    write(networks, tmp_path / f"data{suffix}")
    xr.testing.assert_identical(read(tmp_path / f"data{suffix}"), networks)
    write(fitted, tmp_path / f"posterior{suffix}")
    back = read_posterior(tmp_path / f"posterior{suffix}")
    xr.testing.assert_equal(back["posterior"].to_dataset(), fitted["posterior"].to_dataset())
    assert back.attrs == fitted.attrs


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
@pytest.mark.parametrize("value", [datetime.date(2024, 1, 1), {1, 2}, 1j, None, {"a": 1}, True, [1, "a"]], ids=repr)
def test_attributes_that_a_format_cannot_hold_are_named(networks, suffix, value, tmp_path):
    path = tmp_path / f"data{suffix}"
    if suffix == ".zarr" and not isinstance(value, datetime.date | set | complex):  # what JSON can say
        write(networks.assign_attrs(note=value), path)
        assert read(path).attrs["note"] == value
        return
    with pytest.raises(si.InputError, match=f"data{suffix}: attribute note: a number, a text, or a list of either is"):
        write(networks.assign_attrs(note=value), path)
    assert not path.exists()


def test_files_of_others_are_read(networks, tmp_path):
    """Written by xarray alone, with its dimensions in another order and one width for all."""
    V = networks["covariance"].values
    foreign = xr.Dataset(
        {"covariance": (("layer", "network", "token_a", "token_b"), np.swapaxes(V, 0, 1))},
        coords={"layer": np.arange(V.shape[1]), "width": 96},
    )
    foreign.to_netcdf(tmp_path / "foreign.nc", engine="h5netcdf")
    np.testing.assert_array_equal(read(tmp_path / "foreign.nc")["covariance"], V)


def test_netcdf_3_is_read_too(networks, tmp_path):
    networks.astype(np.float64).to_netcdf(tmp_path / "old.nc", engine="scipy")
    np.testing.assert_array_equal(read(tmp_path / "old.nc")["covariance"], networks["covariance"])


def test_unreadable_files_are_named(tmp_path, networks):
    (tmp_path / "text.nc").write_text("not NetCDF")
    with pytest.raises(ValueError, match=r"text.nc: cannot be read as NetCDF"):
        read(tmp_path / "text.nc")
    with pytest.raises(ValueError, match=r"missing.nc: no such file"):
        read(tmp_path / "missing.nc")
    with pytest.raises(ValueError, match="is a folder"):
        read(tmp_path)
    write(networks, tmp_path / "data.nc")
    with pytest.raises(ValueError, match="not the result of a fit"):
        read_posterior(tmp_path / "data.nc")


def test_a_cut_file_is_refused(networks, tmp_path):
    write(networks, tmp_path / "data.nc")
    content = (tmp_path / "data.nc").read_bytes()
    (tmp_path / "cut.nc").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="cut.nc"):
        read(tmp_path / "cut.nc")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(networks, tmp_path, monkeypatch):
    write(networks, tmp_path / "data.nc")
    before = (tmp_path / "data.nc").read_bytes()

    def fail(self, path, **_):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(xr.Dataset, "to_netcdf", fail)
    with pytest.raises(ValueError, match="data.nc: cannot be written .No space left on device"):
        write(networks, tmp_path / "data.nc")
    assert (tmp_path / "data.nc").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["data.nc"]


def test_a_staged_folder_appears_whole_or_not_at_all(tmp_path):
    def fail_halfway():
        with staged_folder(tmp_path / "out") as stage:
            (stage / "half").write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail_halfway()
    assert list(tmp_path.iterdir()) == []
    with staged_folder(tmp_path / "out") as stage:
        (stage / "figures").mkdir()
        (stage / "figures" / "one.png").write_text("1")
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*.png"))] == ["out/figures/one.png"]


def test_a_staged_folder_keeps_what_was_there(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes").write_text("mine")
    with staged_folder(tmp_path / "out") as stage:
        (stage / "data").write_text("new")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["data", "notes"]
