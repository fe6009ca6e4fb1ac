"""The command line, in this process: exit codes, one-line errors, and what is left on disk."""

import itertools
import json
import re

import numpy as np
import pytest
import xarray as xr
from helpers.fits import WARMUP
from helpers.internals import _fits, _progress, _stored
from typer.testing import CliRunner

import sdeinfer as si
from sdeinfer.cli import app
from sdeinfer.observation import read, read_posterior, write

SMALL_NETWORKS = ["--width", "96", "--depth", "10", "--tokens", "3", "--networks", "24", "--norm", "1.2"]
SMALL_FIT = ["--chains", "2", "--draws", "30", "--warmup", str(WARMUP)]
"""Of the sizes of the fixtures `networks` and `fitted`, which need other programs for other tokens and warmup."""

RESULTS = [
    "data.nc",
    "figures/correlation_paths.png",
    "figures/innovations.png",
    "figures/posterior.png",
    "figures/ranks.png",
    "figures/terminal_correlation.png",
    "posterior.nc",
    "report.html",
    "summary.json",
]


PHASES = [
    "loading JAX",
    "sampling networks",
    "finding the range of the law",
    "preparing the data",
    "compiling the sampler",
    "evaluating the draws",
    "predicting",
    "checking the fit",
    "drawing the figures",
    "writing the report",
]


def run(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def refused(result, *words: str) -> None:
    """One line on standard error that holds these words, and exit code 2."""
    assert result.exit_code == 2, result.output
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    for word in words:
        assert word in lines[0]


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """What `calibrate` leaves in a folder, and what it says where somebody watches."""
    folder = tmp_path_factory.mktemp("calibrated")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_progress, "_watched", lambda: True)
        return folder, run("calibrate", *SMALL_NETWORKS, *SMALL_FIT, "--seed", 3, "--out", folder / "out")


@pytest.fixture(scope="module")
def data(calibrated):
    return calibrated[0] / "out" / "data.nc"


@pytest.fixture(scope="module")
def post(calibrated):
    return calibrated[0] / "out" / "posterior.nc"


@pytest.mark.long  # CI runs the main job itself
def test_calibrate_goes_from_nothing_to_a_folder_of_results(calibrated):
    folder, result = calibrated
    assert result.exit_code == 0, result.output
    assert files(folder / "out") == RESULTS
    assert files(folder) == [f"out/{name}" for name in RESULTS]
    assert re.search(r"^verdict: ", result.stdout, re.MULTILINE)
    phases = [text for text in re.findall(r"([^\r]*\S) …", result.stderr) if text in PHASES]
    assert [text for text, _ in itertools.groupby(phases)] == PHASES  # a phase shows its share of a pass too
    assert result.stderr.endswith("\r")
    summary = json.loads((folder / "out" / "summary.json").read_text(encoding="utf-8"))
    assert summary["parameters"]["tau0"]["truth"] == 1.0
    assert summary["elapsed_s"] > 0
    assert read_posterior(folder / "out" / "posterior.nc").attrs["seed"] == 3


@pytest.mark.long
def test_single_steps_give_what_calibrate_gives(tmp_path, calibrated, monkeypatch):
    monkeypatch.setattr("sdeinfer.report.figures", lambda post: {})  # which `calibrate` has drawn
    assert run("observe", *SMALL_NETWORKS, "--seed", 3, "--out", tmp_path / "data.nc").exit_code == 0
    assert run("fit", tmp_path / "data.nc", *SMALL_FIT, "--seed", 3, "--out", tmp_path / "post.nc").exit_code == 0
    checked = run("check", tmp_path / "post.nc")
    assert checked.exit_code == 0
    assert "verdict: " in checked.stdout
    assert run("report", tmp_path / "post.nc", "--out", tmp_path / "steps").exit_code == 0
    folders = calibrated[0] / "out", tmp_path / "steps"
    whole, steps = (json.loads((folder / "summary.json").read_text(encoding="utf-8")) for folder in folders)
    assert whole["parameters"] == steps["parameters"]
    assert whole["checks"] == steps["checks"]


