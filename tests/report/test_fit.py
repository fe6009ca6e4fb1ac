import base64
import json
import re

from matplotlib import pyplot

from sdeinfer.diagnostics import Check
from sdeinfer.report import figures, write_figures, write_report, write_summary


def test_the_page_holds_every_figure_needs_no_network_and_leaves_none_open(fitted, checked, tmp_path):
    drawn = figures(fitted)
    write_report(fitted, checked, drawn, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    images = re.findall(r'<img src="data:image/png;base64,([^"]+)"', page)
    assert len(images) == len(drawn) == 5
    assert all(base64.b64decode(image).startswith(b"\x89PNG") for image in images)
    assert not re.search(r'(src|href)="(?!data:)', page)
    for name in ("gamma", "tau0", "c_gap", "R-hat", "Did the sampler converge?", "contraction", "SHA-256"):
        assert name in page
    write_figures(drawn, tmp_path / "figures")
    assert not pyplot.get_fignums()
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        "correlation_paths.png",
        "innovations.png",
        "posterior.png",
        "ranks.png",
        "terminal_correlation.png",
    ]


def test_the_page_names_the_sizes_in_words(fitted, tmp_path):
    tree = fitted.copy()
    tree.attrs = fitted.attrs | {"heads": 4.0}
    write_report(tree, Check(()), {}, tmp_path / "report.html")
    assert "<h1>Posterior of a shaped transformer, 4 heads</h1>" in (tmp_path / "report.html").read_text(
        encoding="utf-8"
    )


def test_the_summary_has_the_agreed_keys(fitted, checked, tmp_path):
    write_summary(fitted, checked, tmp_path / "summary.json")
    summary = json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))
    row = summary["parameters"]["gamma"]
    assert set(row) == {"mean", "sd", "hdi_low", "hdi_high", "truth", "rhat", "ess_bulk", "ess_tail"}
    assert row["truth"] == 0.6
    assert summary["divergences"] == fitted["sample_stats"]["diverging"].values.sum()
    assert {"elapsed_s", "verdict"} <= set(summary)
    unknown = fitted.copy()
    unknown.attrs = {name: value for name, value in fitted.attrs.items() if not name.startswith("truth_")}
    write_summary(unknown, checked, tmp_path / "summary.json")
    assert "truth" not in json.loads((tmp_path / "summary.json").read_text(encoding="utf-8"))["parameters"]["gamma"]
