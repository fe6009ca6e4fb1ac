"""Branches of models of Equinox and Flax, against their modules applied by hand."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from branch_references import assert_branches

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
    blocks: list[Block]
    compiled: bool
    prompts: bool

    def __init__(self, key, *, compiled=False, prompts=False):
        self.blocks = [Block(each) for each in jr.split(key, 2)]
        self.compiled, self.prompts = compiled, prompts

    def __call__(self, X):
        for block in self.blocks:
            layer = jax.vmap(block) if self.prompts else block
            X = eqx.filter_jit(lambda layer, X: layer(X))(layer, X) if self.compiled else layer(X)
        return X


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


@pytest.mark.parametrize(("branches", "compiled"), [(whole, False), (ends, True)])
def test_equinox(branches, compiled):
    def make(key):
        return Network(key, compiled=compiled)

    data = si.observe_branches.equinox(make, X0, branches, networks=2, pattern=si.CAUSAL, key=jr.key(0))
    models = [Network(jr.fold_in(jr.key(0), number)) for number in range(2)]
    assert_branches(data, *by_hand(models, X0))
    last = "blocks.1.mlp" if branches is whole else "blocks.1.mlp.layers.0"
    assert data["name"].values.tolist()[:1] + data["name"].values.tolist()[-1:] == ["blocks.0.attention", last]
    assert data.attrs == {"causal": 1.0, "reads": "branch"}


def test_equinox_with_prompts():
    model = Network(jr.key(0), prompts=True)
    X = jr.normal(jr.key(2), (2, TOKENS, WIDTH))
    data = si.observe_branches.equinox(model, {"X": X}, whole, width=WIDTH)
    U, D = zip(*(by_hand([model], each) for each in X), strict=True)
    assert_branches(data, np.concatenate(U, axis=2), np.concatenate(D, axis=2))
    assert data.attrs == {"prompts": "3,3", "reads": "branch"}


def test_what_is_wrong_with_models_of_equinox():
    model = Network(jr.key(0))

    def later(model):
        return [("mlp", model.blocks[0].mlp), ("attention", model.blocks[0].attention)]

    for make, branches, options, message in (
        (Network, whole, {}, r"key: a function that draws networks needs one, as jax.random.key\(0\)"),
        (model, whole, {"networks": 2}, "networks: a module is one network, got 2: pass a function that draws them"),
        (model, whole, {"networks": 0}, "networks: a whole number of at least 1 is needed, got 0"),
        (model, whole, {"width": 9}, "width: input: network 0, branch 0 .blocks.0.attention. has 8 features"),
        (model, lambda model: [], {}, "branches: no branch was given"),
        (model, lambda model: [model.blocks[0]], {}, "branches: .kind, module. or .kind, reader, writer. is needed"),
        (model, later, {}, r"branches: network 0, branch 1 \(blocks.0.attention\): is called twice or out of order"),
        (
            model,
            lambda model: [("mlp", jax.vmap(model.blocks[0].mlp))],
            {},
            r"branches: network 0, branch 0 \(mlp.0\): is not a module of the model",
        ),
        (
            model,
            lambda model: [("mlp", model.blocks[0].mlp.layers[0])],
            {},
            r"branches: network 0, branch 0 .*: reads shape \(3, 8\) and adds \(3, 16\): one shape is needed",
        ),
        (
            eqx.tree_at(lambda model: model.blocks[0].mlp.layers[1].weight, model, replace_fn=lambda W: W * jnp.nan),
            whole,
            {},
            r"increment: network 0, branch 1 \(blocks.0.mlp\): 24 entries are NaN or infinite",
        ),
    ):
        with pytest.raises(si.InputError, match=f"^{message}"):
            si.observe_branches.equinox(make, X0, branches, **options)
    with pytest.raises(si.InputError, match="increment: networks 0 and 1: the same increments"):
        si.observe_branches.equinox(lambda key: model, X0, whole, networks=2, key=jr.key(0))


@pytest.fixture
def flax_network():
    nnx = pytest.importorskip("flax.nnx")

    class FlaxBlock(nnx.Module):
        def __init__(self, rngs):
            self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
            self.up, self.down = nnx.Linear(WIDTH, 16, rngs=rngs), nnx.Linear(16, WIDTH, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, X):
            X = X + self.linear(inputs=self.norm(X))
            return X + self.dropout(jax.vmap(self.mlp)(self.norm(X)))

        def mlp(self, X):
            return self.down(jnp.tanh(self.up(X)))

    class FlaxNetwork(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.List([FlaxBlock(rngs) for _ in range(2)])
            self.unused = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

        def __call__(self, X):
            for block in self.blocks:
                X = block(X)
            return X

    return FlaxNetwork


def of_flax(model):
    return [part for block in model.blocks for part in (("linear", block.linear), ("mlp", block.up, block.down))]


def flax_by_hand(model, X):
    found = []
    for block in model.blocks:
        U = block.norm(X)
        D = block.linear(U)
        V = block.norm(X + D)
        E = block.down(jnp.tanh(block.up(V)))
        found += [(U, D), (V, E)]
        X = X + D + E
    return [np.array([[pair[part] for pair in found]]) for part in (0, 1)]


def test_flax(flax_network):
    from flax import nnx

    X = jr.normal(jr.key(2), (2, TOKENS, WIDTH))
    data = si.observe_branches.flax(flax_network, X, of_flax, networks=2, key=jr.key(0))
    for number in range(2):
        model = flax_network(nnx.Rngs(jr.fold_in(jr.key(0), number)))
        U, D = (each.reshape(1, 4, -1, WIDTH) for each in flax_by_hand(model, X))
        assert_branches(data.isel(network=[number]), U, D, tolerance=1e-5)
    assert data["name"].values.tolist() == ["blocks.0.linear", "blocks.0.up", "blocks.1.linear", "blocks.1.up"]
    assert data.attrs == {"prompts": "3,3", "reads": "branch"}


def test_a_model_of_flax_is_left_as_it_was(flax_network):
    from flax import nnx

    model = flax_network(nnx.Rngs(0))
    data = si.observe_branches.flax(model, X0, of_flax)
    assert_branches(data, *flax_by_hand(model, X0), tolerance=1e-5)
    assert type(model.blocks[0].linear) is nnx.Linear
    assert not model.blocks[0].dropout.deterministic


def test_what_is_wrong_with_models_of_flax(flax_network):
    from flax import nnx

    model = flax_network(nnx.Rngs(0))
    for make, branches, message in (
        (flax_network, of_flax, "key: a function that draws networks needs one"),
        (model, lambda model: [("a", jnp.tanh)], r"branches: network 0, branch 0 \(a.0\): a module of Flax is needed"),
        (
            model,
            lambda model: [("a", model.unused)],
            r"branches: network 0, branch 0 \(unused\): its input is not seen",
        ),
        (
            model,
            lambda model: of_flax(model)[::-1],
            "branches: network 0, branch 3 .*: is called twice or out of order",
        ),
        (model, lambda model: of_flax(model)[:1] * 2, "branches: network 0, branch 1 .*: is called twice or out of"),
    ):
        with pytest.raises(si.InputError, match=f"^{message}"):
            si.observe_branches.flax(make, X0, branches)
