"""The scripts of docs/extending.md, run as they are printed; what they promise is looked at afterwards."""

import re
from pathlib import Path

import numpy as np
import pytest
from budget import assert_estimate

import sdeinfer as si

PAGE = (Path(__file__).parent.parent / "docs" / "extending.md").read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## ([^\n]*)\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
SETTING = re.search(r"```python\n(.*?)```", PAGE, re.DOTALL)

pytestmark = [pytest.mark.docs, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")]


def run(section: str, *, last: int | None = None) -> dict:
    """Run the scripts of a section, one after the other; the names that they leave."""
    assert SETTING is not None
    names: dict = {"__name__": "extending"}
    scripts = [SETTING[1], *re.findall(r"```python\n(.*?)```", SECTIONS[section], re.DOTALL)]
    for script in scripts[:last]:
        assert len([line for line in script.splitlines() if line.strip()]) <= 25
        exec(compile(script, "extending.md", "exec"), names)
    return names


def deviations(post, name: str) -> float:
    row = si.summarise(post).loc[name]
    return abs(row["mean"] - row["truth"]) / row["sd"]


def test_a_prior_is_replaced_and_a_parameter_fixed(capsys):
    post = run("Replace a prior, fix a parameter")["post"]
    assert (post["posterior"]["tau0"] == 1.0).all()
    assert post.attrs["fixed_tau0"] == 1.0
    assert "good" in capsys.readouterr().out
    assert max(deviations(post, name) for name in ("gamma", "c_gap")) < 4


def test_the_likelihood_is_that_of_every_network():
    found = run("The likelihood")
    assert found["each"].shape == (16,)
    assert found["slope"].shape == (16, 8, 3, 3)
    assert np.isfinite(found["slope"]).all()
    assert found["networks"].shape == (2, 16, 9, 3, 3)


def test_a_criterion_of_ones_own_is_kept_on_networks():
    found = run("A criterion for tuning")
    row = found["found"].criteria.iloc[0]
    assert isinstance(found["tuned"].layer, si.OverDepth)
    assert_estimate(row["chain"], -2.0, np.hypot(row["chain_error"], found["tuned"].criteria["error"].iloc[0]))


def test_diffrax_saves_what_it_is_told_and_refuses_adaptive_steps():
    found = run("Diffrax")
    ts, V = found["solution"].ts, found["solution"].ys
    assert np.isfinite(ts).sum() == 11
    np.testing.assert_allclose(V[0, ..., 0], si.equicorrelated(tokens=3, correlation=0.2, norm=1.5), rtol=1e-12)
    assert (np.linalg.eigvalsh(np.moveaxis(V[:11], -1, 1)) > 0).all()
    diffrax, adaptive = found["diffrax"], found["diffrax"].PIDController(rtol=1e-3, atol=1e-3)
    with pytest.raises(RuntimeError, match="does not provide error estimates"):
        diffrax.diffeqsolve(found["term"], found["PSDEuler"](), 0, 0.5, 0.05, found["X0"], stepsize_controller=adaptive)


REGRESSION = "A model: regression of τ0 on a covariate"


@pytest.mark.long  # a layer for each network; `test_models` has its densities
def test_a_users_program_is_fitted_and_judged():
    found = run(REGRESSION, last=2)
    posterior = found["post"]["posterior"].to_dataset()
    for name, truth in (("a", 0.1), ("b", 0.4), ("gamma", 0.6)):
        assert abs(posterior[name].mean() - truth) < 4 * posterior[name].std(), name
    assert found["verdicts"].passed
    assert [reason.split(":")[0] for reason in found["verdicts"].skipped] == ["other architectures and sizes"]
    assert {"misfit of the layers", "logit spread, mean"} <= set(found["verdicts"].to_frame().index)
    assert set(found["post"]["layers"].data_vars) == {"gamma", "tau0"}


@pytest.mark.slow  # NumPyro's NUTS and SVI compile for half a minute
def test_a_users_program_has_one_posterior_by_every_inference():
    found = run(REGRESSION)
    posterior = found["post"]["posterior"].to_dataset()
    fitted = {name: posterior[name].values.ravel() for name in ("a", "b", "gamma")}
    mcmc, svi = found["mcmc"].get_samples(), found["by_svi"]
    for name, draws in fitted.items():
        # Of some 300 effective draws of each the means differ by no more than 4 · √(2/300) sds.
        assert abs(np.mean(mcmc[name]) - draws.mean()) < 0.33 * draws.std(), name
        assert 0.8 < np.std(mcmc[name]) / draws.std() < 1.25, name
        # A normal law is near, not equal.
        assert abs(np.mean(svi[name]) - draws.mean()) < 0.5 * draws.std(), name
        assert 0.7 < np.std(svi[name]) / draws.std() < 1.4, name
    assert found["replicates"].shape == (5, 32, 17, 3, 3)


def test_a_users_layer_is_simulated_sampled_and_fitted():
    found = run("A layer", last=3)
    assert found["paths"].shape == (64, 2, 3, 3)
    assert deviations(found["post"], "gamma") < 4
    assert found["verdicts"].passed
    assert [reason.split(":")[0] for reason in found["verdicts"].skipped] == ["other architectures and sizes"]
    unnamed = si.check(found["post"])
    assert any("architecture=LinearResidual" in reason for reason in unnamed.skipped)


@pytest.mark.slow  # two samplers to compile; the default suite fits a layer of a user by the limit's law
def test_a_users_layer_with_a_law_of_finite_width_and_stacks_are_fitted():
    found = run("A layer")
    stacked = ("attention.gamma", "attention.tau0", "feedforward.gamma", "feedforward.c_gap")
    assert max(deviations(found["post"], name) for name in stacked) < 4
    for name in ("attention.gamma", "feedforward.gamma"):
        assert si.summarise(found["post"]).loc[name, "sd"] < 0.1
    assert found["verdicts"].passed


@pytest.mark.long  # a sampler of BlackJAX to compile
def test_a_users_sampler_has_the_posterior_of_ours():
    found = run("A sampler")
    ours = si.fit(si.models.full_path, found["data"], draws=500, warmup=500, key=found["jr"].key(2))
    for name in ("gamma", "c_gap"):
        theirs, own = (post["posterior"].to_dataset()[name].values for post in (found["post"], ours))
        assert abs(theirs.mean() - own.mean()) < 0.35 * own.std(), name
        assert 0.8 < theirs.std() / own.std() < 1.25, name
