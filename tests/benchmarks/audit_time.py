"""Time and memory of audits of GPT-2 small, 12 layers of n = 768, on two cores.

    python tests/benchmarks/audit_time.py

prints seconds from import to verdict in a new process, without a cache of compiled programs and with one, of which the
import of torch and transformers, the model and its forward pass are not counted; memory beyond that of the model after
a forward pass; and the seconds of each of 100 audits in one process. The interpreter needs torch, transformers and this
package; nothing is downloaded.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

AUDITS = 100
PROMPT = [[3, 1, 4, 15]]


def peak() -> float:
    """Largest memory so far, GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measured(audits: int) -> dict:
    """One process."""
    import torch  # pyright: ignore[reportMissingImports]
    import transformers as hf  # pyright: ignore[reportMissingImports]

    config = hf.GPT2Config(vocab_size=99, bos_token_id=0, eos_token_id=0)
    model, ids = hf.GPT2Model(config).eval(), {"input_ids": torch.tensor(PROMPT)}
    with torch.no_grad():
        model(**ids)
        started = time.perf_counter()
        model(**ids)
        forward = time.perf_counter() - started
    before, started = peak(), time.perf_counter()
    import sdeinfer as si

    if "JAX_COMPILATION_CACHE_DIR" in os.environ:
        si.use_compilation_cache()
    seconds = []
    for _ in range(audits):
        found = si.audit(model, ids, recipe="gpt2")
        seconds.append(time.perf_counter() - started - forward)
        started = time.perf_counter()
    return {"forward": forward, "seconds": seconds, "memory": peak() - before, "verdict": found.verdict}


def in_process(audits: int, cache: str | None) -> dict:
    """The measurements of a new process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {} if cache is None else {"JAX_COMPILATION_CACHE_DIR": cache}
    command = [sys.executable, "-W", "ignore", __file__, "--measure", str(audits)]
    run = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE, text=True)
    return json.loads(run.stdout.splitlines()[-1])


def main() -> None:
    """Run the processes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure is not None:
        print(json.dumps(measured(given.measure)))
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    with tempfile.TemporaryDirectory() as cache:
        runs = {"without a cache": in_process(1, None), "that writes the cache": in_process(1, cache)}
        runs["with the cache"] = in_process(1, cache)
        many = in_process(AUDITS, cache)
    print(f"load {os.getloadavg()[0]:.1f}; {many['verdict']}")
    for name, run in runs.items():
        print(f"{name}: {run['seconds'][0]:.1f} s, forward pass {run['forward']:.2f} s, {run['memory']:.2f} GiB more")
    later = many["seconds"][1:]
    print(f"{AUDITS} audits: median {statistics.median(later):.2f} s, largest {max(later):.2f} s, ", end="")
    print(f"{many['memory']:.2f} GiB more")


if __name__ == "__main__":
    main()
