"""Audits of models, in training and over sizes, by a small Equinox Transformer."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from equinox_transformer import LAYERS, RECIPE, WIDTH, Transformer, blocks, copied, prompt, strong

import sdeinfer as si
from sdeinfer.auditing._scaling import Monitor, scaling


@functools.cache
def audited(make=Transformer, seed=0):
    return si.audit(make, prompt(), recipe=RECIPE, architecture=blocks(), key=jr.key(seed))


def test_a_correct_model_passes():
    found = audited()
    assert found.passed, found
    assert found.name == "Transformer"
    assert list(found.branches.index[:2]) == ["layers.0.attn", "layers.0.mlp"]
    assert "passed: Transformer" in found._repr_html_().replace("Passed", "passed")


def test_a_module_is_one_network():
    found = si.audit(Transformer(jr.fold_in(jr.key(0), 0)), prompt(), recipe=RECIPE, architecture=blocks())
    np.testing.assert_array_equal(found.branches["ratio"], audited().branches["ratio"])


def test_copied_layers_are_named():
    found = audited(copied)
    layers = ", ".join(map(str, range(LAYERS)))
    assert found.verdict.startswith(
        f"failed: Transformer: attention branches of layers {layers} have the same weights; mlp branches"
    )


def test_a_factor_is_explained():
    found = si.audit(strong, prompt(), recipe=RECIPE, architecture=blocks(), key=jr.key(1), networks=4)
    assert [each.name for each in found.failed] == ["ratio of mlp.strength to the declared one"]
    assert "√3 = 1.73: the mlp output matrix: the bound of a uniform law" in found.verdict


def test_exponents_over_width_and_depth():
    def make(width, layers):
        return lambda key: Transformer(key, width=width, layers=layers)

    settings = {"recipe": RECIPE, "architecture": blocks()}
    found = scaling(make, prompt, widths=[WIDTH, 2 * WIDTH], depths=[LAYERS], **settings)
    # The default of a linear layer has variance 1/(3 fan_in), so that strengths do not depend on the width.
    assert found.passed, found
    np.testing.assert_allclose(found.exponents["declared"], 0.0, atol=1e-12)
    assert (found.exponents["exponent"].abs() < 4 * found.exponents["sd"]).all()
    with pytest.raises(si.InputError, match="at least two widths, or two depths"):
        scaling(make, prompt, widths=[WIDTH], depths=[LAYERS], **settings)


def test_a_network_leaves_its_law_in_training():
    network = Transformer(jr.fold_in(jr.key(0), 0))
    X = jr.normal(jr.key(3), (16, *prompt().shape))
    loss = eqx.filter_jit(eqx.filter_grad(lambda model: jnp.square(jax.vmap(model)(X) - 3.0).mean()))
    monitor = Monitor(network, prompt(), recipe=RECIPE, architecture=blocks(), every=2)
    assert monitor.verdict == "no step was audited"
    for step in range(3):
        monitor(step)
        network = eqx.apply_updates(network, jax.tree.map(lambda g: -1.0 * g, loss(network)))
        monitor.model = network
    assert list(monitor.audits) == [0, 2]
    assert monitor.audits[0].passed
    assert set(monitor.left.values()) == {2}
    assert monitor.verdict.startswith("not at initialisation from step 2 on, in layers.")
    monitor.model = eqx.tree_at(lambda model: model.layers[0].mlp.layers[-1].weight, network, replace_fn=jnp.zeros_like)
    assert monitor(4) is None
    assert "its weights are zero" in monitor.refused[4]
