"""Models of three libraries, observed: against hidden states that are computed by hand."""

import importlib
import sys
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace

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


class Tensor(np.ndarray):
    """An array with the methods of a tensor that the adapter calls."""

    def detach(self):
        return self

    def cpu(self):
        return self

    def contiguous(self):
        return np.ascontiguousarray(self)


class StandIn:
    """The part of PyTorch that the adapter uses, where PyTorch is not there: its generator and its hooks."""

    def __init__(self):
        self.rng = np.random.default_rng(99)
        self.random = SimpleNamespace(fork_rng=self.fork_rng)
        self.no_grad = nullcontext
        self.Tensor = Tensor
        self.compiler = SimpleNamespace(set_stance=lambda stance: nullcontext(stance))

    @contextmanager
    def fork_rng(self):
        before = self.rng
        yield
        self.rng = before

    def manual_seed(self, seed):
        self.rng = np.random.default_rng(seed)

    def randn(self, *shape):
        return self.rng.normal(size=shape).view(Tensor)


class StandInModule:
    """A module: `forward`, and hooks before and after it."""

    def __init__(self):
        self.before, self.after = [], []

    def eval(self):
        return self

    def __call__(self, *arguments, **keywords):
        for hook in self.before:
            hook(self, arguments, keywords)
        output = self.forward(*arguments, **keywords)
        for hook in self.after:
            hook(self, arguments, output)
        return output

    def register_forward_pre_hook(self, hook, *, with_kwargs):
        assert with_kwargs
        return self.registered(self.before, hook)

    def register_forward_hook(self, hook):
        return self.registered(self.after, hook)

    def registered(self, hooks, hook):
        hooks.append(hook)
        return SimpleNamespace(remove=lambda: hooks.remove(hook))


@pytest.fixture
def torch(monkeypatch):
    """PyTorch where it is installed, otherwise the stand-in."""
    try:
        library = importlib.import_module("torch")
    except ModuleNotFoundError:
        library = StandIn()
        monkeypatch.setitem(sys.modules, "torch", library)
        return library, StandInModule
    return library, library.nn.Module


@pytest.fixture
def torch_network(torch):
    library, module = torch

    class TorchBlock(module):
        def __init__(self):
            super().__init__()
            self.weight = library.randn(WIDTH, WIDTH)

        def forward(self, hidden_states):
            return hidden_states + 0.5 * hidden_states @ self.weight / np.sqrt(WIDTH), "attentions"

    class TorchNetwork(module):
        def __init__(self):
            super().__init__()
            self.blocks = [TorchBlock() for _ in range(DEPTH)]
            self.unused = TorchBlock()

        def forward(self, X):
            for block in self.blocks:
                X = block(hidden_states=X)[0]
            return X

    return TorchNetwork


def test_torch(torch, torch_network):
    library, _ = torch
    library.manual_seed(5)
    X = library.randn(1, TOKENS, WIDTH)
    models = []

    def make(seed):
        models.append(torch_network())
        return models[-1]

    data = si.observe.torch(make, X, layers=lambda model: model.blocks, networks=3, seed=0)
    expected = [list(states([lambda X, block=block: block(X)[0] for block in model.blocks], X[0])) for model in models]
    xr.testing.assert_allclose(data, si.observe(np.stack([np.stack(each) for each in expected])), rtol=1e-5)
    assert not np.allclose(models[0].blocks[0].weight, models[1].blocks[0].weight)
    again = si.observe.torch(make, {"X": X}, layers=lambda model: model.blocks, networks=3, seed=0)
    xr.testing.assert_identical(again, data)
    after = library.randn(2)
    library.manual_seed(5)
    library.randn(1, TOKENS, WIDTH)
    np.testing.assert_array_equal(library.randn(2), after)


def test_a_batch_of_torch_is_prompts(torch, torch_network):
    X = torch[0].randn(2, TOKENS, WIDTH)
    data = si.observe.torch(lambda seed: torch_network(), X, layers=lambda model: model.blocks, networks=2, seed=0)
    assert dict(data.sizes) == {"network": 2, "layer": DEPTH + 1, "token_a": 2 * TOKENS, "token_b": 2 * TOKENS}
    assert data.attrs == {"prompts": f"{TOKENS},{TOKENS}", "tokens": 2 * TOKENS}


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (lambda model: [*model.blocks, model.unused], "layers: module 4 is not called"),
        (lambda model: [model.blocks[1], model.blocks[0]], "layers: module 1 is not called once and in order"),
        (
            lambda model: [model.blocks[0], model.blocks[0]],
            "layers: at least one module, and each only once, is needed, got 2",
        ),
        (lambda model: [], "layers: at least one module, and each only once, is needed, got 0"),
    ],
)
def test_modules_that_are_not_called_in_turn(torch, torch_network, layers, message):
    X = torch[0].randn(TOKENS, WIDTH)
    with pytest.raises(si.InputError, match=message):
        si.observe.torch(lambda seed: torch_network(), X, layers=layers, networks=1, seed=0)
