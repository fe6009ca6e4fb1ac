"""Modules that train: they compute the paper's equations, and at initialisation have the law of the layers."""

import functools
import math
from typing import Any

import jax.random as jr
import ml_dtypes
import numpy as np
import pytest
from helpers.budget import assert_estimate, assert_same_distribution, mean_and_error
from helpers.module_libraries import Flax, Torch
from helpers.references import assert_agrees, packed

import sdeinfer as si

WIDTH, TOKENS, BATCH = 16, 5, 2
GAMMA, TAU0, C_PLUS, C_MINUS = 0.6, 0.3, 0.7, -1.4
ATTENTION: dict[str, Any] = {"gamma": GAMMA, "tau0": TAU0}
FEEDFORWARD: dict[str, Any] = {"gamma": GAMMA, "c_plus": C_PLUS, "c_minus": C_MINUS}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("ShapedAttention", ATTENTION),
    "causal attention": ("ShapedAttention", ATTENTION | {"causal": True}),
    "heads": ("ShapedAttention", ATTENTION | {"heads": 4, "key_width": 3, "causal": True}),
    "projection": ("ShapedAttention", ATTENTION | {"heads": 2, "output_projection": True}),
    "gains": ("ShapedAttention", ATTENTION | {"gamma1": 0.8, "gamma2": 1.1, "trainable_gains": True, "causal": True}),
    "constant gains": ("ShapedAttention", ATTENTION | {"gamma1": 0.8, "gamma2": 1.1}),
    "feedforward": ("ShapedFeedForward", FEEDFORWARD),
    "expansion": ("ShapedFeedForward", FEEDFORWARD | {"expansion": 2}),
    "transformer": ("ShapedTransformer", ATTENTION | FEEDFORWARD),
    "sizes": (
        "ShapedTransformer",
        ATTENTION | FEEDFORWARD | {"heads": 2, "output_projection": True, "causal": True, "expansion": 2},
    ),
}

COMPILED = ("gains", "sizes")

DEPTH, LAW_WIDTH, NETWORKS = 8, 32, 400
V0 = np.array([[1.3, 0.4, -0.2], [0.4, 0.9, 0.1], [-0.2, 0.1, 1.1]])
LAWS: dict[str, dict[str, Any]] = {
    "heads": {"heads": 2, "key_width": 4},
    "all sizes": {"heads": 4, "output_projection": True, "causal": True, "expansion": 2},
}
LAW_OF = {"gamma": 0.5, "tau0": 0.6, "c_plus": 1.0, "c_minus": -2.0}

HALF_WIDTH, HALF_DEPTH, HALF_GAMMA = 128, 32, 0.06
"""λ = √(1 − γ²) is 1 in bfloat16."""

KEPT = 3
"""Tokens that are not padding."""

PRECISIONS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


def tokens(*shape: int, scale: float = 2.0, seed: int = 0) -> np.ndarray:
    """Tokens large enough for a softmax that is far from flat."""
    return scale * np.random.default_rng(seed).standard_normal(shape)


def tokens_of(V: np.ndarray, networks: int, width: int) -> np.ndarray:
    """For each network, tokens in random directions with X Xᵀ/n = V."""
    G = np.random.default_rng(3).standard_normal((networks, width, len(V)))
    return math.sqrt(width) * np.linalg.cholesky(V) @ np.linalg.qr(G)[0].swapaxes(1, 2)


OF_TORCH = [pytest.mark.torch, pytest.mark.filterwarnings("default")]
"""Warnings are those of the library."""


@pytest.fixture(scope="module", params=["flax", pytest.param("torch", marks=OF_TORCH)])
def of(request):
    """A library."""
    return {"flax": Flax, "torch": Torch}[request.param]()


def made(of, case: str):
    """The module of a case, with the same weights each time."""
    kind, arguments = CASES[case]
    return getattr(of.modules, kind)(WIDTH, **arguments, **of.options())


def inside(weights, part: str) -> dict[str, np.ndarray]:
    """Those of a part of a module."""
    return {name.removeprefix(part): value for name, value in weights.items() if name.startswith(part)}


def normal(weights):
    """The N(0, 1) matrix of weights of N(0, 1/fan_in)."""
    return math.sqrt(len(weights)) * weights


