"""Models of Equinox and Flax, observed: against hidden states, and what branches read and add, computed by hand."""

import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import xarray as xr
from helpers.branch_references import assert_branches

import sdeinfer as si

TOKENS, WIDTH = 3, 8
X0 = jr.normal(jr.key(1), (TOKENS, WIDTH))


class Block(eqx.Module):
    """Attention, and a perceptron that acts on single tokens."""

    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(2, WIDTH, dropout_p=0.5, key=key)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 16, 1, key=jr.fold_in(key, 1))

    def branches(self, X):
        """(U, D) of both branches, and the stream after them."""
        U = jax.vmap(self.norm)(X)
        D = eqx.nn.inference_mode(self.attention)(U, U, value=U)
        V = jax.vmap(self.norm)(X + D)
        E = jax.vmap(self.mlp)(V)
        return [(U, D), (V, E)], X + D + E

    def __call__(self, X):
        U = jax.vmap(self.norm)(X)
        X = X + self.attention(query=U, key_=U, value=U)
        return X + jax.vmap(self.mlp)(jax.vmap(self.norm)(X))


class Network(eqx.Module):
    embedding: jax.Array
    blocks: list[Block]
    compiled: bool
    prompts: bool

    def __init__(self, key, *, compiled=False, prompts=False):
        self.embedding = jr.normal(key, (5, WIDTH))
        self.blocks = [Block(each) for each in jr.split(key, 2)]
        self.compiled, self.prompts = compiled, prompts

    def __call__(self, X):
        for block in self.blocks:
            layer = jax.vmap(block) if self.prompts else block
            X = eqx.filter_jit(lambda layer, X: layer(X))(layer, X) if self.compiled else layer(X)
        return X


def drawn(number):
    return Network(jr.fold_in(jr.key(0), number))


def states(model, X):
    """The hidden states after each layer, the initial ones first."""
    found = [X]
    for block in model.blocks:
        found.append(block.branches(found[-1])[1])
    return jnp.stack(found)


def observed(make=Network, inputs=X0, layers=lambda model: model.blocks, networks=2, **options):
    def evaluated(key):
        return eqx.nn.inference_mode(make(key))

    return si.observe.equinox(evaluated, inputs, layers=layers, networks=networks, **options, key=jr.key(0))


def test_layers_of_equinox_given_as_a_list_or_a_dict_of_any_number_of_networks():
    data = observed(networks=3)
    expected = si.observe(jnp.stack([states(drawn(number), X0) for number in range(3)]))
    xr.testing.assert_allclose(data, expected, rtol=1e-12)
    of_dict = observed(layers=lambda model: dict(enumerate(model.blocks)))
    xr.testing.assert_identical(data.isel(network=slice(2)), of_dict)


def test_equinox_with_embedding_prompts_tokens_and_layers_that_are_functions():
    prompts = jnp.array([[0, 1, 2], [2, 3, 4]])
    data = observed(
        inputs=prompts,
        layers=lambda model: [lambda X, block=block: jax.vmap(block)(X) for block in model.blocks],
        embed=lambda model: lambda prompts: model.embedding[prompts],
        tokens=[0, 2],
    )
    assert dict(data.sizes) == {"network": 2, "layer": 3, "token_a": 4, "token_b": 4}
    X = states(drawn(1), drawn(1).embedding[prompts[1]])[-1][jnp.array([0, 2])]
    np.testing.assert_allclose(data["covariance"][1, -1, 2:, 2:], X @ X.T / WIDTH, rtol=1e-12)


def whole(model):
    return [part for block in model.blocks for part in (("attention", block.attention), ("mlp", block.mlp))]


def ends(model):
    """The writers are inside the readers, or beside them."""
    return [
        part
        for block in model.blocks
        for part in (
            ("attention", block.attention, block.attention.output_proj),
            ("mlp", block.mlp.layers[0], block.mlp.layers[1]),
        )
    ]


def by_hand(models, X):
    """U and D of every branch, shape (networks, branches, tokens, width)."""
    seen = []
    for model in models:
        state, found = X, []
        for block in model.blocks:
            pairs, state = block.branches(state)
            found += pairs
        seen.append(found)
    return [np.array([[pair[part] for pair in found] for found in seen]) for part in (0, 1)]


@pytest.mark.one_case("ends-True")
@pytest.mark.parametrize(("branches", "compiled"), [(whole, False), (ends, True)])
def test_branches_of_equinox(branches, compiled):
    def make(key):
        return Network(key, compiled=compiled)

    data = si.observe_branches.equinox(make, X0, branches, networks=2, pattern=si.CAUSAL, key=jr.key(0))
    assert_branches(data, *by_hand([drawn(0), drawn(1)], X0))
    last = "blocks.1.mlp" if branches is whole else "blocks.1.mlp.layers.0"
    assert data["name"].values.tolist()[::3] == ["blocks.0.attention", last]
    assert data.attrs == {"causal": 1.0, "reads": "branch"}


def test_branches_of_equinox_with_prompts():
    model = Network(jr.key(0), prompts=True)
    X = jr.normal(jr.key(2), (2, TOKENS, WIDTH))
    data = si.observe_branches.equinox(model, {"X": X}, whole, width=WIDTH)
    U, D = zip(*(by_hand([model], each) for each in X), strict=True)
    assert_branches(data, np.concatenate(U, axis=2), np.concatenate(D, axis=2))
    assert data.attrs == {"prompts": "3,3", "reads": "branch"}


def of_branches(branches=whole, make=None, **options):
    return si.observe_branches.equinox(make or drawn(0), X0, branches, **options)


def broken(model):
    return eqx.tree_at(lambda model: model.blocks[1].mlp.layers[1].weight, model, replace_fn=lambda W: W * jnp.nan)


