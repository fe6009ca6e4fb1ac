import base64
import json
import re
import shutil
import subprocess

import pytest
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


@pytest.mark.skipif(shutil.which("chromium") is None, reason="Debian's package chromium is not installed")
@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_is_whole_in_a_browser(fitted, checked, tmp_path, width):
    """In a frame as wide as a screen or a phone: every image loads, nothing is wider than the frame, no errors."""
    write_report(fitted, checked, figures(fitted), tmp_path / "report.html")
    (tmp_path / "frame.html").write_text(FRAME.format(width=width), encoding="utf-8")
    options = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync "
        "--disable-component-update --allow-file-access-from-files --virtual-time-budget=8000 --dump-dom "
        "--enable-logging=stderr"
    ).split()
    command = ["chromium", *options, f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'frame.html'}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    found = json.loads(re.search(r'<pre id="found">(.*?)</pre>', done.stdout)[1])
    assert found == {"images": 5, "loaded": 5, "wider": 0}
    assert "CONSOLE" not in done.stderr


FRAME = """<!doctype html><iframe id="page" src="report.html" style="width:{width}px;height:4000px;border:0"></iframe>
<pre id="found"></pre><script>
document.getElementById("page").onload = event => {{
  const page = event.target.contentDocument, images = [...page.images], root = page.documentElement
  document.getElementById("found").textContent = JSON.stringify({{
    images: images.length,
    loaded: images.filter(image => image.complete && image.naturalWidth > 0).length,
    wider: root.scrollWidth - root.clientWidth,
  }})
}}
</script>"""
"""Opens the page in a frame of some width and writes down what it finds."""
