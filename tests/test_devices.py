"""Where programs run: in threads as in the thread that starts them, and fits beside an accelerator."""

import jax
from helpers.internals import _assume, in_threads, placed

import sdeinfer as si


def test_threads_have_the_precision_and_the_device_of_the_thread_that_starts_them():
    def settings(_: int) -> tuple[bool, object]:
        return jax.config.jax_enable_x64, jax.config.jax_default_device

    with jax.enable_x64(False), jax.default_device("cpu"):  # noqa: FBT003
        assert in_threads(settings, range(5)) == 5 * [(False, "cpu")]
    assert in_threads(settings, range(5), alone=0) == 5 * [(True, None)]


def test_fits_run_beside_an_accelerator_unless_the_caller_chose_a_device(monkeypatch):
    device = placed(lambda model: jax.config.jax_default_device)
    assert device(si.models.full_path) is None
    monkeypatch.setattr(_assume, "on_cpu", lambda: False)
    assert device(si.models.full_path) == jax.local_devices(backend="cpu")[0]
    assert device(si.models.thinned_path) is None
    with jax.default_device("cpu"):
        assert device(si.models.full_path) == "cpu"

    def without_a_cpu(backend: str | None = None) -> None:
        raise RuntimeError("Unknown backend cpu")

    monkeypatch.setattr(jax, "local_devices", without_a_cpu)
    assert device(si.models.full_path) is None
