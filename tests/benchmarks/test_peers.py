"""Effective samples a second of whole fits, against dynestyx and a textbook NumPyro model, in one run.

All fit the same networks by the limit's law, in double precision, each in a process of its own. Of a full path the
posteriors are the same; with latent layers ours are steps that keep V positive definite, theirs Gaussian Euler steps.
The peers are in `peers`; dynestyx has a virtual environment of its own.
"""

import functools
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax.random as jr
import numpy as np
import pytest
from arviz_stats.base import array_stats

import sdeinfer as si

pytestmark = pytest.mark.benchmark

PEERS = Path(__file__).parent / "peers"
PARAMETERS = ("gamma", "tau0", "c_gap")
CHAINS, DRAWS, WARMUP = 4, 200, 200
SECONDS = 300
"""How long a process may take."""


@pytest.fixture(scope="module")
def dynestyx(tmp_path_factory):
    """The interpreter of an environment with dynestyx, which wants other versions than ours."""
    if shutil.which("uv") is None:
        pytest.skip("dynestyx needs an environment of its own, and uv is not on the path")
    where = tmp_path_factory.mktemp("dynestyx") / "venv"
    python = str(where / "bin" / "python")
    made = [["uv", "venv", "--python", sys.executable, str(where)]]
    made += [["uv", "pip", "install", "--python", python, "dynestyx"]]
    made += [[python, "-W", "ignore", "-c", "import dynestyx; print(f'dynestyx {dynestyx.__version__}')"]]
    for command in made:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            pytest.skip(f"no environment with dynestyx: {' '.join(result.stderr.split())[-300:]}")
    print(f"\n{result.stdout.strip()}")
    return python


@functools.cache
def problem(tokens: int, every: int, folder: Path) -> Path:
    truth = si.ShapedTransformer(gamma=0.5, tau0=1.0, c_plus=2.0, c_minus=-2.0)
    V0 = si.equicorrelated(tokens=tokens, correlation=0.2, norm=1.0)
    data = si.sample_networks(truth, V0, width=128, depth=16, networks=8, key=jr.key(0))
    data = data.isel(layer=slice(None, None, every))
    source = folder / f"{tokens}-{every}.npz"
    np.savez(source, V=data["covariance"].values, layers=data["layer"].values, width=128)
    return source


@functools.cache
def measured(python: str, script: str, source: Path) -> dict | str:
    """What a script drew and how long it took; or how it failed."""
    out = source.with_name(f"{script}-{source.name}")
    command = [python, "-W", "ignore", str(PEERS / f"{script}.py"), str(source), str(out)]
    command += [str(count) for count in (CHAINS, DRAWS, WARMUP)]
    try:
        subprocess.run(command, capture_output=True, text=True, check=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return f"{script:14} did not finish {CHAINS} × ({WARMUP} + {DRAWS}) in {SECONDS} s"
    except subprocess.CalledProcessError as error:
        return f"{script:14} failed: {error.stderr.strip().splitlines()[-1]}"
    result = dict(np.load(out))
    result["ess"] = min(float(array_stats.ess(result[name], method="bulk")) for name in PARAMETERS)
    return result


def line(name: str, result: dict) -> str:
    ess, seconds, warm, cpu = (float(result[key]) for key in ("ess", "seconds", "warm", "cpu"))
    posterior = ", ".join(f"{key} {result[key].mean():.3f} ± {result[key].std():.3f}" for key in PARAMETERS)
    counts = [f"{float(result[key]):.0f} {key}" for key in ("steps", "divergences") if key in result]
    return (
        f"{name:14} ESS {ess:4.0f}; {seconds:6.1f} s, {warm:6.1f} s without compilation, {cpu:6.1f} s of CPU: "
        f"{ess / seconds:.3g}, {ess / warm:.3g}, {ess / cpu:.3g} ESS/s; {posterior}" + "".join(f"; {c}" for c in counts)
    )


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@pytest.mark.parametrize("tokens", [2, 4], ids=lambda tokens: f"m{tokens}")
@pytest.mark.parametrize("every", [1, 4], ids=lambda every: f"every{every}")
@pytest.mark.parametrize("peer", ["textbook", "dynestyx_model"])
def test_effective_samples_a_second(tokens, every, peer, folder, request):
    python = request.getfixturevalue("dynestyx") if peer == "dynestyx_model" else sys.executable
    source = problem(tokens, every, folder)
    ours, theirs = measured(sys.executable, "ours", source), measured(python, peer, source)
    assert isinstance(ours, dict), ours
    print(f"\nm = {tokens}, {'every layer' if every == 1 else f'every {every}th layer'}, 8 networks of 16 layers")
    print(f"  {line('ours', ours)}")
    if isinstance(theirs, str):
        print(f"  {theirs}")
        return
    print(f"  {line(peer, theirs)}")
    names = {"seconds": "in all", "warm": "without compilation", "cpu": "of CPU"}
    ratios = [float(ours["ess"] / ours[key] / (theirs["ess"] / theirs[key])) for key in names]
    parts = (f"{ratio:.3g} {name}" for ratio, name in zip(ratios, names.values(), strict=True))
    print(f"  ratio of effective samples a second, ours to {peer}: {', '.join(parts)}")
