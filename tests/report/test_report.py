import base64
import json
import re

import sdeinfer as si
from sdeinfer.report import figures, write_figures, write_report, write_summary


def test_the_page_holds_every_figure_and_needs_no_network(fitted, networks, tmp_path):
    drawn = figures(fitted)
    write_report(fitted, si.check(fitted, networks), drawn, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    images = re.findall(r'<img src="data:image/png;base64,([^"]+)"', page)
    assert len(images) == len(drawn) == 4
    assert all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)
    assert not re.search(r'(src|href)="(?!data:)', page)
    for name in ("gamma", "tau0", "c_gap", "R-hat"):
        assert name in page


def test_figures_are_written_by_name(fitted, tmp_path):
    write_figures(figures(fitted), tmp_path / "figures")
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        "correlation_paths.png",
        "posterior.png",
        "ranks.png",
        "terminal_correlation.png",
    ]


def test_the_summary_has_the_agreed_keys(fitted, networks, tmp_path):
    write_summary(fitted, si.check(fitted, networks), tmp_path / "summary.json")
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    row = summary["parameters"]["gamma"]
    assert set(row) == {"mean", "sd", "hdi_low", "hdi_high", "truth", "rhat", "ess_bulk", "ess_tail"}
    assert row["truth"] == 0.6
    assert summary["divergences"] == 0
    assert {"elapsed_s", "verdict"} <= set(summary)


def test_unknown_truth_is_left_out(fitted, networks, tmp_path):
    tree = fitted.copy()
    tree.attrs = {name: value for name, value in fitted.attrs.items() if not name.startswith("truth_")}
    write_summary(tree, si.check(tree, networks), tmp_path / "summary.json")
    assert "truth" not in json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["parameters"]["gamma"]
