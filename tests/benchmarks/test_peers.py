"""Effective samples a second of whole fits, against dynestyx and a textbook NumPyro model, in one run.

All fit the same networks by the limit's law, in double precision, each in a process of its own. Of a full path the
posteriors are the same; with latent layers ours are steps that keep V positive definite, theirs Gaussian Euler steps.
The peers are in `peers`; dynestyx has a virtual environment of its own.
"""

import sys
import tempfile
from pathlib import Path

import pytest
from peer_runs import PARAMETERS, dynestyx_environment, measured, problem

pytestmark = pytest.mark.benchmark


@pytest.fixture(scope="module")
def dynestyx(tmp_path_factory):
    return dynestyx_environment(tmp_path_factory.mktemp("dynestyx"))


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
