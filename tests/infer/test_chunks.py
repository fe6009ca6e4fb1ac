"""Fits of data in chunks against those of the same data in memory, and against themselves on other workers."""

import os
import signal
import threading

import dask
import jax
import jax.random as jr
import numpy as np
import pytest
from conftest import WARMUP

import sdeinfer as si
from sdeinfer.infer import in_range, problem_of
from sdeinfer.infer._survey import survey
from sdeinfer.layers import Architecture
from sdeinfer.likelihood import Assumptions, any_transitions, chunked_path, path_layout, path_statistics, used_of
from sdeinfer.observation import open_in_chunks, write

FULL_PATH = si.models.full_path
MEASURES = {"logit_spread", "attention_growth", "relu_growth"}
SETTINGS = {"chains": 2, "draws": 60, "warmup": WARMUP, "predictions": 20}


@pytest.fixture
def store(networks, tmp_path, monkeypatch):
    """Eight chunks of three networks each."""
    monkeypatch.setattr("sdeinfer.observation._chunks.LEAST", 1)
    part = networks.copy()
    part["covariance"].encoding = {"chunks": (3, *networks["covariance"].shape[1:])}
    write(part, tmp_path / "data.zarr")
    return tmp_path / "data.zarr"


@pytest.fixture
def chunks(store):
    return open_in_chunks(store)


def examined(data):
    return survey(data, MEASURES, leave_out_damaged=False)


def of_two_widths(data):
    return data.assign_coords(width=("network", np.where(np.arange(24) % 5 < 2, 96, 128)))


@pytest.mark.parametrize("change", [lambda data: data, of_two_widths])
def test_statistics(networks, chunks, change):
    data, whole = change(networks), any_transitions(change(networks))
    path = chunked_path(examined(change(chunks)))
    layout, own = path_layout(whole), path_layout(path)
    for here, there in zip(layout, own, strict=True):  # ranges and means of the same transitions
        np.testing.assert_array_equal(here, there)
    expected, found = path_statistics(whole, layout, pooled=True), path_statistics(path, layout)
    assert len(found.constant) == len(np.unique(data["width"]))
    for name in ("weights", "constant", "nodes", "widths"):
        x, y = (np.asarray(getattr(each, name)) for each in (expected, found))
        np.testing.assert_allclose(y, x, rtol=1e-12, atol=1e-13 * np.abs(x).max())


def test_transitions_in_memory_are_the_same(networks, chunks):
    whole, path = any_transitions(networks), chunked_path(examined(chunks))
    chosen = np.array([0, 7, 31, 100, 239])
    for here, there in [(whole.take(chosen), path.take(chosen)), (whole.thinned(50), path.thinned(50))]:
        np.testing.assert_array_equal(here.starts(slice(None)), there.starts(slice(None)))
        np.testing.assert_array_equal(here.ends(slice(None)), there.ends(slice(None)))
    near = path.with_nearby(np.arange(0, 240, 3)).take(np.array([3, 99, 12]))
    np.testing.assert_array_equal(near.starts(slice(None)), whole.take(np.array([3, 12, 99])).starts(slice(None)))


def test_many_transitions_stay_in_chunks(networks, chunks, monkeypatch):
    monkeypatch.setattr("sdeinfer.likelihood._chunked_path.GATHERED", 16 * 9 * 20)
    path, chosen = chunked_path(examined(chunks)).take(np.arange(0, 240, 2)), np.arange(0, 240, 2)
    assert isinstance(path, type(chunked_path(examined(chunks))))
    expected = path_statistics(any_transitions(networks).take(chosen), pooled=True)
    np.testing.assert_allclose(path_statistics(path).constant, expected.constant, rtol=1e-12)


@pytest.mark.parametrize("largest_logit", [0.6, 0.15])
def test_range(networks, chunks, largest_logit):
    assumptions = Assumptions(Architecture("transformer"))
    expected, pilot = in_range(problem_of(FULL_PATH, assumptions), networks, largest_logit)
    found, same = in_range(problem_of(FULL_PATH, assumptions), examined(chunks), largest_logit)
    np.testing.assert_array_equal(used_of(found), used_of(expected))
    np.testing.assert_allclose(same["pilot_tau0"], pilot["pilot_tau0"], rtol=1e-6)
    assert used_of(expected).mean() < 1 or largest_logit == 0.6


