"""The studies in `notebooks/`: their blocks are the package's layers, they run and resume, and results are theirs."""

import dataclasses
import itertools
import json
import math
from pathlib import Path

import depths
import encoders
import help_topics
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pretraining
import pytest
import training
from flax import nnx

import sdeinfer as si

pytestmark = pytest.mark.docs

GAMMA, TAU0, C_PLUS, C_MINUS, SLOPE = 0.6, 0.7, 0.4, -1.1, 0.7


def committed(name: str, settings) -> dict:
    """The committed results, which are of these settings."""
    path = Path(__file__).parent.parent / "notebooks" / f"{name}.json"
    results = json.loads(path.read_text("utf-8"))
    sizes = json.loads(json.dumps(dataclasses.asdict(settings)))
    assert {name: results["settings"][name] for name in sizes} == sizes
    return results


UNTRAINED = math.log(104) + 0.5
"""Nats a character of first logits N(0, 1)."""


# Training.

TRAINED = training.Settings(depth=4, width=16, context=8, batch=4, steps=20, warmup=5, seeds=2)


def block_with(key, width):
    """A block with the weights that `ShapedTransformer.forward` draws from the key."""
    block = training.ShapedBlock(width, rngs=nnx.Rngs(0))
    names = {"attention": ("W_Q", "W_K", "W_V"), "feedforward": ("W_pre", "W_post")}
    for (part, weights), part_key in zip(names.items(), jr.split(key), strict=True):
        for name, weight_key in zip(weights, jr.split(part_key, len(weights)), strict=True):
            getattr(getattr(block, part), name)[...] = jr.normal(weight_key, (width, width))
    return block


def test_the_block_of_training_is_the_layer_of_the_package(key):
    tokens, width = 5, 12
    layer = si.ShapedTransformer(GAMMA, TAU0, C_PLUS, C_MINUS, pattern=si.CAUSAL)
    block = block_with(key, width)
    # Large tokens, so that the softmax is far from flat.
    X = 3 * jr.normal(jr.key(1), (tokens, width))
    np.testing.assert_allclose(block(X, layer), layer.forward(X, key=key), rtol=1e-10)
    np.testing.assert_allclose(block(X[None], layer)[0], block(X, layer), rtol=1e-10)


def test_no_character_sees_a_later_one():
    characters = 7
    network = training.Network(training.ShapedBlock, TRAINED, characters=characters, rngs=nnx.Rngs(0))
    layer = si.ShapedTransformer(GAMMA, TAU0, C_PLUS, C_MINUS, pattern=si.CAUSAL)
    text = jnp.arange(TRAINED.context)[None] % characters
    changed = network(text.at[0, 5].add(1), layer) != network(text, layer)
    assert changed.any(-1).tolist() == [[False] * 5 + [True] * 3]


def test_committed_results_of_training():
    found = {(run["gamma"], run["tau0"]) for run in committed("training", training.Settings())["runs"]}
    assert found == {(None, None), *itertools.product(training.GAMMAS, training.TAUS)}


@pytest.mark.slow
def test_training_runs_and_resumes(tmp_path):
    path = tmp_path / "training.json"
    results = training.study(path, TRAINED, gammas=(0.05,), taus=(1.0,), rates=(0.01, 0.03))
    assert [run["gamma"] for run in results["runs"]] == [None, 0.05]
    for run in results["runs"]:
        assert np.isfinite(run["loss_at_rates"]).all()
        assert run["loss"][0] == min(run["loss_at_rates"])
        curves = np.array(run["curves"])
        assert curves.shape == (TRAINED.seeds, TRAINED.steps)
        assert (curves[:, -5:].mean(-1) < curves[:, :2].mean(-1)).all()
    assert json.loads(path.read_text("utf-8")) == results
    more = training.study(path, TRAINED, gammas=(0.05, 0.2), taus=(1.0,), rates=(0.01, 0.03))
    assert more["runs"][:2] == results["runs"]
    with pytest.raises(ValueError, match="path: .* holds results of"):
        training.study(path, TRAINED, rates=(0.01,))


# Pretraining.

SIZES = encoders.Settings(width=12, heads=3, expansion=2)
PRETRAINED = encoders.Settings(
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
def test_the_block_that_learns_is_the_layer_of_the_package(key, gamma1, gamma2):
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


def test_the_block_that_recovers_starts_from_the_layer_of_the_package(key):
    layer = si.ShapedTransformer(GAMMA, 1.0, 0.0, -1.0, heads=3, output_projection=True, expansion=2)
    block = with_weights_of(encoders.BLOCKS["Recover"](GAMMA, SIZES, rngs=nnx.Rngs(0)), key)
    X = jr.normal(jr.key(1), (5, SIZES.width))
    np.testing.assert_allclose(block(X, 1.0)[0], layer.forward(X, key=key), rtol=1e-10, atol=1e-12)


def test_the_loss_is_of_the_masked_characters():
    network = encoders.Network(encoders.BaselineBlock, 2, 1.0, PRETRAINED, characters=7, rngs=nnx.Rngs(0))
    windows = jr.randint(jr.key(1), (3, PRETRAINED.context), 0, 7)
    masked = pretraining.masks(jr.key(2), windows.shape, PRETRAINED)
    loss, entropies = pretraining.masked_loss(network, windows, masked, 0.0)
    logits, _ = network(jnp.where(masked, 7, windows), 0.0)
    chosen = np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.asarray(windows)[..., None], -1)[..., 0]
    assert float(loss) == pytest.approx(-chosen[np.asarray(masked)].mean())
    assert (entropies <= math.log(PRETRAINED.context)).all()


