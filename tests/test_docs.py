"""The scripts of docs/start.md and of the guides, run as they are printed; what they promise is looked at afterwards.

Scripts of one page share their names, in the order of the page. Those in ```{code-block} are shown only. What a script
prints is below it on the page.
"""

import contextlib
import functools
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import jax.random as jr
import matplotlib.pyplot as plt
import numpy as np
import pytest
from helpers import printed_outputs
from helpers.budget import assert_estimate, assert_holds, assert_same_posterior, assert_within
from helpers.spending import share
from scipy import stats
from typer.testing import CliRunner

import sdeinfer as si
from sdeinfer.cli import app

DOCS = Path(__file__).parent.parent / "docs"
PAGES = sorted(DOCS.glob("guides/*.md")) + [DOCS / "start.md"]

pytestmark = [pytest.mark.docs, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Run the scripts of a page, and compare what they print with the page; their names.

    `before` runs those before a heading, `sections` those of sections alone, `without` all but those of sections.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(Path(__file__).parent / "helpers")  # a user has `tanh_mlp.py` beside the script

    def run(page: str, *, before: str | None = None, sections: Sequence[str] = (), without: Sequence[str] = ()) -> dict:
        text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
        if before is not None:
            assert f"\n## {before}\n" in text
            text = text.partition(f"\n## {before}\n")[0]
        if sections or without:
            parts = dict(part.partition("\n")[::2] for part in re.split(r"^## ", text, flags=re.MULTILINE))
            assert {*sections, *without} <= set(parts)
            text = "\n".join(parts[name] for name in sections or parts if name not in without)
        names: dict = {"__name__": page}
        differences = []
        for script in printed_outputs.scripts(text):
            with contextlib.redirect_stdout(io.StringIO()) as printed:
                exec(compile(script.code, f"{page}.md", "exec"), names)
            print(printed.getvalue(), end="")
            differences.append(printed_outputs.difference(script, printed.getvalue()))
        assert not any(differences), "\n".join(differences)
        return names

    yield run
    plt.close("all")


def run_commands(page: str) -> list[str]:
    """Run the commands of a page, whose comments say how long they take; their names."""
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```sh\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    words = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    assert {program for program, *_ in words} <= {"sdeinfer", "python3", "PIP_BREAK_SYSTEM_PACKAGES=1"}
    commands = [arguments for program, *arguments in words if program == "sdeinfer"]
    for arguments in commands:
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, (arguments, result.output)
    return [name for name, *_ in commands]


def assert_recovered(post, *names: str) -> None:
    rows = si.summarise(post).loc[list(names)]
    assert_within(((rows["mean"] - rows["truth"]) / rows["sd"]).astype(float), ", ".join(names))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_scripts_are_short(page):
    for script in printed_outputs.scripts(page.read_text(encoding="utf-8")):
        assert len([line for line in script.code.splitlines() if line.strip()]) <= 25
        assert max(map(len, script.code.splitlines())) <= 120


def test_every_guide_is_in_the_index():
    text = (DOCS / "index.md").read_text(encoding="utf-8")
    guides = sorted(page.stem for page in PAGES if page.parent.name == "guides")
    assert sorted(re.findall(r"^guides/(\w+)$", text, re.MULTILINE)) == guides


@pytest.mark.parametrize(
    "page",
    ["your_networks", *(pytest.param(page, marks=pytest.mark.long) for page in ("verdict", "misfit"))],
)
def test_scripts_print_what_the_page_says(page, run):
    run(f"guides/{page}")


def test_start(run):
    found = run("start")
    assert found["paths"].shape == (512, 2, 4, 4)
    fitted = si.summarise(found["post"])  # of the hidden states; the truth is not in the data
    fitted = fitted.loc[["gamma", "tau0", "c_gap"]]
    assert_within((fitted["mean"] - [0.6, 1.0, 4.0]) / fitted["sd"])


@pytest.mark.long  # a command for each line
def test_commands_of_the_start(run, capsys):
    run("start")
    assert run_commands("start") == ["observe", "fit", "check", "report"]
    assert Path("report/report.html").exists()


@pytest.mark.parametrize("page", ["initialisation", "simulate"])
@pytest.mark.long  # a command for each line
def test_commands_of_guides(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    commands = run_commands(f"guides/{page}")
    assert commands
    assert Path("tuned/report.html").exists() == ("tune" in commands)


@pytest.mark.slow  # a sampler of latent layers, and one of groups
def test_latent_layers_outputs_and_groups_are_fitted(run):
    found = run("guides/some_layers")
    groups = si.summarise(found["post"]).filter(like="group_gamma", axis=0)
    assert_within((groups["mean"] - 0.6) / groups["sd"])
    assert found["outputs"].attrs["outputs"] == 32


@pytest.mark.parametrize("without", [("Other recipes",), pytest.param((), marks=pytest.mark.slow)])
def test_hand_over(run, without):
    found = run("guides/hand_over", without=without)
    assert not found["tuned"].missed


@pytest.mark.slow  # two plans
def test_initialisations_are_tuned(run, capsys):
    found = run("guides/initialisation", without=["A criterion of your own"])
    assert "these cannot all be had" in capsys.readouterr().out
    row = found["moved"].criteria.xs(64, level="depth").iloc[0]
    assert_estimate(row["chain"], 0.95, np.hypot(row["chain_error"], found["tuned"].criteria["error"].iloc[0]))
    assert isinstance(found["profile"].layer, si.OverDepth)


@pytest.mark.long  # a GPT-2 with its weights, twice
def test_blocks_are_fitted_and_judged(run):
    found = run("guides/blocks")
    assert "attention of branch 6" in found["one_strong"].cause.advice
    every = found["every"]["posterior"]["attention.strength"].sel(layer=3)
    assert_within((every.mean() - 1.5 * 0.11314) / every.std())


def test_models_are_audited(run):
    found = run("guides/audit")
    audit = si.audit((found["network"], found["parameters"]), found["X"])
    assert audit.passed is None
    assert "scaled with depth" in audit.verdict


@pytest.mark.torch  # a GPT-2 that is fitted and tuned
@pytest.mark.filterwarnings("default")
def test_a_model_of_pytorch_is_audited_fitted_and_tuned(run):
    pytest.importorskip("transformers")
    found = run("guides/pytorch")
    fitted = si.summarise(found["post"])
    assert_within((fitted["mean"] - [0.08, 0.16]) / fitted["sd"])  # as the recipe declares
    assert found["ready"].audit.passed


@pytest.mark.torch  # models of transformers at small sizes
@pytest.mark.filterwarnings("default")
def test_findings_are_as_published(run):
    transformers = pytest.importorskip("transformers")
    if not transformers.__version__.startswith("5.24."):
        pytest.skip("the page is about transformers 5.24")
    run("findings")


@pytest.mark.torch  # programs of their own
def test_an_audit_in_ci_passes_and_fails(tmp_path, monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)
    *scripts, last = printed_outputs.scripts((DOCS / "guides/audit_in_ci.md").read_text(encoding="utf-8"))
    files = {script.code.partition("\n")[0].removeprefix("# "): script for script in scripts}
    for name, script in files.items():
        Path(name).write_text(script.code, encoding="utf-8")
    model, test = files["my_model.py"].code, files["test_initialisation.py"]
    Path("old_model.py").write_text(model, encoding="utf-8")
    Path("lost_model.py").write_text(model.replace(" / (2 * layers) ** 0.5", ""), encoding="utf-8")
    Path("test_lost.py").write_text(test.code.replace("my_model", "lost_model"), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "1 failed, 2 passed" in result.stdout, result.stdout
    assert " ".join(printed_outputs.words(test.output)) in " ".join(printed_outputs.words(result.stdout))

    assert run_commands("guides/audit_in_ci") == ["audit"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(last.code, "audit_in_ci.md", "exec"), {})
    assert not printed_outputs.difference(last, printed.getvalue())


def test_every_test_of_a_fit_is_explained():
    """Rows that `check` can have, from its source."""
    pages = "".join((DOCS / "guides" / f"{page}.md").read_text(encoding="utf-8") for page in ("verdict", "blocks"))
    rows = re.findall(r"^\| (`[^|]*[≥≤<][^|]*) \|", pages, re.M)
    explained = {name for row in rows for name in re.findall(r"`(?:…,? |tau0 )?([^`]+)`", row)}
    source = "".join(file.read_text(encoding="utf-8") for file in Path(si.diagnostics.__file__).parent.glob("*.py"))
    named = set(re.findall(r'at_(?:most|least)\(\s*"[\w ]+",\s*f?"(?:\{name\},?\{?)?([^"{}]+)', source))
    assert {name.strip() for name in named} <= explained


