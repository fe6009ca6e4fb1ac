"""Fit data larger than the memory of the workers: time, memory, and the same bits for any number of workers.

    python tests/benchmarks/larger_than_memory.py --terms 1e8 --workers 1 2 4 --kill --folder /tmp/study
    python tests/benchmarks/larger_than_memory.py --terms 1e5 1e6 1e7 --workers 2 --folder /tmp/study
    python tests/benchmarks/larger_than_memory.py --figure scaling.png --folder /tmp/study

A term is one spectral coordinate of one transition; four tokens have ten. Every run is a process of its own, which adds
a line to `runs.jsonl` in the folder. `--one-process` reads the chunks in the process of the fit.
"""

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

TOKENS, DEPTH, WIDTH, NETWORKS_AT_ONCE = 4, 16, 256, 4096
TERMS = TOKENS * (TOKENS + 1) // 2
LIMIT = "1GiB"


def store_of(folder: Path, terms: float) -> Path:
    return folder / f"terms_{terms:.0e}.zarr"


def write_networks(folder: Path, terms: float) -> None:
    """Sample networks by the chain, some at a time, in float64."""
    import jax

    jax.config.update("jax_enable_x64", True)  # noqa: FBT003
    import jax.random as jr

    import sdeinfer as si

    si.use_compilation_cache()
    path, networks = store_of(folder, terms), round(terms / (TERMS * DEPTH))
    if path.exists():
        return
    started, layer = time.perf_counter(), si.ShapedTransformer(gamma=0.6, tau0=1.0, c_plus=2.0, c_minus=-2.0)
    V0 = si.equicorrelated(tokens=TOKENS, correlation=0.0, norm=1.6)
    for number, first in enumerate(range(0, networks, NETWORKS_AT_ONCE)):
        count = min(NETWORKS_AT_ONCE, networks - first)
        sizes = {"width": WIDTH, "depth": DEPTH, "networks": count}
        part = si.sample_networks(layer, V0, **sizes, method="chain", key=jr.fold_in(jr.key(0), number))
        part["covariance"].encoding["chunks"] = (NETWORKS_AT_ONCE // 2, DEPTH + 1, TOKENS, TOKENS)
        si.write(part, path, append=True)
    print(f"{networks} networks written in {time.perf_counter() - started:.0f} s", flush=True)


def fit(folder: Path, terms: float, workers: int, kill_after: float | None) -> dict:
    """One fit, in this process; 0 workers for chunks in this process."""
    import dask
    import jax

    jax.config.update("jax_enable_x64", True)  # noqa: FBT003
    import jax.random as jr
    import xarray as xr

    import sdeinfer as si

    si.use_compilation_cache()
    data = xr.open_zarr(store_of(folder, terms), consolidated=False)
    found = {"terms": terms, "workers": workers, "killed": kill_after is not None}
    found["data_MiB"] = data["covariance"].nbytes / 2**20

    def run() -> float:
        started = time.perf_counter()
        post = si.fit(si.models.full_path, data, chains=2, draws=200, warmup=1000, predictions=20, key=jr.key(1))
        draws = post["posterior"].to_dataset()
        content = b"".join(draws[name].values.tobytes() for name in sorted(draws.data_vars))
        found["draws"] = hashlib.sha256(content).hexdigest()[:16]
        found["gamma"] = [float(draws["gamma"].mean()), float(draws["gamma"].std())]
        found["gamma_by_chain"] = draws["gamma"].mean("draw").values.tolist()
        si.write(post, folder / f"terms_{terms:.0e}_workers_{workers}{'_killed' if kill_after is not None else ''}.nc")
        found["kept"] = 1 - post.attrs["left_out"]
        return time.perf_counter() - started

    if workers == 0:
        with dask.config.set(scheduler="synchronous"):
            found["seconds"] = run()
    else:
        from distributed import Client, LocalCluster

        sizes = {"n_workers": workers, "threads_per_worker": 1, "memory_limit": LIMIT}
        with LocalCluster(**sizes, dashboard_address="127.0.0.1:0") as cluster, Client(cluster) as client:
            if kill_after is not None:
                victim = next(iter(client.run(os.getpid).values()))
                threading.Timer(kill_after, os.kill, (victim, signal.SIGKILL)).start()
            found["seconds"] = run()
            found["worker_peak_MiB"] = sorted(x / 1024 for x in client.run(_peak).values())
            found["pids_at_end"] = sorted(client.run(os.getpid).values())
            if kill_after is not None:
                found["killed_pid"] = victim
                assert victim not in found["pids_at_end"], "the worker was not killed before the end"
    found["client_peak_MiB"] = _peak() / 1024
    return found


def _peak() -> int:
    """Peak resident memory in KiB since exec; `ru_maxrss` of a restarted worker includes its parent's."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def draw(folder: Path, figure: Path) -> None:
    """Time and memory over the size of the data, with the exponents of the largest runs with two workers."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt
    import numpy as np

    runs = [json.loads(line) for line in (folder / "runs.jsonl").read_text().splitlines()]
    runs = sorted(
        (each for each in runs if each["workers"] == 2 and not each["killed"]), key=lambda each: each["terms"]
    )
    terms = np.array([each["terms"] for each in runs])
    columns = {
        "time [s]": [each["seconds"] for each in runs],
        "largest worker [MiB]": [max(each["worker_peak_MiB"]) for each in runs],
        "process of the fit [MiB]": [each["client_peak_MiB"] for each in runs],
        "data [MiB]": [each["data_MiB"] for each in runs],
    }
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for name, values in columns.items():
        last = slice(-2, None)
        slope = np.polyfit(np.log(terms[last]), np.log(values[last]), 1)[0]
        axis = axes[0] if "time" in name else axes[1]
        axis.loglog(terms, values, "o-", label=f"{name}, exponent {slope:.2f}")
        print(f"{name}: {np.round(values, 1).tolist()}, exponent of the last two {slope:.2f}")
    axes[1].axhline(1024, color="0.5", linestyle=":", label="limit of a worker")
    for axis in axes:
        axis.set(xlabel="terms")
        axis.legend(fontsize=8)
    fig.savefig(figure, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--terms", type=float, nargs="*", default=[])
    parser.add_argument("--workers", type=int, nargs="*", default=[])
    parser.add_argument("--one-process", action="store_true")
    parser.add_argument("--kill", type=float, help="seconds after which one of two workers is killed, in another run")
    parser.add_argument("--figure", type=Path)
    parser.add_argument("--single", type=json.loads, help=argparse.SUPPRESS)
    flags = parser.parse_args()
    flags.folder.mkdir(parents=True, exist_ok=True)
    if flags.single is not None:
        terms, workers, kill_after = flags.single
        if workers is None:
            write_networks(flags.folder, terms)
            return
        found = fit(flags.folder, terms, workers, kill_after)
        with (flags.folder / "runs.jsonl").open("a") as file:
            file.write(json.dumps(found) + "\n")
        print(json.dumps(found), flush=True)
        return
    for terms in flags.terms:
        runs = [(terms, None, None)]
        runs += [(terms, 0, None)] * flags.one_process + [(terms, workers, None) for workers in flags.workers]
        runs += [(terms, 2, flags.kill)] if flags.kill is not None else []
        for single in runs:
            command = [sys.executable, __file__, "--folder", str(flags.folder), "--single", json.dumps(single)]
            subprocess.run(command, check=True)
    if flags.figure is not None:
        draw(flags.folder, flags.figure)


if __name__ == "__main__":
    main()
