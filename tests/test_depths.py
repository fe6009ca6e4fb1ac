"""The study of depths in `notebooks/`: its networks have the declared blocks, and they train."""

import dataclasses
import json
from pathlib import Path

import depths
import jax.random as jr
import numpy as np
import pytest
from flax import nnx

import sdeinfer as si

pytestmark = pytest.mark.docs

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


SIZES = {"depths": (2, 4), "width": 24, "steps": 30, "warmup": 5, "rates": (0.003,), "seeds": 2, "tokens": 4}
SMALL = depths.Settings(**SIZES, paths=128, batch=4, context=8)


def test_the_layers_are_the_blocks():
    """An audit of the network that is trained, with the strength and multiplier of CompleteP."""
    recipe = si.auditing.recipe_for(depths.blocks(SMALL, 0.5))
    model = depths.Stream(SMALL, 4, rngs=nnx.Rngs(0))
    inputs = jr.normal(jr.key(0), (1, 4, SMALL.width))
    found = si.audit.initialise(model, recipe, inputs, architecture=depths.blocks(SMALL))
    assert found.audit is not None
    assert found.audit.passed, found.audit


def test_the_committed_results_are_of_the_committed_study():
    results = json.loads((NOTEBOOKS / "depths.json").read_text("utf-8"))
    settings = depths.Settings()
    assert results["settings"] == json.loads(json.dumps(dataclasses.asdict(settings)))
    found = [(run["scheme"], run["depth"]) for run in results["runs"]]
    assert found == [(scheme, depth) for depth in settings.depths for scheme in depths.SCHEMES]


@pytest.mark.slow
def test_small_networks_train(tmp_path):
    path = tmp_path / "depths.json"
    results = depths.study(path, SMALL)
    for run in results["runs"]:
        curves = np.array(run["curves"])
        assert curves.shape[:2] == (1, SMALL.seeds)
        assert (curves[..., -5:].mean(-1) < curves[..., :2].mean(-1)).all()
        assert len(run["growth"]) == SMALL.seeds
    # The two are one at the least depth.
    rule, _, completep = (np.array(run["loss"]) for run in results["runs"][:3])
    np.testing.assert_allclose(rule, completep, rtol=1e-5)
    assert depths.study(path, SMALL) == results
    with pytest.raises(ValueError, match="path: .* holds results of"):
        depths.study(path, dataclasses.replace(SMALL, steps=31))