@pytest.mark.long  # a sampler with a fixed parameter to compile
def test_a_prior_is_replaced_and_a_parameter_fixed(run):
    post = run("guides/model", sections=["Replace a prior, fix a parameter"])["post"]
    assert (post["posterior"]["tau0"] == 1.0).all()
    assert post.attrs["fixed_tau0"] == 1.0
    assert_recovered(post, "gamma", "c_gap")


@pytest.mark.slow  # NumPyro's NUTS and SVI compile for half a minute
def test_a_users_program_has_one_posterior_by_every_inference(run):
    found = run("guides/model", without=["Replace a prior, fix a parameter", "Is your program calibrated?"])
    posterior = found["post"]["posterior"].to_dataset()
    mcmc, svi = found["mcmc"].get_samples(group_by_chain=True), found["by_svi"]
    for name, truth in (("a", 0.1), ("b", 0.4), ("gamma", 0.6)):
        draws = posterior[name].values
        assert_holds(draws, truth)
        assert_same_posterior(mcmc[name], draws)
        # A normal law is near, not equal.
        assert abs(np.mean(svi[name]) - draws.mean()) < 0.5 * draws.std(), name
        assert 0.7 < np.std(svi[name]) / draws.std() < 1.4, name
    assert found["verdicts"].passed
    assert [reason.split(":")[0] for reason in found["verdicts"].skipped] == ["other architectures and sizes"]
    assert found["replicates"].shape == (5, 32, 17, 3, 3)


