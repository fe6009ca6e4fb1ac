"""Models of Equinox and Flax, observed: against hidden states, and what branches read and add, computed by hand."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import xarray as xr
from helpers.branch_references import assert_branches
from helpers.internals import BlockOrder, stack_in

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


def drawn(number, make=Network):
    """The network that a seed of 0 draws as number k."""
    return make(jr.key(int(np.random.SeedSequence(0).generate_state(number + 1)[number])))


def states(model, X):
    """The hidden states after each layer, the initial ones first."""
    found = [X]
    for block in model.blocks:
        found.append(block.branches(found[-1])[1])
    return jnp.stack(found)


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


def test_streams_of_equinox():
    data = si.observe(Network, X0, networks=3)
    expected = si.observe(jnp.stack([states(drawn(number), X0) for number in range(3)]))
    xr.testing.assert_allclose(data, expected, rtol=1e-12)
    some = si.observe(Network, X0, networks=2, tokens=[0, 2])
    np.testing.assert_allclose(some["covariance"], data["covariance"][:2, :, [0, 2]][..., [0, 2]], rtol=1e-12)


def test_many_networks_are_compiled():
    """As they are one by one; a network of other sizes than the first is refused."""
    data, alone = si.observe(Network, X0, networks=9), si.observe(Network, X0, networks=2)
    xr.testing.assert_allclose(data.isel(network=slice(2)), alone, rtol=1e-12)
    expected = si.observe(states(drawn(8), X0)[None])
    np.testing.assert_allclose(data["covariance"][8], expected["covariance"][0], rtol=1e-12)
    depths = iter([1, 2])
    with pytest.raises(si.InputError, match="model: networks have other arrays than the first"):
        si.observe(lambda key: eqx.tree_at(lambda m: m.blocks, ONE, ONE.blocks[: next(depths)]), X0, networks=2)


class Plain(eqx.Module):
    """A network without a residual stream; its second matrix is scaled."""

    matrices: list[jax.Array]

    def __init__(self, key):
        self.matrices = list(jr.normal(key, (2, WIDTH, WIDTH)))

    def states(self, X):
        first = X @ self.matrices[0]
        return [X, first, 0.5 * (jnp.maximum(first, 0.0) @ self.matrices[1])]

    def __call__(self, X):
        return self.states(X)[-1]


def test_matrices_of_a_network_without_a_stream():
    data = si.observe(Plain, X0)
    expected = si.observe(jnp.stack(drawn(0, Plain).states(X0))[None])
    xr.testing.assert_allclose(data, expected, rtol=1e-12)


@pytest.mark.parametrize("compiled", [False, True])
def test_branches_of_equinox(compiled):
    data = si.observe_branches(lambda key: Network(key, compiled=compiled), X0, networks=2, pattern=si.CAUSAL)
    assert_branches(data, *by_hand([drawn(0), drawn(1)], X0))
    assert data["name"].values.tolist()[::3] == ["blocks.0.attention", "blocks.1.mlp.layers"]
    assert {**data.attrs}.items() >= {"causal": 1.0, "reads": "branch", "measured": 1.0}.items()
    assert [each["branch"]["kind"] for each in json.loads(data.attrs["blocks"])] == ["attention", "mlp"]


def test_branches_of_equinox_with_prompts():
    model = Network(jr.key(0), prompts=True)
    X = jr.normal(jr.key(2), (2, TOKENS, WIDTH))
    data = si.observe_branches(model, {"X": X}, width=WIDTH)
    U, D = zip(*(by_hand([model], each) for each in X), strict=True)
    assert_branches(data, np.concatenate(U, axis=2), np.concatenate(D, axis=2))
    assert data.attrs["prompts"] == "3,3"


def test_strengths_are_fitted_without_a_description():
    """The declared strengths are the square roots of u times the mean squares of the last matrices."""
    data = si.observe_branches(Network, X0)
    order = BlockOrder.of(stack_in(data.attrs), depth=1)
    weights = [block.attention.output_proj.weight for block in drawn(0).blocks]
    of_values = [block.attention.value_proj.weight for block in drawn(0).blocks]
    of_logits = [[getattr(b.attention, f"{x}_proj").weight for b in drawn(0).blocks] for x in ("query", "key")]
    squares = [float(jnp.mean(jnp.square(jnp.stack(each)))) for each in (weights, of_values, *of_logits)]
    expected = np.sqrt(WIDTH * squares[0] * squares[1] / np.sqrt(squares[2] * squares[3]))
    np.testing.assert_allclose(order.strengths["attention.strength"], expected, rtol=1e-3)
    path = si.prepare(si.models.branches, data)
    assert list(path.strengths) == list(order.strengths)
    with pytest.raises(si.InputError, match="architecture: no blocks describe the network"):
        si.prepare(si.models.branches, data.drop_attrs().assign_attrs(reads="branch", no_blocks="why"))


def broken(model):
    return eqx.tree_at(lambda model: model.blocks[1].mlp.layers[1].weight, model, replace_fn=lambda W: W * jnp.nan)


ONE = Network(jr.key(0))
REFUSED = [
    (lambda: si.observe(lambda key: broken(Network(key)), X0), "hidden_states: layer 2, network 0: 24 entries are NaN"),
    (lambda: si.observe(Network, X0, networks=0), "networks: a whole number of at least 1 is needed, got 0"),
    (lambda: si.observe(ONE, X0, networks=2), "networks: a module is one network, got 2: pass a function that draws"),
    (lambda: si.observe(ONE), "inputs: needed for Network"),
    (lambda: si.observe(ONE, X0, stream="decoder.*"), "stream: the model has no residual stream with parameters"),
    (lambda: si.observe(np.ones((1, 2, 3, 8)), networks=2), "networks: are drawn by a function, and hidden states"),
    (lambda: si.observe(np.ones((1, 2, 3, 8)), X0), "inputs: are for networks, and hidden states were given"),
    (
        lambda: si.observe_branches(ONE, X0, width=9),
        "width: input: network 0, branch 0 .blocks.0.attention. has",
    ),
    (lambda: si.observe_branches(Plain, X0), "stream: the model has no residual stream"),
    (
        lambda: si.observe_branches(broken(ONE), X0),
        r"increment: network 0, branch 3 .*: 24 entries are NaN or infinite",
    ),
    (
        lambda: si.observe_branches(lambda key: ONE, X0, networks=2),
        "increment: networks 0 and 1: the same increments",
    ),
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
            X = self.embedding(X) if jnp.issubdtype(X.dtype, jnp.integer) else X
            for block in self.blocks:
                X = block(X)
            return X

    return FlaxNetwork


def test_flax(flax_network):
    from flax import nnx

    seeds = np.random.SeedSequence(0).generate_state(2)
    models = [flax_network(nnx.Rngs(int(seed))) for seed in seeds]
    prompt = jnp.array([[0, 3, 1]])
    data = si.observe(lambda rngs: flax_network(rngs), prompt, networks=2)
    # Both branches are perceptrons, of one block by their names.
    expected = np.stack([states(model, model.embedding(prompt[0])) for model in models])
    np.testing.assert_allclose(data["covariance"], si.observe(expected)["covariance"], rtol=1e-5)
    X = jr.normal(jr.key(2), (2, TOKENS, WIDTH))
    data = si.observe_branches(lambda rngs: flax_network(rngs), X, networks=2)
    assert_branches(data, *(each.reshape(2, 4, -1, WIDTH) for each in by_hand(models, X)), tolerance=1e-5)
    assert data["name"].values.tolist() == ["blocks.0.linear", "blocks.0", "blocks.1.linear", "blocks.1"]
    assert data.attrs["prompts"] == "3,3"


def test_a_model_of_flax_is_left_as_it_was(flax_network):
    from flax import nnx

    model = flax_network(nnx.Rngs(0))
    model.blocks[0].dropout.deterministic = False
    si.observe_branches(model, X0)
    assert not model.blocks[0].dropout.deterministic
