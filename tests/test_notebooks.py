"""Every notebook runs from top to bottom, at a reduced size."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))
REDUCED = {
    "0_quickstart": "width, depth, networks = 64, 6, 12\nchains, draws, warmup = 2, 100, 1000\npaths = 256",
    "1_your_network": "width, depth, networks, heads = 32, 4, 8, 2\nchains, draws, warmup = 2, 100, 150",
    "2_figures_of_the_paper": "samples, samples3, weighted = 256, 256, 4\nd1, d3 = 20, 20\n"
    "token_numbers, gammas = (2,), (0.1, 0.7, 1.0)",
    "3_does_it_train": "shown = ((0.2, 0.5),)\nnetworks, paths = 8, 512",
    "4_tune": "paths, networks, with_weights, depths = 256, 64, 4, (32, 64)",
    "5_gradients": "networks, paths = 8, 256",
    "6_pretraining": "percentiles = (0.0, 1.0)",
    "7_while_it_trains": "networks, width, depth, context, batch = 3, 16, 3, 8, 2\ncheckpoints = (0, 1, 4)\n"
    "chains, draws, warmup = 2, 50, 100\nshown = (0, 4)",
    "8_softmax_expansion": "draws, networks, widths = 10_000, 4000, (16, 64, 128, 256)",
    "10_clusters": "frames, starts, tokens = (0.0, 10.0), 3, 24\nbetas, times = (4.0, 9.0), (1.0, 30.0)\n"
    "steps, chains, draws, warmup = 20, 2, 50, 100",
    "11_blocks": "width, depth, heads, networks = 64, 4, 4, 16\nchains, draws, warmup = 2, 50, 100",
    "13_depths": "networks = 64",
    "12_audit": "width, depth, heads, steps = 64, 4, 4, 20\nwidths, depths = (32, 64), (2, 4)",
    "9_stability": "samples, stopped, weighted, unstable = 256, 20, 2, (0.05, 0.5, 1.0)\n"
    "grid_gammas, grid_taus = (0.2, 0.7, 1.0), (0.5, 8.0)",
}
"""What the cell tagged `parameters` holds in tests; README's example has a warmup of 1000 iterations, too."""


@pytest.mark.docs  # each compiles in a kernel of its own
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings(
    "default"
)  # of the notebook client itself; those of the notebook's code show in its outputs
def test_notebook_runs(path):
    notebook = nbformat.read(path, as_version=4)
    (parameters,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    parameters.source = REDUCED[path.stem]
    where = {"metadata": {"path": str(path.parent)}}  # a notebook imports scripts beside it
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert not [output for output in outputs if output.output_type == "stream" and output.name == "stderr"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_notebook_is_small(path):
    assert path.stat().st_size < 300_000