def test_without_attention_all_are_in_range(chunks):
    data = survey(chunks, {"relu_growth"}, leave_out_damaged=False)
    found, pilot = in_range(problem_of(FULL_PATH, Assumptions(Architecture("mlp"))), data, 0.6)
    assert used_of(found).all()
    assert not pilot


def test_prepared(networks, chunks):
    expected, found = si.prepare(FULL_PATH, networks).pooled(), si.prepare(FULL_PATH, chunks)
    for x, y in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(y, x, rtol=1e-6, atol=1e-9 * np.abs(x).max())


def test_fit_and_check(networks, chunks, monkeypatch):
    with dask.config.set(scheduler="synchronous"):
        post = si.fit(FULL_PATH, chunks, **SETTINGS, key=jr.key(1))
    assert post["log_likelihood"].sizes["network"] == post.attrs["networks"] == 24
    np.testing.assert_array_equal(post["observed_data"]["covariance"], networks["covariance"])
    of_data = si.check(post, chunks)

    monkeypatch.setattr("sdeinfer.infer._survey.KEPT", 8)
    some = si.fit(FULL_PATH, chunks, **SETTINGS, key=jr.key(1))  # by threads
    for name, draws in post["posterior"].data_vars.items():
        np.testing.assert_array_equal(draws, some["posterior"][name])
    assert some["posterior_predictive"].sizes["network"] == some["log_likelihood"].sizes["network"] == 8
    assert some["observed_data"]["network"].values.tolist() == [0, 3, 7, 10, 13, 16, 20, 23]
    of_some = si.check(some)
    assert "layers and predictions are checked on 8 of 24 networks" in of_some.notes
    assert [each.name for each in of_data.verdicts] == [each.name for each in of_some.verdicts]
    # The scatter of the networks that were kept stands for that of all.
    table = si.diagnostics.consequences(some).loc["scatter of networks"]
    assert (table.drop(["effect", "z", "p"]) < 2).all()


def test_damaged_networks_are_left_out_on_request(store):
    (store / "covariance" / "2.0.0.0").write_bytes(b"nothing")
    with pytest.raises(si.InputError, match="networks 6 to 8 cannot be read"):
        si.prepare(FULL_PATH, open_in_chunks(store))
    found = survey(open_in_chunks(store), MEASURES, leave_out_damaged=True)
    assert np.flatnonzero(~used_of(found).any(axis=1)).tolist() == [6, 7, 8]
    assert found.attrs["damaged_networks"] == 3
    without = np.delete(np.arange(24), [6, 7, 8])
    expected = path_statistics(any_transitions(open_in_chunks(store).isel(network=without).load()), pooled=True)
    np.testing.assert_allclose(path_statistics(chunked_path(found)).constant, expected.constant, rtol=1e-12)


def test_what_data_in_chunks_are_not_for(networks, chunks):
    with pytest.raises(si.InputError, match="models.full_path"):
        si.prepare(si.models.thinned_path, chunks)
    with pytest.raises(si.InputError, match="every layer was observed"):
        si.prepare(FULL_PATH, chunks.isel(layer=slice(None, None, 2)))
    with pytest.raises(si.InputError, match="transitions: data in chunks"):
        si.transitions(chunks)
    with pytest.raises(si.InputError, match="leave_out_damaged"):
        si.fit(FULL_PATH, networks, leave_out_damaged=True, key=jr.key(0))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::DeprecationWarning")
def test_workers_change_no_bit(chunks, monkeypatch):
    distributed = pytest.importorskip("distributed")
    with dask.config.set(scheduler="synchronous"):
        expected = si.fit(FULL_PATH, chunks, **SETTINGS, key=jr.key(1))["posterior"].to_dataset()
    for workers, killed in [(1, False), (2, False), (2, True)]:
        sizes = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": "127.0.0.1:0"}
        with distributed.LocalCluster(**sizes) as cluster, distributed.Client(cluster) as client:
            pids = list(client.run(os.getpid).values())
            if killed:
                threading.Timer(1.0, os.kill, (pids[0], signal.SIGKILL)).start()
            found = si.fit(FULL_PATH, chunks, **SETTINGS, key=jr.key(1))["posterior"].to_dataset()
            assert (pids[0] in client.run(os.getpid).values()) is not killed
        for name, draws in expected.data_vars.items():
            np.testing.assert_array_equal(draws, found[name])
