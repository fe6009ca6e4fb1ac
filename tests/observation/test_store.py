"""Files: NetCDF and Zarr, whole or not at all, and ensembles that grow."""

import datetime

import numpy as np
import pytest
import xarray as xr
from helpers.internals import groups_of, open_in_chunks, write_parts

import sdeinfer as si
from sdeinfer.observation import read, read_posterior, write

pytest.importorskip("zarr")


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
def test_round_trips(networks, fitted, suffix, tmp_path):
    write(networks, tmp_path / f"data{suffix}")
    xr.testing.assert_identical(read(tmp_path / f"data{suffix}"), networks)
    write(fitted, tmp_path / f"posterior{suffix}")
    back = read_posterior(tmp_path / f"posterior{suffix}")
    xr.testing.assert_equal(back["posterior"].to_dataset(), fitted["posterior"].to_dataset())
    assert back.attrs == fitted.attrs
    with pytest.raises(si.InputError, match="a fit is read by si.observation.read_posterior"):
        read(tmp_path / f"posterior{suffix}")


@pytest.mark.parametrize("suffix", [".nc", ".zarr"])
@pytest.mark.parametrize("value", [datetime.date(2024, 1, 1), {1, 2}], ids=repr)
def test_attributes_that_a_format_cannot_hold_are_refused(networks, suffix, value, tmp_path):
    path = tmp_path / f"data{suffix}"
    with pytest.raises(si.InputError, match=f"data{suffix}: cannot be written"):
        write(networks.assign_attrs(note=value), path)
    assert not path.exists()


@pytest.mark.parametrize("engine", ["h5netcdf", "scipy"])
def test_files_of_others_are_read(networks, engine, tmp_path):
    """Written by xarray alone, with its dimensions in another order and one width for all; of NetCDF 4 and 3."""
    V = networks["covariance"].values.astype(np.float64)
    foreign = xr.Dataset(
        {"covariance": (("layer", "network", "token_a", "token_b"), np.swapaxes(V, 0, 1))},
        coords={"layer": np.arange(V.shape[1]), "width": 96},
    )
    foreign.to_netcdf(tmp_path / "foreign.nc", engine=engine)
    np.testing.assert_array_equal(read(tmp_path / "foreign.nc")["covariance"], V)


def test_unreadable_files_are_named(tmp_path, networks):
    write(networks, tmp_path / "data.nc")
    (tmp_path / "text.nc").write_text("not NetCDF")
    content = (tmp_path / "data.nc").read_bytes()
    (tmp_path / "cut.nc").write_bytes(content[: len(content) // 2])
    for call, name, message in (
        (read, "text.nc", "text.nc: cannot be read as NetCDF"),
        (read, "missing.nc", "missing.nc: no such file"),
        (read, ".", "is a folder"),
        (read, "cut.nc", "cut.nc"),
        (read_posterior, "data.nc", "not the result of a fit"),
    ):
        with pytest.raises(si.InputError, match=message):
            call(tmp_path / name)


@pytest.mark.parametrize("name", ["data.nc", "data.zarr"])
def test_groups_of_text_survive_a_file_in_the_order_of_their_first_networks(networks, name, tmp_path):
    si.write(networks.assign_coords(group=("network", ["late", *["early"] * 23])), tmp_path / name)
    groups = groups_of(read(tmp_path / name))
    assert list(groups.labels) == ["late", "early"]
    np.testing.assert_array_equal(groups.group, [0, *[1] * 23])
    np.testing.assert_array_equal(groups.members(1), range(1, 24))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


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


@pytest.mark.parametrize("first_has", [True, False])
def test_networks_with_and_without_shortcuts_are_appended(networks, tmp_path, first_has):
    """If those in the folder have none, the others lose theirs; a missing one is unknown. Data in chunks have none."""
    kept = np.random.default_rng(0).normal(size=(24, networks.sizes["layer"]))
    both = networks.assign_coords(shortcut=(("network", "layer"), kept))
    halves = [slice(12), slice(12, None)]
    for half, has in zip(halves, (first_has, not first_has), strict=True):
        write((both if has else networks).isel(network=half), tmp_path / "data.zarr", append=True)
    unknown = both.assign_coords(shortcut=both["shortcut"].where(both["network"] < 12))
    xr.testing.assert_identical(read(tmp_path / "data.zarr"), unknown if first_has else networks)
    assert "shortcut" not in open_in_chunks(tmp_path / "data.zarr").coords


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
