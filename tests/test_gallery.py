"""The script `docs/_static/gallery/draw.py` draws the figures that docs/notebooks.md shows."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import pytest

STORED = Path(__file__).parent.parent / "docs" / "_static" / "gallery"


@pytest.mark.slow  # a fit, and networks of three widths
def test_the_script_of_the_gallery_draws_its_figures(tmp_path):
    script = shutil.copy(STORED / "draw.py", tmp_path)
    subprocess.run([sys.executable, script], check=True, env=os.environ | {"MPLBACKEND": "Agg"})
    drawn = {path.name: matplotlib.image.imread(path).shape for path in tmp_path.glob("*.png")}
    assert drawn == {path.name: matplotlib.image.imread(path).shape for path in STORED.glob("*.png")}
