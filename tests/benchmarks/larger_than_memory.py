"""Fit data larger than the memory of the workers: time, memory, and the same bits for any number of workers.

    python tests/benchmarks/larger_than_memory.py --terms 1e8 --workers 1 2 4 --kill --folder /tmp/study
    python tests/benchmarks/larger_than_memory.py --terms 1e5 1e6 1e7 --workers 2 --folder /tmp/study

A term is one spectral coordinate of one transition; four tokens have ten. Every run is a process of its own, which adds
a line to `runs.jsonl` in the folder.
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
    """One fit, in this process."""
    import jax

    jax.config.update("jax_enable_x64", True)  # noqa: FBT003
    import jax.random as jr
    import xarray as xr
    from distributed import Client, LocalCluster

    import sdeinfer as si

    si.use_compilation_cache()
    data = xr.open_zarr(store_of(folder, terms), consolidated=False)
    found = {"terms": terms, "workers": workers, "killed": kill_after is not None}
    found["data_MiB"] = data["covariance"].nbytes / 2**20

    sizes = {"n_workers": workers, "threads_per_worker": 1, "memory_limit": LIMIT}
    with LocalCluster(**sizes, dashboard_address="127.0.0.1:0") as cluster, Client(cluster) as client:
        victim = next(iter(client.run(os.getpid).values()))
        if kill_after is not None:
            threading.Timer(kill_after, os.kill, (victim, signal.SIGKILL)).start()
        started = time.perf_counter()
        post = si.fit(si.models.full_path, data, chains=2, draws=200, warmup=1000, predictions=20, key=jr.key(1))
        found["seconds"] = time.perf_counter() - started
        found["worker_peak_MiB"] = sorted(x / 1024 for x in client.run(_peak).values())
        assert kill_after is None or victim not in client.run(os.getpid).values(), "no worker was killed before the end"
    draws = post["posterior"].to_dataset()
    content = b"".join(draws[name].values.tobytes() for name in sorted(draws.data_vars))
    found["draws"] = hashlib.sha256(content).hexdigest()[:16]
    found["gamma"] = [float(draws["gamma"].mean()), float(draws["gamma"].std())]
    found["client_peak_MiB"] = _peak() / 1024
    return found


def _peak() -> int:
    """Peak resident memory in KiB since exec; `ru_maxrss` of a restarted worker includes its parent's."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--terms", type=float, nargs="*", default=[])
    parser.add_argument("--workers", type=int, nargs="*", default=[])
    parser.add_argument("--kill", type=float, help="seconds after which one of two workers is killed, in another run")
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
        runs += [(terms, workers, None) for workers in flags.workers]
        runs += [(terms, 2, flags.kill)] if flags.kill is not None else []
        for single in runs:
            command = [sys.executable, __file__, "--folder", str(flags.folder), "--single", json.dumps(single)]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
