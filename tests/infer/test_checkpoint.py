"""A fit that is killed and goes on has the draws of one that was never interrupted, bit for bit."""

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import time

import jax.random as jr
import numpy as np
import pytest

import sdeinfer as si
from sdeinfer.infer import Checkpoint, nuts, prepare
from sdeinfer.infer import _nuts as runner
from sdeinfer.layers import Architecture
from sdeinfer.observation import read_posterior, write

PROGRAM = si.models.full_path.given(architecture=Architecture("feedforward"), law="limit")
SIZES = {"chains": 2, "draws": 40, "warmup": 50, "key": jr.key(5)}


class Killed(Exception):
    pass


@pytest.fixture(scope="module")
def prepared():
    V0 = si.equicorrelated(tokens=2, correlation=0.2, norm=1.0)
    layer = si.ResidualFeedForward(0.6, 1.0, -1.0)
    return prepare(PROGRAM, si.sample_networks(layer, V0, width=64, depth=5, networks=8, key=jr.key(1)))


def killed_after(chunks: int, monkeypatch, prepared, checkpoint: Checkpoint) -> None:
    """Run until so many chunks are done."""
    advance, calls = runner._advance, itertools.count()

    def advance_or_die(*arguments):
        # The first call compiles, without any iterations; then there is one for each chain and chunk.
        if next(calls) == 1 + SIZES["chains"] * chunks:
            raise Killed
        return advance(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_advance", advance_or_die)
        with pytest.raises(Killed):
            nuts(PROGRAM, prepared, **SIZES, checkpoint=checkpoint)


@pytest.fixture
def short_chunks(monkeypatch):
    monkeypatch.setattr(runner, "CHUNK", 20)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("chunks", [0, 1, 2, 3, 4])
def test_a_fit_that_goes_on_has_the_draws_of_one_that_was_not_interrupted(chunks, tmp_path, monkeypatch, prepared):
    whole = nuts(PROGRAM, prepared, **SIZES)
    path = tmp_path / "fit.checkpoint"
    killed_after(chunks, monkeypatch, prepared, Checkpoint(path))
    assert path.exists() == (chunks > 0)
    resumed = nuts(PROGRAM, prepared, **SIZES, checkpoint=Checkpoint(path, resume=True))
    for one, other in zip(whole, resumed, strict=True):
        assert set(one) == set(other)
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    Checkpoint(path).remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("short_chunks")
def test_a_finished_fit_is_not_run_again(tmp_path, monkeypatch, prepared):
    checkpoint = Checkpoint(tmp_path / "fit.checkpoint", resume=True)
    first = nuts(PROGRAM, prepared, **SIZES, checkpoint=checkpoint)
    monkeypatch.setattr(runner, "_advance", None)
    again = nuts(PROGRAM, prepared, **SIZES, checkpoint=checkpoint)
    np.testing.assert_array_equal(first.samples["gamma"], again.samples["gamma"])


@pytest.mark.usefixtures("short_chunks")
def test_checkpoints_of_other_fits_are_refused(tmp_path, monkeypatch, prepared):
    checkpoint = Checkpoint(tmp_path / "fit.checkpoint", resume=True)
    killed_after(2, monkeypatch, prepared, checkpoint)
    others = ({"key": jr.key(6)}, {"draws": 41}, {"warmup": 60}, {"chains": 3}, {"draws": 0, "warmup": 504})
    for change in others:
        with pytest.raises(si.InputError, match="fit.checkpoint: is the checkpoint of another fit"):
            nuts(PROGRAM, prepared, **(SIZES | change), checkpoint=checkpoint)
    with pytest.raises(si.InputError, match="is the checkpoint of another fit"):
        nuts(PROGRAM, dataclasses.replace(prepared, constant=prepared.constant + 1), **SIZES, checkpoint=checkpoint)
    with pytest.raises(si.InputError, match="is the checkpoint of another fit"):
        nuts(PROGRAM.given(architecture=Architecture("mlp")), prepared, **SIZES, checkpoint=checkpoint)
    # Without resuming it is written anew.
    before = checkpoint.file.read_bytes()
    nuts(PROGRAM, prepared, **(SIZES | {"draws": 41}), checkpoint=Checkpoint(checkpoint.path))
    assert checkpoint.file.read_bytes() != before


@pytest.mark.usefixtures("short_chunks")
def test_the_fit_of_both_laws_goes_on_in_either(tmp_path, monkeypatch, networks):
    settings = {"law": "both", "chains": 1, "draws": 20, "warmup": 20, "predictions": 1, "key": jr.key(1)}
    whole = si.fit(si.models.full_path, networks, **settings)
    advance, calls = runner._advance, itertools.count()

    def die_in_the_second_law(*arguments):
        # Each law calls once to compile, and once for each of its two chunks.
        if next(calls) == 5:
            raise Killed
        return advance(*arguments)

    monkeypatch.setattr(runner, "_advance", die_in_the_second_law)
    checkpoint = Checkpoint(str(tmp_path / "fit.checkpoint"), resume=True)
    with pytest.raises(Killed):
        si.fit(si.models.full_path, networks, **settings, checkpoint=checkpoint)
    resumed = si.fit(si.models.full_path, networks, **settings, checkpoint=checkpoint)
    for group in ("posterior", "limit_posterior"):
        np.testing.assert_array_equal(resumed[group]["gamma"], whole[group]["gamma"])
    assert checkpoint.beside().file.exists()
    (tmp_path / "fit.checkpoint-notes").touch()
    checkpoint.remove()
    assert [path.name for path in tmp_path.iterdir()] == ["fit.checkpoint-notes"]


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", "array", "arrays"])
def test_what_is_not_a_checkpoint_is_refused(content, tmp_path, prepared):
    path = tmp_path / "fit.checkpoint"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        with path.open("wb") as file:
            np.save(file, np.zeros(3)) if content == "array" else np.savez(file, other=np.zeros(3))
    with pytest.raises(si.InputError, match="fit.checkpoint: cannot be read as a checkpoint"):
        nuts(PROGRAM, prepared, **SIZES, checkpoint=Checkpoint(path, resume=True))


@pytest.mark.slow
def test_kill_minus_nine_at_random_moments(tmp_path, networks):
    """Ten times `sdeinfer fit`, killed, and then told to resume."""
    write(networks, tmp_path / "data.nc")
    program = "import sys; from sdeinfer import cli; sys.argv[0] = 'sdeinfer'; cli.app()"

    def command(out: str, *options: str) -> list[str]:
        sizes = ["--draws", "3000", "--warmup", "1000", "--out", str(tmp_path / out), *options]
        return [sys.executable, "-c", program, "fit", str(tmp_path / "data.nc"), *sizes]

    started = time.perf_counter()
    subprocess.run(command("whole.nc"), check=True, capture_output=True)
    seconds = time.perf_counter() - started
    whole = read_posterior(tmp_path / "whole.nc")["posterior"].to_dataset()
    rng, resumed_from = np.random.default_rng(0), []
    for number in range(10):
        out = f"killed_{number}.nc"
        process = subprocess.Popen(command(out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.3, 1.0) * seconds)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        resumed_from.append((tmp_path / f"{out}.checkpoint").exists())
        subprocess.run(command(out, "--resume"), check=True, capture_output=True)
        assert not (tmp_path / f"{out}.checkpoint").exists()
        draws = read_posterior(tmp_path / out)["posterior"].to_dataset()
        for name in whole:
            np.testing.assert_array_equal(draws[name], whole[name])
    print(f"\na fit took {seconds:.0f} s; of ten kills {sum(resumed_from)} left a checkpoint")
    assert any(resumed_from)