@pytest.mark.long  # two fits of tokens
def test_tokens_cluster_and_are_fitted(run):
    found = run("guides/meanfield")
    assert found["first"].clusters in (3, 4, 5)
    assert_recovered(found["post"], "beta", "step", "noise")


@pytest.mark.slow  # fifty fits by two laws
def test_a_users_program_is_calibrated(run, monkeypatch):
    """By the law of finite width. By the limit's law intervals of γ are too narrow, as the test finds."""
    for law, calibrated in (("finite-width", {"gamma": True, "gap": True}), ("limit", {"gamma": False})):
        with monkeypatch.context() as patched:
            patched.setattr(si, "fit", functools.partial(si.fit, law=law))
            ranks = run("guides/model", sections=["Is your program calibrated?"])["ranks"]
        for name, right in calibrated.items():
            p = stats.kstest(ranks[name], "uniform").pvalue
            assert p > share() if right else p < 1e-4


def test_a_users_layer_is_simulated_sampled_and_fitted(run):
    found = run("guides/layer", before="A parameter, and the law of finite width")
    assert found["paths"].shape == (64, 2, 3, 3)
    assert_recovered(found["post"], "gamma")
    unnamed = si.check(found["post"])
    assert any("architecture=LinearResidual" in reason for reason in unnamed.skipped)


@pytest.mark.slow  # two samplers to compile; the default suite fits a layer of a user by the limit's law
def test_a_users_layer_with_a_law_of_finite_width_and_stacks_are_fitted(run):
    assert_recovered(run("guides/layer", before="Stacks")["post"], "kappa")
    found = run("guides/layer")
    stacked = ("attention.gamma", "attention.tau0", "feedforward.gamma", "feedforward.c_gap")
    assert_recovered(found["post"], *stacked)
    assert found["verdicts"].passed


@pytest.mark.long  # programs of their own, and a sampler of BlackJAX to compile
def test_likelihood_and_sampler_of_ones_own(run):
    found = run("guides/sampler_and_likelihood")
    assert np.isfinite(found["slope"]).all()
    assert not any("the sampler has no" in reason for reason in si.check(found["post"]).skipped)
    ours = si.fit(si.models.full_path, found["data"], draws=500, warmup=500, key=found["jr"].key(2))
    for name in ("gamma", "c_gap"):
        assert_same_posterior(*(post["posterior"].to_dataset()[name].values for post in (found["post"], ours)))


@pytest.mark.long  # a τ0 over depth to compile
def test_a_criterion_of_ones_own_is_kept_on_networks(run):
    tuned = run("guides/initialisation", sections=["Shaped Transformers", "A criterion of your own"])["by_volume"]
    moved = si.transfer(tuned, widths=[256], depths=[64], networks=1000, with_weights=0, key=jr.key(1))
    row = moved.criteria.iloc[0]
    assert isinstance(tuned.layer, si.OverDepth)
    assert_estimate(row["chain"], -4.0, np.hypot(row["chain_error"], tuned.criteria["error"].iloc[0]))


@pytest.mark.long  # tangents
def test_paths_and_gradients(run):
    found = run("guides/simulate")
    assert found["V"].shape == (256, 2, 3, 3)
    assert found["pair"].tangent.shape == (256, 2, 3, 3)
    ts, V = found["solution"].ts, found["solution"].ys
    assert np.isfinite(ts).sum() == 11
    assert (np.linalg.eigvalsh(np.moveaxis(V[:11], -1, 1)) > 0).all()


@pytest.mark.long
def test_larger_than_memory(run):
    names = run("guides/larger_than_memory")
    assert names["post"].attrs["networks"] == names["post"]["observed_data"].sizes["network"] == 192
    assert_recovered(names["post"], "gamma", "tau0")
