"""Zarr: what NetCDF does, and ensembles that grow."""

import numpy as np
import pytest
import xarray as xr

import sdeinfer as si
from sdeinfer.observation import read, read_posterior, write, write_parts

pytest.importorskip("zarr")


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_is_replaced(networks, tmp_path):
    write(networks, tmp_path / "data.zarr")
    write(networks.isel(network=slice(2)), tmp_path / "data.zarr")
    assert read(tmp_path / "data.zarr").sizes["network"] == 2
    assert names(tmp_path) == ["data.zarr"]


def test_networks_are_appended(networks, tmp_path):
    for first in (0, 10, 20):
        part = networks.isel(network=slice(first, first + 10))
        write(part.assign_coords(network=np.arange(part.sizes["network"])), tmp_path / "data.zarr", append=True)
    xr.testing.assert_identical(read(tmp_path / "data.zarr"), networks)


@pytest.mark.parametrize("name", ["data.zarr", "data.nc"])
def test_parts_are_written_whole_or_not_at_all(networks, tmp_path, name):
    parts = [networks.isel(network=slice(0, 10)), networks.isel(network=slice(10, None))]

    def broken():
        yield parts[0]
        raise si.InputError("layer 3: NaN")

    with pytest.raises(si.InputError, match="layer 3"):
        write_parts(broken(), tmp_path / name)
    assert names(tmp_path) == []
    assert write_parts(iter(parts), tmp_path / name)["network"] == 24
    xr.testing.assert_identical(read(tmp_path / name), networks)
    with pytest.raises(si.InputError, match="layer 3"):
        write_parts(broken(), tmp_path / name)
    xr.testing.assert_identical(read(tmp_path / name), networks)
    assert names(tmp_path) == [name]


def test_only_networks_of_one_kind_are_appended(networks, tmp_path):
    path = tmp_path / "data.zarr"
    write(networks, path)
    for what, other in {
        "layers": networks.isel(layer=slice(5)),
        "sizes": networks.isel(token_a=slice(2), token_b=slice(2)),
        "attributes": networks.assign_attrs(architecture="mlp"),
        "types": networks.astype(np.float32),
        "variables": networks.assign_coords(group=("network", np.zeros(24))),
    }.items():
        with pytest.raises(si.InputError, match=f"data.zarr: has other {what} than the appended data"):
            write(other, path, append=True)
    xr.testing.assert_identical(read(path), networks)
    with pytest.raises(si.InputError, match="only a Dataset of networks can be appended, and only to Zarr"):
        write(networks, tmp_path / "data.nc", append=True)


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
@pytest.mark.parametrize("options", [{"zarr_format": 2}, {"zarr_format": 3}, {"zarr_format": 3, "consolidated": False}])
def test_networks_are_appended_to_a_folder_of_xarray(networks, tmp_path, options):
    """Which keeps its version, and whose consolidated metadata, if any, xarray reads with all networks."""
    first, second = networks.isel(network=slice(10)), networks.isel(network=slice(10, None))
    first.to_zarr(tmp_path / "data.zarr", **options)
    write(second, tmp_path / "data.zarr", append=True)
    xr.testing.assert_identical(read(tmp_path / "data.zarr"), networks)
    opened = xr.open_zarr(tmp_path / "data.zarr", consolidated=options.get("consolidated"))
    xr.testing.assert_identical(opened.load(), networks)
    write(opened, tmp_path / "again.zarr")
    xr.testing.assert_identical(read(tmp_path / "again.zarr"), networks)


def test_labels_are_appended(networks, tmp_path):
    named = networks.assign_coords(network=[f"seed {number}" for number in range(24)])
    for part in (named.isel(network=slice(10)), named.isel(network=slice(10, None))):
        write(part, tmp_path / "data.zarr", append=True)
    assert read(tmp_path / "data.zarr")["network"].values.tolist() == named["network"].values.tolist()
    with pytest.raises(si.InputError, match="has networks of the same labels as the appended data"):
        write(named, tmp_path / "data.zarr", append=True)


@pytest.mark.filterwarnings("ignore:Consolidated metadata")
def test_a_fit_that_xarray_wrote_is_read_and_written_again(fitted, tmp_path):
    fitted.to_zarr(tmp_path / "post.zarr", zarr_format=3)
    write(xr.open_datatree(tmp_path / "post.zarr", engine="zarr"), tmp_path / "again.zarr")
    xr.testing.assert_identical(read_posterior(tmp_path / "again.zarr"), read_posterior(tmp_path / "post.zarr"))


def test_a_folder_that_lost_a_part_is_refused(networks, tmp_path):
    write(networks, tmp_path / "data.zarr")
    for variable, message in [("covariance", "NaN"), ("width", "width"), ("layer", "layer")]:
        copy = tmp_path / f"{variable}.zarr"
        write(networks, copy)
        next((copy / variable).glob("[0-9]*")).unlink()
        with pytest.raises(si.InputError, match=rf"{variable}.zarr: .*{message}"):
            read(copy)
    next((tmp_path / "data.zarr" / "covariance").glob("[0-9]*")).write_bytes(b"half")
    with pytest.raises(si.InputError, match=r"data.zarr: cannot be read as Zarr"):
        read(tmp_path / "data.zarr")


def test_only_zarr_is_replaced(networks, tmp_path):
    (tmp_path / "mine.zarr").mkdir()
    (tmp_path / "mine.zarr" / "notes").write_text("mine")
    with pytest.raises(si.InputError, match=r"mine.zarr: is not a Zarr folder that could be replaced"):
        write(networks, tmp_path / "mine.zarr")
    with pytest.raises(si.InputError, match=r"mine.zarr: cannot be read as Zarr"):
        read(tmp_path / "mine.zarr")
    assert names(tmp_path) == ["mine.zarr"]