def test_committed_results_of_pretraining():
    results, settings = committed("pretraining", encoders.Settings()), encoders.Settings()
    runs = {pretraining.Model(run["variant"], run["depth"], run["gamma"]): run for run in results["runs"]}
    assert set(runs) == set(pretraining.MODELS)
    for model, run in runs.items():
        trained = {(network["seed"], network["rate"]) for network in run["networks"]}
        rates = {*settings.rates, *([settings.large_rate] if model in pretraining.FIGURE else [])}
        assert {rate for _, rate in trained} == rates
        assert {seed for seed, rate in trained if rate == run["rate"]} == set(range(settings.seeds))
        assert (run["fine_tuned"] is not None) == (model in pretraining.FINE_TUNED)


@pytest.mark.slow
def test_pretraining_runs_and_resumes(tmp_path, monkeypatch):
    models = tuple(pretraining.Model(*each) for each in (("Baseline", 3, 1.0), ("Recover", 3, 0.1), ("Learn", 3, 0.2)))
    monkeypatch.setattr(pretraining, "FIGURE", models[:1])
    monkeypatch.setattr(pretraining, "FINE_TUNED", models[2:])
    path = tmp_path / "pretraining.json"
    results = pretraining.study(path, PRETRAINED, models=models[:2])
    pairs = {(network["seed"], network["rate"]) for network in results["runs"][0]["networks"]}
    assert pairs == set(itertools.product(range(2), (0.003, 0.01, 0.03)))
    for run in results["runs"]:
        for network in run["networks"]:
            assert max(network["train"], network["test"]) < UNTRAINED
            assert np.shape(network["entropy"]) == (1, PRETRAINED.steps)  # of layer 1: there is no layer 7
            assert (np.array(network["entropy"]) <= math.log(PRETRAINED.context)).all()

    assert json.loads(path.read_text("utf-8")) == results
    more = pretraining.study(path, PRETRAINED, models=models)
    assert more["runs"][:2] == results["runs"]
    scores = more["runs"][2]["fine_tuned"]
    assert [set(each) for each in scores] == [set(help_topics.TASKS)] * PRETRAINED.seeds
    with pytest.raises(ValueError, match="path: .* holds results of"):
        pretraining.study(path, dataclasses.replace(PRETRAINED, steps=21), models=models)


# Depths.

OF_DEPTHS = {"depths": (2, 4), "width": 24, "steps": 30, "warmup": 5, "rates": (0.003,), "seeds": 2, "tokens": 4}
DEPTHS = depths.Settings(**OF_DEPTHS, paths=128, batch=4, context=8)


def test_the_layers_of_depths_are_the_blocks():
    """An audit of the network that is trained, with the strength and multiplier of CompleteP."""
    recipe = si.tuning.recipe_for(depths.blocks(DEPTHS, 0.5))
    model = depths.Stream(DEPTHS, 4, rngs=nnx.Rngs(0))
    inputs = jr.normal(jr.key(0), (1, 4, DEPTHS.width))
    found = si.audit.initialise(model, recipe, inputs)
    assert found.audit is not None
    assert found.audit.passed, found.audit


def test_committed_results_of_depths():
    settings = depths.Settings()
    found = [(run["scheme"], run["depth"]) for run in committed("depths", settings)["runs"]]
    assert found == [(scheme, depth) for depth in settings.depths for scheme in depths.SCHEMES]


@pytest.mark.slow
def test_depths_run_and_resume(tmp_path):
    path = tmp_path / "depths.json"
    results = depths.study(path, DEPTHS)
    for run in results["runs"]:
        assert np.shape(run["loss"]) == (1, DEPTHS.seeds)
        assert np.max(run["loss"]) < UNTRAINED
        assert len(run["growth"]) == DEPTHS.seeds
    # The two are one at the least depth.
    rule, _, completep = (np.array(run["loss"]) for run in results["runs"][:3])
    np.testing.assert_allclose(rule, completep, rtol=1e-5)
    assert depths.study(path, DEPTHS) == results
    with pytest.raises(ValueError, match="path: .* holds results of"):
        depths.study(path, dataclasses.replace(DEPTHS, steps=31))
