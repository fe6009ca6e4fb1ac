"""Models of Equinox and Flax, observed: against hidden states that are computed by hand."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import xarray as xr

import sdeinfer as si

TOKENS, WIDTH, DEPTH = 3, 8, 4
X0 = jr.normal(jr.key(1), (TOKENS, WIDTH))


class Block(eqx.Module):
    weight: jax.Array

    def __call__(self, X):
        return X + 0.5 * jnp.tanh(X @ self.weight) / np.sqrt(WIDTH)


class Network(eqx.Module):
    embedding: jax.Array
    blocks: list[Block]

    def __init__(self, key):
        keys = jr.split(key, DEPTH + 1)
        self.embedding = jr.normal(keys[0], (5, WIDTH))
        self.blocks = [Block(jr.normal(each, (WIDTH, WIDTH))) for each in keys[1:]]


def states(layers, X):
    yield X
    for layer in layers:
        X = layer(X)
        yield X


def test_equinox():
    data = si.observe.equinox(Network, X0, layers=lambda model: model.blocks, networks=3, key=jr.key(0))
    models = [Network(jr.fold_in(jr.key(0), number)) for number in range(3)]
    expected = si.observe(jnp.stack([jnp.stack(list(states(model.blocks, X0))) for model in models]))
    xr.testing.assert_allclose(data, expected, rtol=1e-12)
    assert data["width"].values.tolist() == [WIDTH] * 3


def test_a_network_does_not_depend_on_how_many_there_are():
    five, two = (
        si.observe.equinox(Network, X0, layers=lambda model: model.blocks, networks=networks, key=jr.key(0))
        for networks in (5, 2)
    )
    xr.testing.assert_identical(five.isel(network=slice(2)), two)


def test_equinox_with_embedding_prompts_tokens_and_layers_that_are_functions():
    prompts = jnp.array([[0, 1, 2], [2, 3, 4]])
    data = si.observe.equinox(
        Network,
        prompts,
        layers=lambda model: [lambda X, block=block: block(X) for block in model.blocks],
        embed=lambda model: lambda prompts: model.embedding[prompts],
        networks=2,
        tokens=[0, 2],
        key=jr.key(0),
    )
    assert dict(data.sizes) == {"network": 2, "layer": DEPTH + 1, "token_a": 4, "token_b": 4}
    model = Network(jr.fold_in(jr.key(0), 1))
    X = list(states(model.blocks, model.embedding[prompts[1]]))[-1][jnp.array([0, 2])]
    np.testing.assert_allclose(data["covariance"][1, -1, 2:, 2:], X @ X.T / WIDTH, rtol=1e-12)


def test_what_is_wrong_in_a_network_is_said_with_its_number():
    def make(key):
        model = Network(key)
        broken = eqx.tree_at(lambda model: model.blocks[2].weight, model, replace_fn=lambda W: W * jnp.nan)
        return broken if (key == jr.fold_in(jr.key(0), 1)).all() else model

    with pytest.raises(si.InputError, match="layer 3, network 1: 24 entries are NaN"):
        si.observe.equinox(make, X0, layers=lambda model: model.blocks, networks=2, key=jr.key(0))
    with pytest.raises(si.InputError, match="networks: a whole number of at least 1 is needed, got 0"):
        si.observe.equinox(Network, X0, layers=lambda model: model.blocks, networks=0, key=jr.key(0))


@pytest.mark.parametrize(
    ("layers", "got"),
    [
        (lambda model: 3, "a function that returns 3"),
        (lambda model: model.blocks[0], "a function that returns Block"),
        (lambda model: np.ones((2, 2)), "a function that returns a ndarray"),
        ([1, 2], r"\[1, 2\]"),
    ],
)
def test_layers_are_a_list(layers, got, unchecked):
    with pytest.raises(si.InputError, match=f"^layers: a function that returns the list of a model's layers.*{got}"):
        si.observe.equinox(Network, X0, layers=layers, networks=2, key=jr.key(0))


def test_layers_may_be_a_dict():
    settings = {"networks": 2, "key": jr.key(0)}
    of_dict = si.observe.equinox(Network, X0, layers=lambda model: dict(enumerate(model.blocks)), **settings)
    xr.testing.assert_identical(of_dict, si.observe.equinox(Network, X0, layers=lambda model: model.blocks, **settings))


def test_networks_must_have_the_same_layers():
    depths = iter([4, 3])
    with pytest.raises(si.InputError, match="network 1: has 4 layers .* where network 0 has 5 layers"):
        si.observe.equinox(Network, X0, layers=lambda model: model.blocks[: next(depths)], networks=2, key=jr.key(0))


def test_flax():
    nnx = pytest.importorskip("flax.nnx")

    class FlaxBlock(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, X):
            return X + 0.5 * jnp.tanh(self.linear(X))

    class FlaxNetwork(nnx.Module):
        def __init__(self, rngs):
            self.embedding = nnx.Embed(5, WIDTH, rngs=rngs)
            self.blocks = nnx.List([FlaxBlock(rngs) for _ in range(DEPTH)])

    prompt = jnp.array([[0, 3, 1]])
    data = si.observe.flax(
        FlaxNetwork,
        prompt,
        layers=lambda model: model.blocks,
        embed=lambda model: model.embedding,
        networks=2,
        key=jr.key(0),
    )
    models = [FlaxNetwork(nnx.Rngs(jr.fold_in(jr.key(0), number))) for number in range(2)]
    expected = jnp.stack([jnp.stack(list(states(model.blocks, model.embedding(prompt[0])))) for model in models])
    xr.testing.assert_allclose(data, si.observe(expected), rtol=1e-5)


@pytest.mark.parametrize("name", ["flax", "torch"])
def test_a_missing_library_is_named(name, monkeypatch):
    for module in [module for module in sys.modules if module.partition(".")[0] == name]:
        monkeypatch.delitem(sys.modules, module)

    class Missing:
        @staticmethod
        def find_spec(wanted, path=None, target=None):
            if wanted == name:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])
    randomness = {"seed": 0} if name == "torch" else {"key": jr.key(0)}
    with pytest.raises(si.InputError, match=rf"^{name}: not installed; pip install 'sdeinfer\[{name}\]'$"):
        getattr(si.observe, name)(Network, X0, layers=lambda model: model.blocks, networks=1, **randomness)
