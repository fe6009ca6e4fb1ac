"""Tuning on the command line."""

import json
import re

import pytest
from cli.test_fits import files, refused, run

SMALL = ["--architecture", "feedforward", "--width", 64, "--depth", 16, "--tokens", 2, "--norm", 1]
SMALL += ["--paths", 512, "--step", 0.1]


@pytest.mark.long
def test_tune_writes_parameters_a_figure_and_a_page(tmp_path):
    goals = ("--maximise", "gamma", "--subject-to", "P(norm factor < 2) >= 0.9", "--subject-to", "E[norm factor] ≤ 3")
    options = ("--fix", "c_gap=1", "--bound", "gamma=0.05:0.9", "--seed", 2, "--out", tmp_path / "a" / "out")
    result = run("tune", *SMALL, *goals, *options)
    assert result.exit_code == 0, result.output
    assert result.stdout.endswith(f"written to {tmp_path / 'a' / 'out'}: report.html, tuned.json, figures/\n")
    assert files(tmp_path) == [f"a/out/{name}" for name in ("figures/tuned.png", "report.html", "tuned.json")]
    found = json.loads((tmp_path / "a/out/tuned.json").read_text(encoding="utf-8"), parse_constant=pytest.fail)
    gamma = found["parameters"]["gamma"]["value"]
    assert 0.05 < gamma < 0.9
    assert f"{gamma:.4g}" in result.stdout
    assert found["layer"] == {"gamma": pytest.approx(gamma), "c_plus": 0.5, "c_minus": -0.5}
    assert [row["criterion"] for row in found["criteria"]] == ["P(norm factor < 2) ≥ 0.9", "E[norm factor] ≤ 3"]
    assert [row["active"] for row in found["criteria"]] == [True, False]
    page = (tmp_path / "a/out/report.html").read_text(encoding="utf-8")
    assert not re.search(r'(src|href)="(?!data:)', page)
    assert len(re.findall(r'<img src="data:image/png;base64,', page)) == 1
    slope = found["sensitivity"]["gamma"]["P(norm factor < 2) ≥ 0.9"]
    for text in (f"gamma = {gamma:.4g} ± ", "P(norm factor &lt; 2) ≥ 0.9", f"<td>{slope:.4g}</td>"):
        assert text in page
    assert page.count('class="text pass"') == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ("maximise or minimise",)),
        (["--maximise", "effective rank"], ("criterion: 'effective rank' is not understood", "E[…]", "norm factor")),
        (["--maximise", "gamma", "--fix", "c_gap"], ("--fix: NAME=NUMBER",)),
        (["--maximise", "gamma", "--bound", "gamma=0.1"], ("--bound: NAME=LOW:HIGH", "'gamma=0.1'")),
        (["--maximise", "depth", "--subject-to", "E[norm factor] <= 3"], ("objective: depth is not free",)),
        (["--maximise", "gamma", "--causal"], ("--causal: feedforward has none",)),
    ],
)
def test_goals_that_cannot_be_are_refused(flags, words, tmp_path):
    refused(run("tune", *SMALL, *flags, "--out", tmp_path / "out"), *words)
    assert files(tmp_path) == []
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_goals_out_of_reach_are_refused_with_the_nearest(tmp_path):
    goals = ("--maximise", "gamma", "--bound", "gamma=0.8:0.9", "--subject-to", "E[norm factor] <= 1.01")
    refused(run("tune", *SMALL, *goals, "--fix", "c_gap=1", "--out", tmp_path / "out"), "the nearest is E[norm")
    assert list(tmp_path.iterdir()) == []
