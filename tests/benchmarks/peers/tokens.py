"""A fit of m tokens, twice in one process: seconds and peak memory of its phases, and its posterior; a line of JSON."""

import argparse
import contextlib
import importlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import wraps
from pathlib import Path
from typing import Any

import arviz_stats
import jax
import jax.random as jr
import numpy as np

import sdeinfer as si

PHASES = {
    "range": [("sdeinfer.infer._fit", "range_to_fit")],
    "statistics": [("sdeinfer.infer._networks", "path_statistics")],
    "mode": [("sdeinfer.infer._networks", "posterior_mode")],
    "sandwich": [("sdeinfer.infer._networks", "sandwich")],
    "exact passes": [("sdeinfer.infer._networks", "shift_to_exact_mode")],
    "sampling": [("sdeinfer.infer._samplers", "in_chunks")],
    "densities": [("sdeinfer.infer._samplers", "draws_of")],
    "predictions": [("sdeinfer.infer._fit", "predict")],
}
"""Functions whose calls are timed."""


class Clock:
    """Seconds and peak memory of the phases, and seconds of compilation."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.memory: dict[str, float] = {}

    def watch(self) -> None:
        """Time the functions of `PHASES` and XLA's compiler."""
        for phase, functions in PHASES.items():
            for module, name in functions:
                of = importlib.import_module(module)
                setattr(of, name, self._timed(phase, getattr(of, name)))
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def _timed(self, phase: str, function: Any) -> Any:
        @wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            main = threading.current_thread() is threading.main_thread()
            if main:
                reset_peak()
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                if main:
                    self.seconds[phase] += time.perf_counter() - started
                    self.memory[phase] = max(self.memory.get(phase, 0.0), peak())

        return timed

    def _heard(self, event: str, duration: float, **details: str) -> None:
        del details
        if event == "/jax/core/compile/backend_compile_duration":
            self.seconds["compilation"] += duration

    @contextlib.contextmanager
    def run(self, found: dict[str, Any], name: str) -> Iterator[None]:
        self.seconds.clear()
        self.memory.clear()
        started, worked = time.perf_counter(), time.process_time()
        yield
        found[name] = {
            "seconds": time.perf_counter() - started,
            "cpu": time.process_time() - worked,
            "phases": dict(self.seconds),
            "memory": dict(self.memory),
        }


def reset_peak() -> None:
    """Let the peak of this process's memory start again (Linux)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak() -> float:
    """MiB at the peak since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return float(next(line.split()[1] for line in lines if line.startswith("VmHWM"))) / 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {
        "tokens": 4,
        "networks": 16,
        "depth": 32,
        "width": 1024,
        "seed": 0,
        "runs": 2,
        "draws": 250,
    }.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    jax.config.update("jax_enable_x64", True)  # noqa: FBT003
    sizes = {"width": asked.width, "depth": asked.depth, "networks": asked.networks}
    truth = si.ShapedTransformer(gamma=0.6, tau0=1.0, c_plus=2.0, c_minus=-2.0)
    V0 = si.equicorrelated(tokens=asked.tokens, correlation=0.2)
    found: dict[str, Any] = vars(asked) | {"terms": asked.tokens * (asked.tokens + 1) // 2}
    started = time.perf_counter()
    data = si.sample_networks(truth, V0, **sizes, key=jr.key(asked.seed))
    found["networks_seconds"] = time.perf_counter() - started
    clock = Clock()
    clock.watch()
    for number in range(asked.runs):
        with clock.run(found, f"run {number}"):
            post = si.fit(
                si.models.full_path, data, draws=asked.draws, warmup=asked.draws, predictions=40, key=jr.key(asked.seed)
            )
    found["peak"] = max(
        peak(), *(value for run in found.values() if isinstance(run, dict) for value in run["memory"].values())
    )
    draws = post["posterior"].to_dataset()
    for name, true in {"gamma": 0.6, "tau0": 1.0, "c_gap": 4.0}.items():
        mean, sd = float(draws[name].mean()), float(draws[name].std())
        found[name] = {"mean": mean, "sd": sd, "z": (mean - true) / sd}
    names = ["gamma", "tau0", "c_gap"]
    found["rhat"] = float(max(np.asarray(arviz_stats.rhat(draws[name])) for name in names))
    found["ess"] = float(min(np.asarray(arviz_stats.ess(draws[name])) for name in names))
    found["steps"] = float(post["sample_stats"]["n_steps"].mean())
    found["divergences"] = int(post["sample_stats"]["diverging"].sum())
    found["used"] = int(post["constant_data"]["used"].sum())
    found["spread"] = float(np.asarray(post.attrs.get("pilot_tau0", np.nan)).min())
    found["out_of_range"] = post.attrs.get("out_of_range", "")
    print(json.dumps(found))
