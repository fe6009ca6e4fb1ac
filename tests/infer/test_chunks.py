"""Fits of data in chunks against those of the same data in memory, and against themselves on other workers."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import dask
import jax
import jax.random as jr
import numpy as np
import pytest
from helpers.fits import AtTheMode
from helpers.internals import densities_at, map_chunks, open_in_chunks

import sdeinfer as si
from sdeinfer.observation import write

FULL_PATH = si.models.full_path
SETTINGS = {"sampler": AtTheMode(chains=2, draws=60), "predictions": 20}


@pytest.fixture
def store(networks, tmp_path, monkeypatch):
    """Eight chunks of three networks each, of which one in three is in memory."""
    monkeypatch.setattr("sdeinfer.infer._chunks.NETWORKS_IN_MEMORY", 8)
    part = networks.copy()
    part["covariance"].encoding = {"chunks": (3, *networks["covariance"].shape[1:])}
    write(part, tmp_path / "data.zarr")
    return tmp_path / "data.zarr"


@pytest.fixture
def chunks(store):
    return open_in_chunks(store)


def of_two_widths(data):
    return data.assign_coords(width=("network", np.where(np.arange(24) % 5 < 2, 96, 128)))


@pytest.mark.one_case
@pytest.mark.parametrize("law", ["limit", "finite-width"])
def test_sums_over_chunks_are_the_statistics(networks, chunks, law, monkeypatch):
    """With every network in memory, the range and the adjustment are the same, and so are densities."""
    monkeypatch.setattr("sdeinfer.infer._chunks.NETWORKS_IN_MEMORY", 24)
    whole, found = (si.prepare(FULL_PATH, of_two_widths(data), law=law) for data in (networks, chunks))
    assert len(found.constant) == 2
    for x, y in zip(jax.tree.leaves(whole.adjustment), jax.tree.leaves(found.adjustment), strict=True):
        # The mode is found to 1e-3 of a standard deviation, and that decides which layers are drawn for the scatter: up
        # to 4e-3 for four keys.
        np.testing.assert_allclose(y, x, rtol=5e-3, atol=5e-3)
    kind = whole.assumptions.kind
    values = {"gamma": [0.6, 0.62, 0.57], "tau0": [1.0, 0.9, 1.1], "c_plus": [1.0, 1.0, 0.9], "c_minus": [-3.0] * 3}
    u = kind.coordinates.unconstrained({name: np.array(each) for name, each in values.items()}).T
    expected, densities = (densities_at(path, kind, u).sum(axis=1) for path in (whole, found))
    np.testing.assert_allclose(densities, expected, rtol=1e-9 if law == "limit" else 5e-3)


@pytest.mark.long
def test_fit_and_check(fitted, checked, chunks):
    """Against the fit of the networks in memory; draws at the mode, whose widths are those of the curvature."""
    post = si.fit(FULL_PATH, chunks, **SETTINGS, key=jr.key(1))
    assert post.attrs["networks"] == 24
    assert post.attrs["left_out"] == pytest.approx(fitted.attrs["left_out"], abs=0.1)
    assert post.attrs["left_out"] == 1 - post.attrs["used_transitions"] / 240
    one, other = (each["posterior"]["gamma"] for each in (post, fitted))  # τ0 is hardly identified by 24 networks
    assert abs(float(one.mean() - other.mean())) < 0.6 * float(other.std())
    assert 0.6 < float(one.std() / other.std()) < 1.6
    assert post["posterior_predictive"].sizes["network"] == post["log_likelihood"].sizes["network"] == 8
    assert post["observed_data"]["network"].values.tolist() == [0, 3, 7, 10, 13, 16, 20, 23]
    found = si.check(post, chunks)
    assert "layers and predictions are checked on 8 of 24 networks" in found.notes
    # What is asked of the sampler and of τ0 depends on the draws.
    of_law, of_all = ([each.name for each in own.verdicts if each.topic == "calibrated"] for own in (found, checked))
    assert len(of_law) >= 3
    assert of_law == [name for name in of_all if name != "noise of one layer"]  # which takes 16 networks


def test_layouts_hold_other_networks(chunks, monkeypatch):
    """Two networks are in memory; transitions far from theirs are left out, and counted."""
    monkeypatch.setattr("sdeinfer.infer._chunks.NETWORKS_IN_MEMORY", 2)
    post = si.fit(FULL_PATH, chunks, law="limit", largest_logit=np.inf, **SETTINGS, key=jr.key(1))
    assert 150 < post.attrs["used_transitions"] <= 240
    assert post.attrs["left_out"] == 1 - post.attrs["used_transitions"] / 240


@pytest.mark.long
def test_marks_are_kept_and_without_attention_all_are_in_range(chunks):
    used = np.arange(24)[:, None] % 2 + np.zeros((1, 11)) > 0
    marked = chunks.assign(used=(("network", "layer"), used))
    post = si.fit(FULL_PATH, marked, architecture="mlp", law="limit", **SETTINGS, key=jr.key(1))
    assert post.attrs["used_transitions"] == 120
    assert "pilot_tau0" not in post.attrs


def truncate(file):
    file.write_bytes(file.read_bytes()[:100])


def overwrite(file):
    file.write_bytes(b"\xff" * file.stat().st_size)


DAMAGES = [(truncate, "cannot be read"), (overwrite, "cannot be read"), (Path.unlink, "are NaN")]


@pytest.mark.parametrize(("damage", "what"), DAMAGES)
def test_damaged_chunks_are_named(store, damage, what):
    damage(store / "covariance" / "2.0.0.0")
    with pytest.raises(si.InputError, match=what) as error:
        si.prepare(FULL_PATH, open_in_chunks(store))
    assert str(store) in str(error.value)
    assert "networks 6 to 8" in str(error.value)
    assert "\n" not in str(error.value)


def test_damaged_chunks_are_left_out(store):
    for number, (damage, _) in enumerate(DAMAGES):
        damage(store / "covariance" / f"{number + 1}.0.0.0")
    post = si.fit(FULL_PATH, open_in_chunks(store), leave_out_damaged=True, law="limit", **SETTINGS, key=jr.key(1))
    assert post.attrs["damaged_networks"] == 9
    assert post.attrs["networks"] == 24
    assert post.attrs["used_transitions"] <= 150
    assert not set(range(3, 12)) & set(post["observed_data"]["network"].values)


def test_networks_that_are_no_covariances_are_found(networks, chunks):
    def prepared(V):
        return si.prepare(FULL_PATH, networks.assign(covariance=(networks["covariance"].dims, V)).chunk(network=4))

    faulty, twice = networks["covariance"].values.copy(), networks["covariance"].values.copy()
    faulty[5, 2] *= -1
    faulty[21, 3, 0, 0] = np.nan
    twice[5] = twice[4]
    with pytest.raises(
        si.InputError,
        match=r"^covariance: network 5, layer 2: not positive semi-definite.* \(and 1 more such chunks\)$",
    ):
        prepared(faulty)
    with pytest.raises(si.InputError, match="networks 4 and 5: the same covariance"):
        prepared(twice)


def test_what_data_in_chunks_are_not_for(networks, chunks, tmp_path):
    write(networks, tmp_path / "data.nc")
    refusals = {
        "models.full_path, not for thinned_path": lambda: si.prepare(si.models.thinned_path, chunks),
        "every layer was observed": lambda: si.prepare(FULL_PATH, chunks.isel(layer=slice(None, None, 2))),
        "leave_out_damaged": lambda: si.fit(FULL_PATH, networks, leave_out_damaged=True, key=jr.key(0)),
        "from Zarr": lambda: open_in_chunks(tmp_path / "data.nc"),
    }
    for message, call in refusals.items():
        with pytest.raises(si.InputError, match=message):
            call()
    np.testing.assert_array_equal(si.transitions(chunks).covariance, networks["covariance"])


def named(chunk: int) -> str:
    time.sleep(random.Random(chunk).random() / 200)  # threads end in another order
    return str(chunk)


@pytest.mark.parametrize("scheduler", ["synchronous", "threads"])
def test_results_are_in_the_order_of_the_chunks(scheduler):
    """In which sums are taken, so that their bits do not depend on the workers."""
    with dask.config.set(scheduler=scheduler):
        assert map_chunks(named, range(7), name="test") == [str(number) for number in range(7)]


def test_a_chunk_that_kills_workers_is_one_line(monkeypatch):
    class KilledWorker(Exception):
        """As that of `distributed`, which is not needed here."""

    def compute(*found, **settings):
        raise KilledWorker("Attempted to run task 4 times\nmore lines")

    monkeypatch.setattr("dask.base.compute", compute)
    message = r"^test: one chunk killed several workers.*\(Attempted to run task 4 times\)$"
    with pytest.raises(si.InputError, match=message):
        map_chunks(named, range(2), name="test")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_workers_change_no_bit(chunks):
    distributed = pytest.importorskip("distributed")
    with dask.config.set(scheduler="synchronous"):
        expected = si.fit(FULL_PATH, chunks, **SETTINGS, key=jr.key(1))["posterior"].to_dataset()
    for workers, killed in [(1, False), (2, False), (4, False), (2, True)]:
        sizes = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
        with distributed.LocalCluster(**sizes) as cluster, distributed.Client(cluster) as client:
            pids = list(client.run(os.getpid).values())
            if killed:
                threading.Timer(1.0, os.kill, (pids[0], signal.SIGKILL)).start()
            found = si.fit(FULL_PATH, chunks, **SETTINGS, key=jr.key(1))["posterior"].to_dataset()
            assert (pids[0] in client.run(os.getpid).values()) is not killed
        for name, draws in expected.data_vars.items():
            np.testing.assert_array_equal(draws, found[name])