DEPTHS = iter([2, 1])
ONE = Network(jr.key(0))
A_LIST = "layers: a function that returns the list of a model's layers.*"
REFUSED = [
    (lambda: observed(lambda key: broken(Network(key))), "hidden_states: layer 2, network 0: 24 entries are NaN"),
    (lambda: observed(networks=0), "networks: a whole number of at least 1 is needed, got 0"),
    (lambda: observed(layers=lambda model: 3), f"{A_LIST}a function that returns 3"),
    (lambda: observed(layers=lambda model: model.blocks[0]), f"{A_LIST}a function that returns a Block"),
    (lambda: observed(layers=[1, 2]), rf"{A_LIST}\[1, 2\]"),
    (lambda: observed(layers=lambda model: model.blocks[: next(DEPTHS)]), "hidden_states: network 1: has 2 layers .* "),
    (lambda: of_branches(make=Network), r"key: a function that draws networks needs one, as jax.random.key\(0\)"),
    (lambda: of_branches(networks=2), "networks: a module is one network, got 2: pass a function that draws them"),
    (lambda: of_branches(networks=0), "networks: a whole number of at least 1 is needed, got 0"),
    (lambda: of_branches(width=9), "width: input: network 0, branch 0 .blocks.0.attention. has 8 features"),
    (lambda: of_branches(lambda model: []), "branches: no branch was given"),
    (lambda: of_branches(lambda model: model.blocks), "branches: .kind, module. or .kind, reader, writer. is needed"),
    (lambda: of_branches(lambda model: whole(model)[:2][::-1]), r"branches: network 0, branch 1 \(blocks.0.attention"),
    (lambda: of_branches(lambda model: [("mlp", jax.vmap(model.blocks[0].mlp))]), r"branches: network 0, branch 0 \(m"),
    (lambda: of_branches(lambda model: [("mlp", model.blocks[0].mlp.layers[0])]), r"branches: network 0, branch 0 .*:"),
    (lambda: of_branches(make=broken(ONE)), r"increment: network 0, branch 3 .*: 24 entries are NaN or infinite"),
    (lambda: of_branches(make=lambda key: ONE, networks=2, key=jr.key(0)), "increment: networks 0 and 1: the same inc"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message[:50] for _, message in REFUSED])
def test_what_is_wrong_with_models_is_said(call, message, unchecked):
    with pytest.raises(si.InputError, match=f"^{message}"):
        call()


@pytest.fixture
def flax_network():
    nnx = pytest.importorskip("flax.nnx")

    class FlaxBlock(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.up, self.down = nnx.Linear(WIDTH, 16, rngs=rngs), nnx.Linear(16, WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs, deterministic=True)
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, X):
            X = X + self.linear(inputs=self.norm(X))
            return X + self.dropout(jax.vmap(self.mlp)(self.norm(X)))

        def mlp(self, X):
            return self.down(jnp.tanh(self.up(X)))

        def branches(self, X):
            U = self.norm(X)
            D = self.linear(U)
            V = self.norm(X + D)
            return [(U, D), (V, self.mlp(V))], X + D + self.mlp(V)

    class FlaxNetwork(nnx.Module):
        def __init__(self, rngs):
            self.embedding = nnx.Embed(5, WIDTH, rngs=rngs)
            self.blocks = nnx.List([FlaxBlock(rngs) for _ in range(2)])
            self.unused = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, X):
            for block in self.blocks:
                X = block(X)
            return X

    return FlaxNetwork


def of_flax(model):
    return [part for block in model.blocks for part in (("linear", block.linear), ("mlp", block.up, block.down))]


def test_flax(flax_network):
    from flax import nnx

    models = [flax_network(nnx.Rngs(jr.fold_in(jr.key(0), number))) for number in range(2)]
    prompt, embed = jnp.array([[0, 3, 1]]), lambda model: model.embedding
    settings = {"networks": 2, "key": jr.key(0)}
    data = si.observe.flax(flax_network, prompt, layers=lambda model: model.blocks, embed=embed, **settings)
    expected = jnp.stack([states(model, model.embedding(prompt[0])) for model in models])
    xr.testing.assert_allclose(data, si.observe(expected), rtol=1e-5)
    X = jr.normal(jr.key(2), (2, TOKENS, WIDTH))
    data = si.observe_branches.flax(flax_network, X, of_flax, **settings)
    assert_branches(data, *(each.reshape(2, 4, -1, WIDTH) for each in by_hand(models, X)), tolerance=1e-5)
    assert data["name"].values.tolist() == ["blocks.0.linear", "blocks.0.up", "blocks.1.linear", "blocks.1.up"]
    assert data.attrs == {"prompts": "3,3", "reads": "branch"}


def test_a_model_of_flax_is_left_as_it_was_and_what_is_wrong_with_it_is_said(flax_network):
    from flax import nnx

    model = flax_network(nnx.Rngs(0))
    model.blocks[0].dropout.deterministic = False
    si.observe_branches.flax(model, X0, of_flax)
    assert type(model.blocks[0].linear) is nnx.Linear
    assert not model.blocks[0].dropout.deterministic
    for make, branches, message in (
        (flax_network, of_flax, "key: a function that draws networks needs one"),
        (model, lambda model: [("a", jnp.tanh)], r"branches: network 0, branch 0 \(a.0\): a module of Flax is needed"),
        (model, lambda model: [("a", model.unused)], r"branches: network 0, branch 0 \(unused\): its input is not see"),
        (model, lambda model: of_flax(model)[::-1], "branches: network 0, branch 3 .*: is called twice or out of orde"),
    ):
        with pytest.raises(si.InputError, match=f"^{message}"):
            si.observe_branches.flax(make, X0, branches)


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
