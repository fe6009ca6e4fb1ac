import base64
import html
import importlib.metadata
import json
import math
import re

import pytest
from matplotlib import pyplot

from sdeinfer._html import significant
from sdeinfer.diagnostics import Check, identification
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
    for title in ("parameter", "contraction", "networks for 10 %"):
        assert f"<th>{title}</th>" in page
    write_figures(drawn, tmp_path / "figures")
    assert not pyplot.get_fignums()
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        "correlation_paths.png",
        "innovations.png",
        "posterior.png",
        "ranks.png",
        "terminal_correlation.png",
    ]


def test_numbers_of_a_column_have_equally_many_digits_and_networks_are_counted(fitted, checked, tmp_path):
    write_report(fitted, checked, {}, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    parameters, identified = (
        [
            [html.unescape(cell) for cell in re.findall(r"<td>(.*?)</td>", row)]
            for row in re.findall(r"<tr.*?</tr>", table, re.S)
        ][1:]
        for table in re.findall(r'<table class="named.*?</table>', page, re.S)
    )
    digits = {len(mean.lstrip("-0.").replace(".", "")) for _, mean, *_ in parameters}
    assert digits == {4}
    table = identification(fitted)
    assert [row[-3] for row in identified] == [f"{math.ceil(float(f'{24 * x:.2g}')):,}" for x in table["networks"]]
    assert [row[3] for row in identified] == [f"{x:.2f}" for x in table["contraction"]]


def test_the_page_has_date_version_and_command_of_the_fit(fitted, checked, tmp_path):
    tree = fitted.copy()
    tree.attrs = fitted.attrs | {"created_at": "2026-01-02T03:04:05+01:00", "command": "sdeinfer fit data.nc"}
    write_report(tree, checked, {}, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    facts = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert facts["date of the fit"] == "2026-01-02 02:04 UTC"
    assert facts["version of sdeinfer"] == importlib.metadata.version("sdeinfer")
    assert facts["command"] == "sdeinfer fit data.nc"


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [(0.6, 4, "0.6000"), (1, 2, "1.0"), (-1.8581, 4, "-1.858"), (1234.4, 4, "1234"), (0.00551, 2, "0.0055")],
)
def test_significant_digits_keep_their_zeros(value, digits, text):
    assert significant(value, digits) == text


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
