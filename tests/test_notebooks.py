"""Every notebook runs from top to bottom, at a reduced size."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
REDUCED = {
    "0_quickstart": "width, depth, networks = 64, 6, 12\nchains, draws, warmup = 2, 100, 1000\npaths = 256",
    "1_your_network": "width, depth, networks, heads = 32, 4, 8, 2\nchains, draws, warmup = 2, 100, 150",
    "2_figures_of_the_paper": "samples, samples3, weighted, gradients, stopped = 256, 256, 4, 8, 20\n"
    "depths = (20, 20, 20, 200)\ngammas, unstable = (0.1, 0.7, 1.0), (0.05, 0.5, 1.0)\n"
    "grid_gammas, grid_taus = (0.2, 0.7, 1.0), (0.5, 8.0)\ndraws, widths = 4000, (64, 128, 256)",
    "3_tune": "paths, networks, with_weights, depths = 256, 64, 4, (32, 64)\n"
    'today = {"width": 128, "depth": 4}\nof_today = {"paths": 256, "networks": 64, "with_weights": 2}',
    "4_training": "networks, paths, tokens = 8, 512, 2\nshown = ((0.2, 0.5),)",
    "5_while_it_trains": "networks, width, depth, context, batch = 3, 16, 3, 8, 2\ncheckpoints = (0, 1, 4)\n"
    "chains, draws, warmup = 2, 50, 100\nshown = (0, 4)",
    "6_audit": "width, depth, heads, steps = 64, 4, 4, 20\nwidths, depths = (32, 64), (2, 4)\n"
    'fitted_depth, sampler = 4, {"chains": 2, "draws": 50, "warmup": 100}',
    "7_clusters": "frames, starts, tokens = (0.0, 10.0), 3, 24\nbetas, times = (4.0, 9.0), (1.0, 30.0)\n"
    "steps, chains, draws, warmup = 20, 2, 50, 100",
}
"""What the cell tagged `parameters` holds in tests; README's example has a warmup of 1000 iterations, too."""


@pytest.mark.docs  # each compiles in a kernel of its own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings(
    "default"
)  # of the notebook client itself; those of the notebook's code show in its outputs
def test_notebook_runs(path, monkeypatch):
    notebook = nbformat.read(path, as_version=4)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    parameters.source = REDUCED[path.stem]
    where = {"metadata": {"path": str(path.parent)}}  # a notebook imports scripts beside it
    monkeypatch.setenv("TQDM_DISABLE", "1")  # outputs are committed
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "stream" and output.name == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_notebook_is_small_and_describes_its_figures(path):
    assert path.stat().st_size < 300_000
    for cell in nbformat.read(path, as_version=4).cells:
        if any("image/png" in output.get("data", {}) for output in cell.get("outputs", [])):
            assert cell.metadata["mystnb"]["image"]["alt"], cell.source
