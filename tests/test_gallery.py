"""The scripts of docs/notebooks.md: `docs/_static/gallery/draw.py` draws its figures, another those of papers."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib
import matplotlib.image
import matplotlib.pyplot as plt
import pytest

DOCS = Path(__file__).parent.parent / "docs"
STORED = DOCS / "_static" / "gallery"


@pytest.mark.slow  # a fit, and networks of three widths
def test_the_script_of_the_gallery_draws_its_figures(tmp_path):
    script = shutil.copy(STORED / "draw.py", tmp_path)
    subprocess.run([sys.executable, script], check=True, env=os.environ | {"MPLBACKEND": "Agg"})
    drawn = {path.name: matplotlib.image.imread(path).shape for path in tmp_path.glob("*.png")}
    assert drawn == {path.name: matplotlib.image.imread(path).shape for path in STORED.glob("*.png")}


def test_figures_for_papers_have_the_widths_of_columns(fitted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = (DOCS / "notebooks.md").read_text(encoding="utf-8").partition("\n## Figures for papers\n")[2]
    (script,) = re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE)
    with matplotlib.rc_context():
        exec(script, {"post": fitted})
    plt.close("all")
    widths = {}
    for path in tmp_path.glob("*.pdf"):
        (box,) = re.findall(rb"/MediaBox \[ 0 0 (\S+) ", path.read_bytes())
        widths[path.name] = float(box) / 72
    assert widths == pytest.approx({"correlations.pdf": 3.25, "posterior.pdf": 6.75})
