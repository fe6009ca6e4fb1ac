"""The study of training in `notebooks/`: its networks are the package's, and they train."""

import json
import math
from pathlib import Path

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import training
from flax import nnx

import sdeinfer as si

pytestmark = pytest.mark.docs

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
GAMMA, TAU0, C_PLUS, C_MINUS = 0.6, 0.7, 0.4, -1.1


SMALL = training.Settings(depth=4, width=16, context=8, batch=4, steps=20, warmup=5, seeds=2)


def block_with(key, width):
    """A block with the weights that `ShapedTransformer.forward` draws from the key."""
    block = training.ShapedBlock(width, rngs=nnx.Rngs(0))
    key_attention, key_feedforward = jr.split(key)
    names = {"attention": ("W_Q", "W_K", "W_V"), "feedforward": ("W_pre", "W_post")}
    for (part, weights), part_key in zip(names.items(), (key_attention, key_feedforward), strict=True):
        for name, weight_key in zip(weights, jr.split(part_key, len(weights)), strict=True):
            getattr(getattr(block, part), name)[...] = jr.normal(weight_key, (width, width))
    return block, key_attention, key_feedforward


def test_the_block_is_the_layer_of_the_package(key):
    tokens, width = 5, 12
    layer = si.ShapedTransformer(GAMMA, TAU0, C_PLUS, C_MINUS, pattern=si.CAUSAL)
    block, key_attention, key_feedforward = block_with(key, width)
    # Large tokens, so that the softmax is far from flat.
    X = 3 * jr.normal(jr.key(1), (tokens, width))
    shortcut = math.sqrt(1 - GAMMA**2)

    attention, feedforward = layer.stack.layers
    np.testing.assert_allclose(
        shortcut * X + GAMMA * block.attention.shaped(X, layer), attention.forward(X, key=key_attention), rtol=1e-10
    )
    np.testing.assert_allclose(
        shortcut * X + GAMMA * block.feedforward.branch(X, layer.c_plus, layer.c_minus),
        feedforward.forward(X, key=key_feedforward),
        rtol=1e-10,
    )
    np.testing.assert_allclose(block(X, layer), layer.forward(X, key=key), rtol=1e-10)
    np.testing.assert_allclose(block(X[None], layer)[0], block(X, layer), rtol=1e-10)


def test_no_character_sees_a_later_one():
    characters = 7
    network = training.Network(training.ShapedBlock, SMALL, characters=characters, rngs=nnx.Rngs(0))
    layer = si.ShapedTransformer(GAMMA, TAU0, C_PLUS, C_MINUS, pattern=si.CAUSAL)
    text = jnp.arange(SMALL.context)[None] % characters
    changed = network(text.at[0, 5].add(1), layer) != network(text, layer)
    assert changed.any(-1).tolist() == [[False] * 5 + [True] * 3]


def test_the_committed_results_are_of_the_committed_study():
    results = json.loads((NOTEBOOKS / "training.json").read_text("utf-8"))
    sizes = training.dataclasses.asdict(training.Settings())
    assert {name: results["settings"][name] for name in sizes} == sizes
    found = {(run["gamma"], run["tau0"]) for run in results["runs"]}
    assert found == {(None, None), *training.itertools.product(training.GAMMAS, training.TAUS)}


@pytest.mark.slow
def test_small_networks_train(tmp_path):
    path = tmp_path / "training.json"
    results = training.study(path, SMALL, gammas=(0.05,), taus=(1.0,), rates=(0.01, 0.03))
    assert [run["gamma"] for run in results["runs"]] == [None, 0.05]
    for run in results["runs"]:
        assert np.isfinite(run["loss_at_rates"]).all()
        assert run["loss"][0] == min(run["loss_at_rates"])
        curves = np.array(run["curves"])
        assert curves.shape == (SMALL.seeds, SMALL.steps)
        assert np.isfinite(curves).all()
        assert (curves[:, -5:].mean(1) < curves[:, :2].mean(1)).all()

    assert json.loads(path.read_text("utf-8")) == results
    more = training.study(path, SMALL, gammas=(0.05, 0.2), taus=(1.0,), rates=(0.01, 0.03))
    assert more["runs"][:2] == results["runs"]
    with pytest.raises(ValueError, match="path: .* holds results of"):
        training.study(path, SMALL, rates=(0.01,))
