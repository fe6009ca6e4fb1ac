"""Data in chunks: which networks are read together, and what is wrong with them."""

import jax.random as jr
import numpy as np
import pytest
import xarray as xr

import sdeinfer as si
from sdeinfer.observation import chunks_of, in_chunks, open_in_chunks, write

pytest.importorskip("zarr")
pytest.importorskip("dask")


@pytest.fixture
def store(networks, tmp_path):
    """A folder whose chunks hold four networks each."""
    networks["covariance"].encoding = {}
    part = networks.copy()
    part["covariance"].encoding["chunks"] = (4, *networks["covariance"].shape[1:])
    write(part, tmp_path / "data.zarr")
    return tmp_path / "data.zarr"


def test_small_chunks_are_read_together(store, monkeypatch):
    data = open_in_chunks(store)
    assert in_chunks(data)
    assert [(chunk.first, chunk.last) for chunk in chunks_of(data)] == [(0, 24)]
    each = data["covariance"].nbytes // 24 * 8 // data["covariance"].dtype.itemsize
    monkeypatch.setattr("sdeinfer.observation._chunks.LEAST", 9 * each)
    chunks = chunks_of(data)
    assert [(chunk.first, chunk.last) for chunk in chunks] == [(0, 12), (12, 24)]
    np.testing.assert_array_equal(chunks[1].read(), data["covariance"].values[12:])
    wanted = np.arange(12) == 5
    V = chunks[1].read(wanted)
    np.testing.assert_array_equal(V[5], data["covariance"].values[17])
    assert np.isnan(V[:4]).all()
    assert not np.isnan(V[4:8]).any()


def test_valid_data_stay_in_chunks(networks, store):
    validated = si.validate(open_in_chunks(store))
    assert in_chunks(validated)
    np.testing.assert_array_equal(validated["covariance"].values, networks["covariance"].values)


def truncate(file):
    file.write_bytes(file.read_bytes()[:100])


def overwrite(file):
    file.write_bytes(b"\xff" * file.stat().st_size)


@pytest.mark.parametrize(
    ("damage", "what"),
    [(truncate, "cannot be read"), (overwrite, "cannot be read"), (lambda file: file.unlink(), "are NaN")],
)
def test_damaged_file_is_named(store, damage, what):
    damage(store / "covariance" / "2.0.0.0")
    with pytest.raises(si.InputError) as error:
        si.validate(open_in_chunks(store))
    message = str(error.value)
    assert what in message
    assert str(store) in message
    assert "networks 8 to 11" in message
    assert "\n" not in message


def test_networks_that_are_no_covariances_are_found(networks, store):
    data = open_in_chunks(store)
    V = data["covariance"].values.copy()
    V[5, 2] *= -1
    V[21, 3, 0, 0] = np.nan
    (chunk,) = chunks_of(data.assign(covariance=(data["covariance"].dims, V)).chunk(network=4))
    V, damaged, faults = chunk.inspected()
    assert np.flatnonzero(damaged).tolist() == [5, 21]
    assert len(faults) == 2
    assert "network 5, layer 2: not positive semi-definite" in faults[0]
    assert "network 21, layer 3: 1 entries are NaN" in faults[1]
    np.testing.assert_array_equal(V[6:21], networks["covariance"].values[6:21])


def test_only_zarr_is_in_chunks(networks, tmp_path):
    write(networks, tmp_path / "data.nc")
    with pytest.raises(si.InputError, match="from Zarr"):
        open_in_chunks(tmp_path / "data.nc")


def test_parts_of_an_ensemble_are_those_of_the_whole():
    layer, V0 = si.ShapedMLP(c_plus=0.2, c_minus=-1.2), si.equicorrelated(tokens=2, correlation=0.2)
    sizes = {"width": 32, "depth": 3, "method": "chain", "key": jr.key(0)}
    whole = si.sample_networks(layer, V0, **sizes, networks=6)
    part = si.sample_networks(layer, V0, **sizes, networks=4, first_network=2)
    xr.testing.assert_allclose(part, whole.isel(network=slice(2, None)), rtol=1e-12)
    with pytest.raises(si.InputError, match="first_network"):
        si.sample_networks(layer, V0, **sizes | {"method": "weights"}, networks=4, first_network=2)
