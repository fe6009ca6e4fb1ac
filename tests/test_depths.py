"""The study of depths in `notebooks/`: its networks have the declared blocks, and they train."""

import dataclasses
import importlib
import json
import sys
from pathlib import Path

import jax.random as jr
import numpy as np
import pytest
from flax import nnx

import sdeinfer as si

pytestmark = pytest.mark.docs

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


@pytest.fixture(scope="module")
def depths():
    sys.path.insert(0, str(NOTEBOOKS))
    try:
        yield importlib.import_module("depths")
    finally:
        sys.path.remove(str(NOTEBOOKS))


@pytest.fixture(scope="module")
def small(depths):
    sizes = {"depths": (2, 4), "width": 24, "steps": 30, "warmup": 5, "rates": (0.003,), "seeds": 2, "tokens": 4}
    return depths.Settings(**sizes, paths=128, batch=4, context=8)


def test_the_layers_are_the_blocks(depths, small):
    """An audit of the network that is trained, with the strength and multiplier of CompleteP."""
    recipe = si.auditing.recipe_for(depths.blocks(small, 0.5))
    model = depths.Stream(small, 4, rngs=nnx.Rngs(0))
    inputs = jr.normal(jr.key(0), (1, 4, small.width))
    found = si.audit.initialise(model, recipe, inputs, architecture=depths.blocks(small))
    assert found.audit is not None
    assert found.audit.passed, found.audit


def test_the_committed_results_are_of_the_committed_study(depths):
    results = json.loads((NOTEBOOKS / "depths.json").read_text("utf-8"))
    settings = depths.Settings()
    assert results["settings"] == json.loads(json.dumps(dataclasses.asdict(settings)))
    found = [(run["scheme"], run["depth"]) for run in results["runs"]]
    assert found == [(scheme, depth) for depth in settings.depths for scheme in depths.SCHEMES]


@pytest.mark.slow
def test_small_networks_train(depths, small, tmp_path):
    path = tmp_path / "depths.json"
    results = depths.study(path, small)
    for run in results["runs"]:
        curves = np.array(run["curves"])
        assert curves.shape[:2] == (1, small.seeds)
        assert (curves[..., -5:].mean(-1) < curves[..., :2].mean(-1)).all()
        assert len(run["growth"]) == small.seeds
    # The two are one at the least depth.
    rule, _, completep = (np.array(run["loss"]) for run in results["runs"][:3])
    np.testing.assert_allclose(rule, completep, rtol=1e-5)
    assert depths.study(path, small) == results
    with pytest.raises(ValueError, match="path: .* holds results of"):
        depths.study(path, dataclasses.replace(small, steps=31))
