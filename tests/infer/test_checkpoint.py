"""A fit that is killed and goes on has the draws of one that was never interrupted, bit for bit."""

import dataclasses
import itertools
import os
import signal
import subprocess
import sys
import time

import jax
import jax.random as jr
import numpy as np
import pytest

import sdeinfer as si
from sdeinfer.infer import NUTS, Checkpoint
from sdeinfer.infer import _samplers as runner
from sdeinfer.infer._checkpoint import fingerprint
from sdeinfer.infer._prepare import prepare_for
from sdeinfer.layers import Architecture
from sdeinfer.likelihood import Assumptions
from sdeinfer.observation import read_posterior, write

FULL_PATH = si.models.full_path
FEEDFORWARD = Assumptions(Architecture("feedforward"), "limit")
SIZES = {"chains": 2, "draws": 40, "warmup": 50, "key": jr.key(5)}


class Killed(Exception):
    pass


def sampled(prepared, checkpoint: Checkpoint | None = None, *, key, **sizes: int):
    return NUTS(**sizes).sample(FULL_PATH, prepared, checkpoint=checkpoint, key=key)


@pytest.fixture(scope="module")
def data():
    V0 = si.equicorrelated(tokens=2, correlation=0.2, norm=1.0)
    layer = si.ResidualFeedForward(0.6, 1.0, -1.0)
    return si.sample_networks(layer, V0, width=64, depth=5, networks=8, key=jr.key(1))


@pytest.fixture(scope="module")
def prepared(data):
    return prepare_for(FULL_PATH, data, FEEDFORWARD)


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
            sampled(prepared, checkpoint, **SIZES)


@pytest.fixture
def short_chunks(monkeypatch):
    monkeypatch.setattr(runner, "CHUNK", 20)


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.parametrize("chunks", [0, 1, 2, 3, 4])
def test_a_fit_that_goes_on_has_the_draws_of_one_that_was_not_interrupted(chunks, tmp_path, monkeypatch, prepared):
    whole = sampled(prepared, **SIZES)
    path = tmp_path / "fit.checkpoint"
    killed_after(chunks, monkeypatch, prepared, Checkpoint(path))
    assert path.exists() == (chunks > 0)
    resumed = sampled(prepared, Checkpoint(path, resume=True), **SIZES)
    jax.tree.map(np.testing.assert_array_equal, resumed._asdict(), whole._asdict())
    Checkpoint(path).remove()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("short_chunks")
@pytest.mark.usefixtures("unchecked")
def test_a_finished_fit_is_not_run_again(tmp_path, monkeypatch, prepared):
    checkpoint = Checkpoint(tmp_path / "fit.checkpoint", resume=True)
    first = sampled(prepared, checkpoint, **SIZES)
    monkeypatch.setattr(runner, "_advance", None)
    again = sampled(prepared, checkpoint, **SIZES)
    np.testing.assert_array_equal(first.samples["gamma"], again.samples["gamma"])


@pytest.mark.usefixtures("short_chunks")
def test_checkpoints_of_other_fits_are_refused(tmp_path, monkeypatch, prepared):
    checkpoint = Checkpoint(tmp_path / "fit.checkpoint", resume=True)
    killed_after(2, monkeypatch, prepared, checkpoint)
    others = ({"key": jr.key(6)}, {"draws": 41}, {"warmup": 60}, {"chains": 3})
    for change in others:
        with pytest.raises(si.InputError, match="fit.checkpoint: is the checkpoint of another fit"):
            sampled(prepared, checkpoint, **(SIZES | change))
    with pytest.raises(si.InputError, match="is the checkpoint of another fit"):
        sampled(dataclasses.replace(prepared, constant=prepared.constant + 1), checkpoint, **SIZES)
    with pytest.raises(si.InputError, match="is the checkpoint of another fit"):
        sampled(
            dataclasses.replace(prepared, assumptions=Assumptions(Architecture("mlp"), "limit")), checkpoint, **SIZES
        )
    # Without resuming it is written anew.
    before = checkpoint.file.read_bytes()
    sampled(prepared, Checkpoint(checkpoint.path), **(SIZES | {"draws": 41}))
    assert checkpoint.file.read_bytes() != before


def test_numbers_of_a_fingerprint_do_not_run_together():
    # Draws, warmup and chunk, whose digits in a row are the same.
    assert fingerprint(40, 50, 20) != fingerprint(4, 0, 5020)
    assert fingerprint(40, 50, 20) == fingerprint(40, 50, 20)


@pytest.mark.usefixtures("short_chunks")
def test_the_fit_of_both_laws_goes_on_in_either(tmp_path, monkeypatch, data):
    # Of the others' warmup, which is compiled in.
    sizes = {"chains": 1, "draws": 20, "warmup": SIZES["warmup"], "predictions": 1}
    settings = {"architecture": "feedforward", "law": "both", **sizes, "key": jr.key(1)}
    whole = si.fit(si.models.full_path, data, **settings)
    advance, calls = runner._advance, itertools.count()

    def die_in_the_second_law(*arguments):
        # Each law calls once to compile, and once for each of its four chunks.
        if next(calls) == 8:
            raise Killed
        return advance(*arguments)

    monkeypatch.setattr(runner, "_advance", die_in_the_second_law)
    checkpoint = Checkpoint(str(tmp_path / "fit.checkpoint"), resume=True)
    with pytest.raises(Killed):
        si.fit(si.models.full_path, data, **settings, checkpoint=checkpoint)
    resumed = si.fit(si.models.full_path, data, **settings, checkpoint=checkpoint)
    for group in ("posterior", "limit_posterior"):
        np.testing.assert_array_equal(resumed[group]["gamma"], whole[group]["gamma"])
    assert checkpoint.for_limit().file.exists()
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
        sampled(prepared, Checkpoint(path, resume=True), **SIZES)


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