@pytest.mark.long
def test_the_smallest_runs_work(tmp_path, post):
    """One token is fitted by architectures without τ0, and one chain has no ranks to compare."""
    sizes = [*SMALL_NETWORKS, "--tokens", 1]
    smallest = ["--networks", 1, *SMALL_FIT, "--chains", 1, "--architecture", "feedforward"]
    ok = run("calibrate", *sizes, *smallest, "--out", tmp_path / "ok")
    assert ok.exit_code == 0, ok.output
    without = ("figures/ranks.png", "figures/correlation_paths.png", "figures/terminal_correlation.png")
    assert files(tmp_path / "ok") == [name for name in RESULTS if name not in without]
    refused(run("calibrate", *sizes, *SMALL_FIT, "--out", tmp_path / "bad"), "tau0", "one token")
    assert not (tmp_path / "bad").exists()
    # Two tokens of one network have one correlation.
    write(read_posterior(post).isel(network=[0], chain=[0]), tmp_path / "post.nc")
    assert run("report", tmp_path / "post.nc", "--out", tmp_path / "out").exit_code == 0
    assert files(tmp_path / "out") == [name for name in RESULTS if "ranks" not in name and not name.endswith(".nc")]
    for folder in ("ok", "out"):
        json.loads((tmp_path / folder / "summary.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)


def test_observe_from_one_zarr_to_another(tmp_path, monkeypatch):
    pytest.importorskip("zarr")
    X = np.random.default_rng(0).normal(size=(3, 4, 2, 2, 32))
    hidden_states = xr.Dataset({"hidden_states": (("network", "layer", "prompt", "token", "feature"), X)})
    hidden_states.to_zarr(tmp_path / "X.zarr", zarr_format=2, consolidated=False)
    monkeypatch.setattr(_stored, "BYTES_AT_ONCE", 1)
    observed = ("observe", "--hidden-states", tmp_path / "X.zarr", "--out", tmp_path / "data.zarr")
    refused(run(*observed, "--prompt", 2), "prompts: cannot choose among 2 prompts by 2")
    assert [path.name for path in tmp_path.iterdir()] == ["X.zarr"]
    result = run(*observed, "--prompt", 1, "--architecture", "mlp")
    assert result.stdout == f"written to {tmp_path / 'data.zarr'}: 3 networks, 4 layers, 2 tokens\n"
    data = read(tmp_path / "data.zarr")
    np.testing.assert_allclose(data["covariance"][1, 2], X[1, 2, 1] @ X[1, 2, 1].T / 32, rtol=1e-12)
    assert data.attrs == {"architecture": "mlp", "tokens": 2}
    assert run(*observed, "--architecture", "attention", "--causal").exit_code == 0
    data = read(tmp_path / "data.zarr")
    assert data.attrs == {"architecture": "attention", "causal": 1, "prompts": "2,2", "tokens": 4}
    assert data.sizes["token_a"] == 4


@pytest.mark.parametrize("out", ["data.nc", "data.zarr"])
def test_hidden_states_that_break_off_leave_nothing(tmp_path, out, monkeypatch):
    if out.endswith(".zarr"):
        pytest.importorskip("zarr")
    monkeypatch.setattr(_stored, "BYTES_AT_ONCE", 1)
    X = np.random.default_rng(0).normal(size=(3, 4, 2, 32))
    np.savez(tmp_path / "X.npz", **{f"layer{layer}": X[:, layer] for layer in range(4)})
    content = bytearray((tmp_path / "X.npz").read_bytes())
    content[len(content) // 2] ^= 0xFF
    (tmp_path / "X.npz").write_bytes(content)
    refused(run("observe", "--hidden-states", tmp_path / "X.npz", "--out", tmp_path / out), "X.npz", "CRC")
    X[2, 3] = np.nan
    np.save(tmp_path / "X.npy", X)
    refused(run("observe", "--hidden-states", tmp_path / "X.npy", "--out", tmp_path / out), "layer 3, network 2", "NaN")
    refused(run("observe", "--hidden-states", tmp_path / "X.csv", "--out", tmp_path / out), "X.csv", "no such file")
    assert files(tmp_path) == ["X.npy", "X.npz"]


def test_simulate_writes_paths(tmp_path):
    # Tokens and times of the predictions of a fit, whose program this is.
    result = run("simulate", "--paths", 8, "--times", 8, "--time", 0.1, "--tokens", 3, "--out", tmp_path / "paths.nc")
    assert result.exit_code == 0, result.output
    with xr.open_dataset(tmp_path / "paths.nc", engine="h5netcdf") as paths:
        assert dict(paths.sizes) == {"path": 8, "time": 9, "token_a": 3, "token_b": 3}
        assert paths["time"].values[-1] == 0.1


@pytest.mark.parametrize(("observed", "model"), [("4", si.models.thinned_path), ("outputs", si.models.outputs)])
def test_layers_that_are_not_observed_are_latent(observed, model, tmp_path, monkeypatch):
    """By the model that is fitted; `test_latent` fits it."""
    fits, result = [], xr.DataTree.from_dict({"posterior": xr.Dataset({"gamma": 0.5})})
    monkeypatch.setattr(si, "fit", lambda *given, **options: fits.append((*given, options)) or result)
    small = ("--architecture", "feedforward", "--tokens", 2, "--width", 64, "--depth", 12, "--networks", 4)
    run("observe", *small, "--observe-every", observed, "--outputs", 8, "--out", tmp_path / "data.nc")
    assert run("fit", tmp_path / "data.nc", "--fix", "c_mean=0.5", "--out", tmp_path / "post.nc").exit_code == 0
    ((fitted, data, options),) = fits
    assert fitted is model
    assert options["prior"] == {"c_mean": 0.5}
    assert data["layer"].values.tolist() == ([0, 12] if observed == "outputs" else [0, 4, 8, 12])


@pytest.mark.long
def test_what_is_in_the_way_of_the_results_is_left_alone(tmp_path, post, monkeypatch):
    monkeypatch.setattr(_fits, "write_results", lambda _, folder: (folder / "report.html").write_text(""))
    (tmp_path / "out" / "report.html").mkdir(parents=True)
    refused(run("report", post, "--out", tmp_path / "out"), "report.html", "something else")
    assert files(tmp_path / "out") == []


def test_prompts_and_masks_of_sampled_networks(tmp_path):
    sizes = ("--width", 32, "--depth", 2, "--networks", 3, "--tokens", 2)
    out = ("--out", tmp_path / "data.nc")
    assert run("observe", *sizes, "--architecture", "attention", "--prompts", 2, "--causal", *out).exit_code == 0
    data = read(tmp_path / "data.nc")
    assert data.sizes["token_a"] == 4
    assert (data.attrs["causal"], data.attrs["prompts"]) == (1, "2,2")
    refused(run("fit", tmp_path / "data.nc", "--prompts", 3), "--prompts: 4 tokens are not 3 prompts of equal length")


@pytest.fixture(scope="module")
def unusable(data, post, tmp_path_factory):
    """A folder of files that commands cannot use, beside two that they can."""
    folder = tmp_path_factory.mktemp("unusable")
    networks, fitted = read(data), read_posterior(post)
    write(networks, folder / "data.nc")
    write(networks.drop_attrs(deep=False), folder / "nameless.nc")
    asymmetric = networks.copy(deep=True)
    asymmetric["covariance"][1, 2, 0, 1] += 0.5
    write(asymmetric, folder / "asymmetric.nc")
    (folder / "text.nc").write_text("text")
    (folder / "bad.npy").write_bytes(b"no array")
    xr.DataTree.from_dict({"posterior": xr.Dataset({"mu": 1.0})}).to_netcdf(folder / "mu.nc", engine="h5netcdf")
    groups = {name: node.to_dataset() for name, node in fitted.children.items() if name != "constant_data"}
    xr.DataTree.from_dict(groups).to_netcdf(folder / "partial.nc", engine="h5netcdf")
    return folder


REFUSED = {
    "calibrate --gamma 1.5": ("gamma", "(0, 1]", "1.5"),
    "calibrate --observe-every some": ("--observe-every", "last", "outputs", "some"),
    "calibrate --tokens 1": ("tokens", "tau0", "one token"),
    "calibrate --tokens 1 --prompts 2": ("pattern", "tau0", "attend to one token each"),
    "calibrate --architecture rnn": ("--architecture", "rnn", "transformer"),
    "calibrate --tokens many": ("--tokens",),
    f"calibrate --seed {10**30}": ("--seed",),
    "calibrate --data data.nc --gamma 0.3": ("--gamma",),
    "calibrate --data asymmetric.nc": ("asymmetric.nc", "network 1, layer 2", "not symmetric"),
    "calibrate --data nameless.nc": ("--architecture: the data do not name one; give",),
    "calibrate --data no.nc": ("no.nc", "no such file"),
    "calibrate --out text.nc": ("text.nc", "is a file, not a folder"),
    "calibrate --out text.nc/out": ("out", "cannot be written"),
    "fit nameless.nc": ("--architecture: the data do not name one; give",),
    "fit text.nc": ("text.nc", "cannot be read as NetCDF"),
    "fit data.nc --fix tau0=warm": ("--fix", "NAME=NUMBER", "tau0=warm"),
    "fit data.nc --fix tau=1": ("prior", "transformer samples gamma, tau0", "'tau'"),
    "check mu.nc": ("mu.nc", "not the result of a fit"),
    "report partial.nc": ("which has the groups constant_data",),
    "observe --hidden-states bad.npy": ("bad.npy",),
    "observe --architecture mlp --causal": ("--causal: mlp has none",),
    "simulate --paths 2 --out none/paths.nc": ("paths.nc", "cannot be written"),
}


@pytest.mark.parametrize("command", REFUSED)
def test_what_cannot_be_used_is_refused_in_one_line_and_leaves_nothing(command, unusable, monkeypatch):
    monkeypatch.chdir(unusable)
    before = sorted(unusable.rglob("*"))
    refused(run(*command.split()), *REFUSED[command])
    assert sorted(unusable.rglob("*")) == before
