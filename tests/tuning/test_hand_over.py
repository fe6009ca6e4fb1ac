"""From tuned blocks to a network of Equinox: what is promised, drawn and audited."""

import dataclasses
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import equinox_transformer as small
from helpers.budget import assert_estimate

import sdeinfer as si
from sdeinfer import criteria as of

V0 = np.asarray(small.prompt() @ small.prompt().T / small.WIDTH)
ARGUMENTS: dict[str, Any] = {
    "width": small.WIDTH,
    "depth": small.LAYERS,
    "paths": 256,
    "maximise": "strength",
    "subject_to": of.expectation(of.LogNorm(0)) <= 0.5,
    "fixed": {"gain": 2.0, "temperature": 0.5},
    "key": jr.key(0),
}


@pytest.fixture(scope="module")
def tuned():
    return si.tune(small.blocks(), V0, **ARGUMENTS)


@pytest.fixture(scope="module")
def ready(tuned):
    return tuned.initialise(small.Transformer(jr.key(0)), small.prompt())


def test_the_network_is_audited_and_passes(ready):
    assert ready.audit.passed, ready.audit
    assert "times what the tuned network declares" in str(ready)


def test_standard_deviations_are_those_of_the_drawn_matrices(tuned, ready):
    table = tuned.standard_deviations.set_index("matrix")
    drawn = ready.matrices[ready.matrices["layer"] == 0].set_index("matrix")
    np.testing.assert_allclose(table["sd"], drawn.loc[table.index, "sd"])
    strength = tuned.values["strength"]
    np.testing.assert_allclose(table.loc["mlp output", "sd"], strength / np.sqrt(4 * small.WIDTH))
    np.testing.assert_allclose(table.loc["query", "sd"], np.sqrt(1 / 0.5 / small.WIDTH))
    np.testing.assert_allclose(table.loc["up", "sd"], np.sqrt(2 / small.WIDTH))
    assert set(table["layer"]) == {"all"}
    assert len(set(map(id, tuned.recipes))) == 1


@pytest.mark.slow
def test_initialised_networks_keep_the_promise(tuned):
    """The mean log norm of a token of 50 initialisations, against that of the tuning's networks."""
    model, X = small.Transformer(jr.key(0)), small.prompt()

    @eqx.filter_jit
    def log_norm(model):
        return jnp.log(jnp.square(model(X)[0]).sum() / jnp.square(X[0]).sum())

    found = [float(log_norm(tuned.initialise(model, X, seed=seed, audited=False).model)) for seed in range(50)]
    value, error = tuned.criteria[["value", "error"]].iloc[0]
    assert_estimate(np.mean(found), value, np.hypot(np.std(found) / 50**0.5, error))


def test_layers_that_change_with_depth(tuned):
    """Each layer has its own recipe."""
    rising = lambda t: 0.1 + 3.2 * t  # noqa: E731
    layer = si.OverDepth(tuned.layer, **{"attention.strength": rising, "mlp.strength": rising})
    over_depth = dataclasses.replace(tuned, layer=layer)
    strengths = [0.1 + 3.2 * (number + 0.5) / small.WIDTH for number in range(small.LAYERS)]
    found = over_depth.initialise(small.Transformer(jr.key(0)), small.prompt(), seed=2)
    assert found.audit.passed, found.audit
    last = found.matrices[found.matrices["matrix"] == "attention output"]["sd"]
    np.testing.assert_allclose(last, np.array(strengths) / np.sqrt(small.WIDTH))
    assert over_depth.standard_deviations["layer"].nunique() == small.LAYERS


def test_recipes_are_for_blocks(tuned):
    shaped = dataclasses.replace(tuned, layer=si.ShapedAttention(gamma=0.5, tau0=jnp.ones(())))
    for use in (lambda: shaped.recipes, lambda: shaped.standard_deviations, lambda: shaped.initialise(None)):
        with pytest.raises(si.InputError, match="layer: recipes are for blocks; networks of shaped layers are made by"):
            use()