def attention(X, weights, *, gamma, tau0, heads=1, key_width=None, causal=False, gamma1=1.0, gamma2=1.0, **_):
    """Eq. 1, 9 and 33 for one sequence, token by token; gains that are parameters are among the weights."""
    m, n = X.shape
    size = n // heads if key_width is None else key_width
    W_Q, W_K, W_V = (normal(weights[name]) for name in ("query", "key", "value"))
    gamma1, gamma2 = weights.get("gamma1", gamma1), weights.get("gamma2", gamma2)
    tau, Z = tau0 * math.sqrt(n * size), np.empty((m, n))
    for head in range(heads):
        own = slice(head * size, (head + 1) * size)
        columns = slice(head * n // heads, (head + 1) * n // heads)
        Y = X @ W_Q[:, own] @ W_K[:, own].T @ X.T / n
        for a in range(m):
            seen = range(a + 1 if causal else m)
            total = sum(math.exp(Y[a, b] / tau) for b in seen)
            A = np.zeros(m)
            A[a] = gamma1
            for b in seen:
                A[b] += math.exp(Y[a, b] / tau) / total - gamma2 / len(seen)
            Z[a, columns] = A @ X @ W_V[:, columns] / math.sqrt(n)
    if "output" in weights:
        Z = Z @ normal(weights["output"]) / math.sqrt(n)
    return math.sqrt(1 - gamma**2) * X + gamma * Z


def feedforward(X, weights, *, gamma, c_plus, c_minus, expansion=1, **_):
    """Eq. 4 for one sequence."""
    n = X.shape[1]
    up, down = 1 + c_plus / math.sqrt(n), 1 + c_minus / math.sqrt(n)
    h = X @ normal(weights["pre"]) / math.sqrt(n)
    shaped = np.where(h > 0, up * h, down * h) * math.sqrt(2 / (up**2 + down**2))
    return math.sqrt(1 - gamma**2) * X + gamma * shaped @ normal(weights["post"]) / math.sqrt(expansion * n)


def naive(kind: str, X, weights, arguments):
    """Eq. 4, 9 or 11, with the weights of a module."""
    if kind == "ShapedAttention":
        return attention(X, weights, **arguments)
    if kind == "ShapedFeedForward":
        return feedforward(X, weights, **arguments)
    between = attention(X, inside(weights, "attention."), **arguments)
    return feedforward(between, inside(weights, "feedforward."), **arguments)


@pytest.mark.parametrize("case", CASES)
def test_modules_compute_the_equations_of_the_paper(case, of):
    (kind, arguments), module, X = CASES[case], made(of, case), tokens(BATCH, TOKENS, WIDTH)
    found, weights = of.numpy(of.call(module, of.array(X))), of.parameters(module)
    assert_agrees(found, np.stack([naive(kind, one, weights, arguments) for one in X]), rtol=1e-13)
    if case in COMPILED:
        assert_agrees(of.numpy(of.otherwise(module, of.array(X))), found, rtol=1e-13)
        assert_agrees(of.numpy(of.call(module, of.array(X[0]))), found[0], rtol=1e-13)


@pytest.mark.one_case("flax-sizes")
@pytest.mark.parametrize("case", CASES)
def test_every_parameter_gets_its_gradient(case, of):
    """The derivative along a random direction is that of the naive twin, by central differences."""
    (kind, arguments), module, X = CASES[case], made(of, case), tokens(BATCH, TOKENS, WIDTH)
    weights, gradients = of.parameters(module), of.gradients(module, of.array(X))
    assert gradients.keys() == weights.keys()
    assert ("gamma1" in weights) == ("gamma2" in weights) == arguments.get("trainable_gains", False)
    rng, step = np.random.default_rng(1), 1e-5

    def value(name, change):
        return sum(np.sin(naive(kind, one, weights | {name: weights[name] + change}, arguments)).sum() for one in X)

    for name, gradient in gradients.items():
        along = rng.standard_normal(gradient.shape) / math.sqrt(gradient.size)
        numerical = (value(name, step * along) - value(name, -step * along)) / (2 * step)
        # Central differences leave h²/6 of a third derivative, and rounding over h.
        assert abs((gradient * along).sum() - numerical) < 1e-6 * np.linalg.norm(gradient), name


@pytest.mark.long
@pytest.mark.parametrize("name", LAWS)
def test_networks_of_modules_have_the_law_of_the_layers(name, of):
    """Mean and covariance of V after one block; trace and a correlation after all of them."""
    sizes = {key: value for key, value in LAWS[name].items() if key != "causal"}
    pattern = si.CAUSAL if LAWS[name].get("causal") else si.Pattern()
    layer = si.ShapedTransformer(**LAW_OF, **sizes, pattern=pattern)
    exact = si.sample_networks(layer, V0, width=LAW_WIDTH, depth=DEPTH, networks=2000, key=jr.key(5))
    exact = exact["covariance"].values[:, 1:]
    make = functools.partial(of.modules.ShapedTransformer, LAW_WIDTH, **LAW_OF, **LAWS[name])
    V = of.covariances(make, tokens_of(V0, NETWORKS, LAW_WIDTH), depth=DEPTH)
    assert V.shape[1:] == exact.shape[1:]
    first = [packed(each[:, 0]) for each in (V, exact)]
    rows, columns = np.triu_indices(first[0].shape[1])
    centred = [each - each.mean(axis=0) for each in first]
    for samples in (first, [x[:, rows] * x[:, columns] for x in centred]):
        (ours, error), (theirs, its_error) = map(mean_and_error, samples)
        assert_estimate(ours, theirs, np.hypot(error, its_error))
    assert_same_distribution(*(np.trace(each[:, -1], axis1=1, axis2=2) for each in (V, exact)))
    last = (each[:, -1] for each in (V, exact))
    assert_same_distribution(*(each[:, 0, 1] / np.sqrt(each[:, 0, 0] * each[:, 1, 1]) for each in last))


@pytest.mark.long
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_half_precision_keeps_what_is_small(dtype, of):
    X, options = of.array(tokens(TOKENS, HALF_WIDTH, scale=1.0), dtype), of.options(dtype)
    block = of.modules.ShapedTransformer(HALF_WIDTH, **LAW_OF | {"gamma": HALF_GAMMA, "heads": 4}, **options)
    trained = of.modules.ShapedAttention(HALF_WIDTH, 0.5, 1.0, trainable_gains=True, **options)
    found, kept = of.numpy(block.attention.mixing(X)), block(X).dtype
    exact = of.numpy(of.widened(block).attention.mixing(of.array(of.numpy(X))))
    error, scale = np.abs(found - exact).max(), np.abs(exact).max()
    identity, number = np.eye(TOKENS), PRECISIONS[dtype]
    beside_identity = np.abs((identity + exact).astype(number).astype(float) - identity - exact).max()
    # Queries, keys and their products are rounded, and the error is one of A − I, not of A.
    assert error < 4 * float(ml_dtypes.finfo(number).eps) / 2 * scale
    assert beside_identity > 5 * error
    assert all(np.isfinite(each).all() for each in of.gradients(trained, X).values())
    assert kept == X.dtype
    assert "float32" in str(trained.gamma1.dtype)


@pytest.mark.one_case
@pytest.mark.parametrize("dtype", PRECISIONS)
def test_half_precision_keeps_norms_over_depth(dtype, of):
    """With λ rounded to 1 squared norms would grow by 1 + γ² in each of the two layers of a block."""
    X, options = of.array(tokens(TOKENS, HALF_WIDTH, scale=1.0), dtype), of.options(dtype)
    arguments = LAW_OF | {"gamma": HALF_GAMMA, "heads": 4}
    blocks = [of.modules.ShapedTransformer(HALF_WIDTH, **arguments, **options) for _ in range(HALF_DEPTH)]
    squares = []
    for _ in ("half", "double"):
        squares.append((of.numpy(functools.reduce(lambda X, block: of.call(block, X), blocks, X)) ** 2).sum(axis=1))
        X, blocks = of.array(of.numpy(X)), [of.widened(block) for block in blocks]
    growth = (1 + HALF_GAMMA**2) ** (2 * HALF_DEPTH) - 1
    assert np.abs(np.divide(*squares) - 1).max() < growth / 10


@pytest.mark.long
@pytest.mark.parametrize("case", ["attention", "heads", "sizes"])
def test_padding_changes_nothing(case, of):
    """By a mask of columns, of both rows and columns, and of one row."""
    module, X, seen = made(of, case), tokens(BATCH, TOKENS, WIDTH), np.arange(TOKENS) < KEPT
    kept = of.numpy(of.call(module, of.array(X[:, :KEPT])))
    for mask in (np.tile(seen, (BATCH, 1, 1)), seen[:, None] & seen, seen):
        found = of.numpy(of.call(module, of.array(X), of.array(mask)))
        assert_agrees(found[:, :KEPT], kept, rtol=1e-13)
        assert np.isfinite(found).all()
    gradients = of.gradients(module, of.array(X), of.array(seen[:, None] & seen))
    assert all(np.isfinite(each).all() for each in gradients.values())


HANDED_OVER = {
    "gains": si.ShapedAttention(**ATTENTION, gamma1=0.8, gamma2=1.1, pattern=si.CAUSAL),
    "expansion": si.ResidualFeedForward(**FEEDFORWARD, expansion=2),
    "transformer": si.ShapedTransformer(**ATTENTION, c_plus=C_PLUS, c_minus=C_MINUS),
    "sizes": si.OverDepth(
        si.ShapedTransformer(
            0.1, TAU0, C_PLUS, C_MINUS, expansion=2, heads=2, output_projection=True, pattern=si.CAUSAL
        ),
        gamma=lambda t: GAMMA + t,
    ).at(0.0),
}


@pytest.mark.parametrize("case", HANDED_OVER)
def test_layers_are_handed_over(case, of):
    """Modules made of layers compute what those with the same arguments do."""
    module = getattr(of.modules, CASES[case][0]).of(HANDED_OVER[case], WIDTH, **of.options())
    X = of.array(tokens(BATCH, TOKENS, WIDTH))
    assert_agrees(of.numpy(of.call(module, X)), of.numpy(of.call(made(of, case), X)), rtol=1e-13)


PROMPTS = si.ShapedAttention(**ATTENTION, pattern=si.Pattern(prompts=(2, 3)))
OVER_DEPTH = si.OverDepth(si.ShapedAttention(**ATTENTION), gamma=lambda t: 0.5)
REFUSED = {
    "pattern: modules are causal or not and take any mask with X; the layer has 2 prompts of 2, 3 tokens": (
        lambda modules: modules.ShapedAttention.of(PROMPTS, WIDTH)
    ),
    "layer: a ShapedTransformer is needed, got ShapedAttention": (
        lambda modules: modules.ShapedTransformer.of(si.ShapedAttention(**ATTENTION), WIDTH)
    ),
    "layer: a ShapedAttention is needed, got OverDepth; take the layer at a depth-time, layer.at(t)": (
        lambda modules: modules.ShapedAttention.of(OVER_DEPTH, WIDTH)
    ),
    "heads: the width 16 is not a multiple of 3": lambda modules: modules.ShapedAttention(WIDTH, 0.5, 1.0, heads=3),
    "gamma: must be in (0, 1], got 1.5": lambda modules: modules.ShapedTransformer(WIDTH, 1.5, 1.0, 1.0, -1.0),
    "tau0: must be greater than 0 and finite, got 0": lambda modules: modules.ShapedAttention(WIDTH, 0.5, 0.0),
    "expansion: times the width 16 must be a whole number, got 0.3": (
        lambda modules: modules.ShapedFeedForward(WIDTH, 0.5, 1.0, -1.0, expansion=0.3)
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_wrong_is_said_in_one_line(message, of):
    with pytest.raises(si.InputError) as caught:
        REFUSED[message](of.modules)
    assert str(caught.value) == message


@pytest.mark.torch
@pytest.mark.filterwarnings("default")
def test_modules_of_pytorch_can_be_made_before_their_memory():
    """As sharded training makes large ones: on the device `meta`, with `reset_parameters` of every part later."""
    of = Torch()

    def make():
        return of.modules.ShapedTransformer(16, 0.5, 1.0, 1.0, -1.0, gamma1=0.9, trainable_gains=True)

    of.torch.manual_seed(0)
    expected = make().state_dict()
    with of.torch.device("meta"):
        module = make()
    module.to_empty(device="cpu")
    of.torch.manual_seed(0)
    for part in module.modules():
        if hasattr(part, "reset_parameters"):
            part.reset_parameters()
    assert expected["attention.gamma1"] == 0.9
    assert all(value.equal(expected[name]) for name, value in module.state_dict().items())
