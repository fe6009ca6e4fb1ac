"""Hidden states in files of every type: whole, in parts, and broken."""

import ml_dtypes
import numpy as np
import pytest
import xarray as xr
from helpers.internals import _stored, observe_file

import sdeinfer as si

DIMS = ("network", "layer", "token", "feature")
SIZES = (5, 12, 2, 8)


@pytest.fixture
def X() -> np.ndarray:
    return np.random.default_rng(0).normal(size=SIZES)


def by_layer(X):
    return {f"layer_{layer}": np.ascontiguousarray(X[:, layer]) for layer in reversed(range(X.shape[1]))}


def save_safetensors(path, arrays):
    pytest.importorskip("safetensors.numpy").save_file(arrays, path)


def save_zarr(path, data, **options):
    pytest.importorskip("zarr")
    data.to_zarr(path, zarr_format=2, consolidated=False, **options)


def as_data(X, dims=DIMS):
    return xr.Dataset({"hidden_states": (DIMS, X)}).transpose(*dims)


WRITERS = {
    "X.npy": lambda path, X: np.save(path, X),
    "one.npz": lambda path, X: np.savez(path, X),
    "layers.npz": lambda path, X: np.savez_compressed(path, **by_layer(X)),
    "one.safetensors": lambda path, X: save_safetensors(path, {"X": X}),
    "layers.safetensors": lambda path, X: save_safetensors(path, by_layer(X)),
    "X.nc": lambda path, X: as_data(X).to_netcdf(path, engine="h5netcdf"),
    "old.nc": lambda path, X: as_data(X).to_netcdf(path, engine="scipy"),
    "swapped.nc": lambda path, X: as_data(X, ("layer", "token", "feature", "network")).to_netcdf(
        path, engine="h5netcdf"
    ),
    "X.zarr": lambda path, X: save_zarr(path, as_data(X)),
}


@pytest.fixture(params=WRITERS)
def file(request, tmp_path, X):
    path = tmp_path / request.param
    WRITERS[request.param](path, X)
    return path


def test_every_type_of_file_gives_one_dataset(file, X):
    (data,) = observe_file(file)
    xr.testing.assert_identical(data, si.observe(X))


def test_networks_come_in_parts(file, X, monkeypatch):
    monkeypatch.setattr(_stored, "BYTES_AT_ONCE", 8 * 2 * 2 * (2 * 8 + 12 * 2))
    parts = list(observe_file(file))
    assert [part.sizes["network"] for part in parts] == [2, 2, 1]
    xr.testing.assert_allclose(xr.concat(parts, "network"), si.observe(X), rtol=1e-14)


def test_half_precision_in_files(X, tmp_path):
    half = X.astype(ml_dtypes.bfloat16)
    save_safetensors(tmp_path / "X.safetensors", {"X": half})
    (data,) = observe_file(tmp_path / "X.safetensors")
    xr.testing.assert_identical(data, si.observe(half))
    # A .npy file does not know the type.
    np.save(tmp_path / "X.npy", half)
    with pytest.raises(si.InputError, match=r"layer 0: real numbers are needed, got \|V2"):
        list(observe_file(tmp_path / "X.npy"))


def test_layers_have_their_numbers(X, tmp_path):
    as_data(X).assign_coords(layer=4 * np.arange(12)).to_netcdf(tmp_path / "X.nc", engine="h5netcdf")
    (data,) = observe_file(tmp_path / "X.nc")
    xr.testing.assert_identical(data, si.observe(X, layers=4 * np.arange(12)))


def test_prompts_are_chosen(X, tmp_path):
    prompts = np.stack([X, X + 1], axis=2)
    np.save(tmp_path / "X.npy", prompts)
    np.savez(tmp_path / "X.npz", **by_layer(prompts))
    for name in ("X.npy", "X.npz"):
        for chosen, expected in ((1, si.observe(X + 1)), (None, si.observe(prompts))):
            (data,) = observe_file(tmp_path / name, prompts=chosen)
            # Sums over arrays of other strides are rounded otherwise.
            np.testing.assert_allclose(data["shortcut"], expected["shortcut"], rtol=1e-12)
            xr.testing.assert_identical(data.drop_vars("shortcut"), expected.drop_vars("shortcut"))
        with pytest.raises(si.InputError, match="prompts: cannot choose among 2 prompts by 2"):
            list(observe_file(tmp_path / name, prompts=2))
    np.save(tmp_path / "X.npy", X)
    with pytest.raises(si.InputError, match="prompts: the hidden states have no dimension of prompts"):
        list(observe_file(tmp_path / "X.npy", prompts=0))


def test_a_file_that_is_cut_off_is_refused(file, tmp_path):
    if file.is_dir():
        for chunk in sorted((file / "hidden_states").glob("[0-9]*"))[:1]:
            chunk.unlink()
    else:
        content = file.read_bytes()
        file.write_bytes(content[: len(content) // 2])
    with pytest.raises(si.InputError, match=f"{file.name}: ") as refusal:
        list(observe_file(file))
    assert "\n" not in str(refusal.value)


def test_other_files_are_refused(X, tmp_path):
    (tmp_path / "X.csv").write_text("1,2")
    np.save(tmp_path / "flat.npy", X[0])
    np.savez(tmp_path / "flat.npz", **by_layer(X[0]))
    np.savez(tmp_path / "empty.npz")
    np.save(tmp_path / "objects.npy", np.array([None]), allow_pickle=True)
    xr.Dataset({"a": 1.0, "b": 2.0}).to_netcdf(tmp_path / "other.nc", engine="h5netcdf")
    (tmp_path / "X.zarr").write_text("")
    (tmp_path / "folder.npy").mkdir()
    for name, message in (
        ("X.csv", r"hidden states are read from .npy, .npz, .safetensors, .nc, .zarr, not from .csv"),
        ("none.npy", "no such file"),
        (
            "flat.npy",
            r"layers of shape \(networks, tokens, width\) or .* are needed, .*; got layers of shape \(12, 8\)",
        ),
        ("flat.npz", r"layers of shape .* are needed, .*; got layers of shape \(12, 8\)"),
        ("empty.npz", "holds no array"),
        ("objects.npy", "cannot be read as .npy"),
        ("other.nc", "no variable `hidden_states`, only a, b"),
        ("X.zarr", "is a file, not a Zarr folder"),
        ("folder.npy", "is a folder, not a file"),
    ):
        with pytest.raises(si.InputError, match=f"{name}: {message}"):
            list(observe_file(tmp_path / name))
