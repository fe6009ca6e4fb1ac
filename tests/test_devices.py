"""Results do not depend on the number of devices; four devices of one CPU stand for those of an accelerator."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import sdeinfer as si
from sdeinfer import _devices
from sdeinfer._threads import in_threads
from sdeinfer.infer import _placed, placed

RUNS = Path(__file__).with_name("device_runs.py")
ROUNDING = 1e-9
"""Of Metropolis chains that are compiled for one device and for several: they accept and reject alike."""


def results(name: str, devices: int, folder: Path) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Arrays of a run with so many devices, and what it reports."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    file = folder / f"{name}_{devices}.npz"
    command = [sys.executable, str(RUNS), name, str(file)]
    run = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"XLA_FLAGS": flags})
    with np.load(file) as arrays:
        return dict(arrays), json.loads(run.stdout)


@pytest.mark.parametrize("name", [pytest.param("paths", marks=pytest.mark.long), "chain"])
def test_paths_and_networks_are_the_same_bits_on_four_devices(name, tmp_path):
    one, alone = results(name, 1, tmp_path)
    four, together = results(name, 4, tmp_path)
    assert (alone["used"], together["used"]) == (1, 4)
    for key, value in one.items():
        np.testing.assert_array_equal(four[key], value)
    if name == "chain":
        assert together["chosen"] == [3]
        np.testing.assert_array_equal(four["chosen"], four["covariance"])


@pytest.mark.slow
def test_chains_with_latent_layers_are_the_same_on_four_devices(tmp_path):
    one, alone = results("bridges", 1, tmp_path)
    four, together = results("bridges", 4, tmp_path)
    assert (alone["used"], together["used"]) == (1, 4)
    assert np.ptp(one["gamma"]) > 0
    for key, value in one.items():
        np.testing.assert_allclose(four[key], value, rtol=ROUNDING)


@pytest.mark.parametrize(("size", "count"), [(256, 4), (6, 3), (5, 1), (1, 1), (2, 2)])
def test_as_many_devices_as_divide_a_batch(size, count, monkeypatch):
    monkeypatch.setattr(_devices, "local_devices", lambda: 4 * jax.devices()[:1])
    assert len(_devices.devices_for(size)) == count


def test_a_default_device_is_the_only_one(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda backend=None: 4 * jax.devices()[:1])
    assert len(_devices.local_devices()) == 4
    for chosen in (jax.devices()[0], "cpu"):
        with jax.default_device(chosen):
            assert _devices.local_devices() == jax.devices()[:1]


def test_threads_have_the_precision_and_the_device_of_the_thread_that_starts_them():
    def settings(_: int) -> tuple[bool, object]:
        return jax.config.jax_enable_x64, jax.config.jax_default_device

    with jax.enable_x64(False), jax.default_device("cpu"):  # noqa: FBT003
        assert in_threads(settings, range(5)) == 5 * [(False, "cpu")]
    assert in_threads(settings, range(5), alone=0) == 5 * [(True, None)]


def test_fits_run_beside_an_accelerator_unless_the_caller_chose_a_device(monkeypatch):
    device = placed(lambda model: jax.config.jax_default_device)
    assert device(si.models.full_path) is None
    monkeypatch.setattr(_placed, "on_cpu", lambda: False)
    assert device(si.models.full_path) == jax.local_devices(backend="cpu")[0]
    assert device(si.models.thinned_path) is None
    with jax.default_device("cpu"):
        assert device(si.models.full_path) == "cpu"

    def without_a_cpu(backend: str | None = None) -> None:
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", without_a_cpu)
    assert device(si.models.full_path) is None
