"""The paper: its citations, its figures, and totals over rows of a record."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import records

PAPER = Path(__file__).parent.parent / "paper"
TEXT = re.sub(r"<!--.*?-->", "", (PAPER / "paper.md").read_text(encoding="utf-8"), flags=re.DOTALL)


def test_every_reference_is_cited_and_every_citation_has_one():
    entries = re.findall(r"^@\w+\{(\w+),$", (PAPER / "paper.bib").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(entries) == len(set(entries))
    assert set(re.findall(r"(?<![\w.])@(\w+)", TEXT)) == set(entries)


def test_every_figure_is_there_and_referred_to():
    figures = re.findall(r"\\label\{(fig:\w+)\}\]\((\w+)\.png\)", TEXT)
    assert {label for label, _ in figures} == set(re.findall(r"\\autoref\{([\w:]+)\}", TEXT))
    assert TEXT.count("![") == len(figures)
    assert all((PAPER / f"{name}.png").stat().st_size < 150_000 for _, name in figures)


def test_the_largest_deviation_of_coverage_is_the_one_that_is_named():
    rows = records.read("coverage")["rows"]
    errors = {
        (width, name, share): abs(float(held) - share) / (share * (1 - share) / int(rows[width]["cells"][0])) ** 0.5
        for width in ("32", "64", "128", "512")
        for name, cell in zip(("γ", "τ0", "gap"), rows[width]["cells"][1:4], strict=True)
        for held, share in zip(cell.split("/"), (0.5, 0.9), strict=True)
    }
    *largest, _ = max(errors, key=lambda each: errors[each])
    assert (largest, round(max(errors.values()), 1)) == (["32", "τ0"], 2.7)
    assert r"the largest deviation, of $\tau_0$ at $n = 32$, is 2.7 errors" in " ".join(TEXT.split())


@pytest.mark.slow  # a fit by two laws, and two audits
def test_the_script_draws_the_figures(tmp_path):
    command = [sys.executable, str(PAPER / "figures.py"), str(tmp_path), "--small"]
    subprocess.run(command, check=True, env=os.environ | {"MPLBACKEND": "Agg"})
    assert {path.name for path in tmp_path.iterdir()} == {"audit.png", "inference.png"}
