"""The study of pretraining in `notebooks/`: its blocks are the package's layers, and it runs and resumes."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import encoders
import help_topics
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pretraining
import pytest
from flax import nnx

import sdeinfer as si

pytestmark = pytest.mark.docs

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
GAMMA, SLOPE = 0.6, 0.7


SIZES = encoders.Settings(width=12, heads=3, expansion=2)
SMALL = encoders.Settings(
    width=8, heads=2, context=16, batch=4, steps=20, warmup=5, rates=(0.003, 0.01), seeds=2, examples=32, epochs=1
)


def with_weights_of(block, key):
    """The block with the weights that `ShapedTransformer.forward` draws from the key, as they start in training."""
    n = SIZES.width
    key_attention, key_feedforward = jr.split(key)
    for name, weight_key in zip(("W_Q", "W_K", "W_V", "W_O"), jr.split(key_attention, 4), strict=True):
        scale = n**-0.75 if name in ("W_Q", "W_K") else n**-0.5
        getattr(block.attention, name)[...] = scale * jr.normal(weight_key, (n, n))
    units = SIZES.expansion * n
    key_pre, key_post = jr.split(key_feedforward)
    block.feedforward.W_pre[...] = jr.normal(key_pre, (n, units)) / math.sqrt(n)
    block.feedforward.W_post[...] = jr.normal(key_post, (units, n)) / math.sqrt(units)
    return block


@pytest.mark.parametrize(("gamma1", "gamma2"), [(1.0, 1.0), (0.3, 0.8), (0.0, 0.0), (1.2, -0.4)])
def test_the_block_is_the_layer_of_the_package(key, gamma1, gamma2):
    n = SIZES.width
    attention = si.ShapedAttention(GAMMA, 1.0, heads=3, output_projection=True, gamma1=gamma1, gamma2=gamma2)
    feedforward = si.ResidualFeedForward(GAMMA, 0.0, (SLOPE - 1) * math.sqrt(n), expansion=2)
    block = with_weights_of(encoders.LearnBlock(GAMMA, SIZES, rngs=nnx.Rngs(0)), key)
    block.shapes[...] = jnp.array([gamma1, gamma2, SLOPE])
    # Large tokens, so that the softmax is far from flat.
    X = 3 * jr.normal(jr.key(1), (5, n))

    key_attention, key_feedforward = jr.split(key)
    expected = feedforward.forward(attention.forward(X, key=key_attention), key=key_feedforward)
    found, entropy = block(X, 1.0)
    np.testing.assert_allclose(found, expected, rtol=1e-10, atol=1e-12)
    assert 0 < entropy < math.log(5)
    # A row of the softmax depends on its own window alone.
    np.testing.assert_allclose(block(jnp.stack([X, -2 * X]), 1.0)[0][0], found, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("variant", ["Recover", "Learn"])
def test_shaped_models_start_from_the_package_layer(key, variant):
    layer = si.ShapedTransformer(GAMMA, 1.0, 0.0, -1.0, heads=3, output_projection=True, expansion=2)
    block = with_weights_of(encoders.BLOCKS[variant](GAMMA, SIZES, rngs=nnx.Rngs(0)), key)
    X = jr.normal(jr.key(1), (5, SIZES.width))
    np.testing.assert_allclose(block(X, 1.0)[0], layer.forward(X, key=key), rtol=1e-10, atol=1e-12)


def test_the_loss_is_of_the_masked_characters():
    network = encoders.Network(encoders.BaselineBlock, 2, 1.0, SMALL, characters=7, rngs=nnx.Rngs(0))
    windows = jr.randint(jr.key(1), (3, SMALL.context), 0, 7)
    masked = pretraining.masks(jr.key(2), windows.shape, SMALL)
    loss, entropies = pretraining.masked_loss(network, windows, masked, 0.0)
    logits, _ = network(jnp.where(masked, 7, windows), 0.0)
    chosen = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.asarray(windows)[..., None], -1)[..., 0]
    assert float(loss) == pytest.approx(-chosen[np.asarray(masked)].mean())
    assert (entropies <= math.log(SMALL.context)).all()


def test_the_committed_results_are_of_the_committed_study():
    results = json.loads((NOTEBOOKS / "pretraining.json").read_text("utf-8"))
    sizes = json.loads(json.dumps(dataclasses.asdict(encoders.Settings())))
    assert {name: results["settings"][name] for name in sizes} == sizes
    runs = {pretraining.Model(run["variant"], run["depth"], run["gamma"]): run for run in results["runs"]}
    assert set(runs) == set(pretraining.MODELS)
    for model, run in runs.items():
        trained = {(network["seed"], network["rate"]) for network in run["networks"]}
        rates = {*sizes["rates"], *([sizes["large_rate"]] if model in pretraining.FIGURE else [])}
        assert {rate for _, rate in trained} == rates
        assert {seed for seed, rate in trained if rate == run["rate"]} == set(range(sizes["seeds"]))
        assert (run["fine_tuned"] is not None) == (model in pretraining.FINE_TUNED)


@pytest.mark.slow
def test_a_small_study_runs_and_resumes(tmp_path, monkeypatch):
    models = tuple(pretraining.Model(*each) for each in (("Baseline", 3, 1.0), ("Recover", 3, 0.1), ("Learn", 3, 0.2)))
    monkeypatch.setattr(pretraining, "FIGURE", models[:1])
    monkeypatch.setattr(pretraining, "FINE_TUNED", models[2:])
    path = tmp_path / "pretraining.json"
    results = pretraining.study(path, SMALL, models=models[:2])
    pairs = {(network["seed"], network["rate"]) for network in results["runs"][0]["networks"]}
    assert pairs == set(itertools.product(range(2), (0.003, 0.01, 0.03)))
    for run in results["runs"]:
        for network in run["networks"]:
            assert np.isfinite([network["train"], network["test"]]).all()
            curve = np.array(network["curve"])
            assert curve.shape == (SMALL.steps,)
            assert curve[-5:].mean() < curve[:2].mean()
            assert np.shape(network["entropy"]) == (1, SMALL.steps)  # of layer 1: there is no layer 7
            assert (np.array(network["entropy"]) <= math.log(SMALL.context)).all()

    assert json.loads(path.read_text("utf-8")) == results
    more = pretraining.study(path, SMALL, models=models)
    assert more["runs"][:2] == results["runs"]
    scores = more["runs"][2]["fine_tuned"]
    assert [set(each) for each in scores] == [set(help_topics.TASKS)] * SMALL.seeds
    with pytest.raises(ValueError, match="path: .* holds results of"):
        pretraining.study(path, dataclasses.replace(SMALL, steps=21), models=models)
