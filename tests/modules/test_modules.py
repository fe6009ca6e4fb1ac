"""Modules that train: they compute the paper's equations, and at initialisation have the law of the layers.

Those of PyTorch are run by the interpreter that `SDEINFER_TORCH_PYTHON` names; its default is the one of the tests.
"""

import functools
import math

import budget
import jax.random as jr
import ml_dtypes
import module_runs
import numpy as np
import pytest
import torch_interpreter
from module_runs import BATCH, CASES, COMPILED, KEPT, LAWS, TOKENS, WIDTH
from references import assert_agrees, packed
from scipy import stats

import sdeinfer as si

PRECISIONS = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}


@pytest.fixture(scope="module", params=["flax", pytest.param("torch", marks=pytest.mark.torch)])
def library(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def found(library, tmp_path_factory):
    """A function from a subject of `module_runs` to its arrays; Flax's are computed when they are asked for."""
    if library == "flax":
        pytest.importorskip("flax")
        of = module_runs.LIBRARIES[library]()
        return functools.cache(lambda subject: module_runs.SUBJECTS[subject](of))
    out = tmp_path_factory.mktemp("modules") / "torch.npz"
    torch_interpreter.run("module_runs.py", library, out, libraries="torch, sdeinfer", JAX_ENABLE_X64="1")
    with np.load(out) as file:
        arrays = dict(file)
    return lambda subject: named(arrays, f"{subject}/")


def named(arrays, start: str) -> dict[str, np.ndarray]:
    """The arrays of a subject, by the rest of their names."""
    return {name.removeprefix(start): value for name, value in arrays.items() if name.startswith(start)}


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
    between = attention(X, named(weights, "attention."), **arguments)
    return feedforward(between, named(weights, "feedforward."), **arguments)


@pytest.mark.parametrize("case", CASES)
def test_modules_compute_the_equations_of_the_paper(case, found):
    kind, arguments = CASES[case]
    of, weights = named(found("outputs"), f"{case}/"), named(found("outputs"), f"{case}/parameter ")
    X = module_runs.tokens(BATCH, TOKENS, WIDTH)
    assert_agrees(of["X"], np.stack([naive(kind, one, weights, arguments) for one in X]), rtol=1e-13)
    if case in COMPILED:
        assert_agrees(of["otherwise"], of["X"], rtol=1e-13)
        assert_agrees(of["one"], of["X"][0], rtol=1e-13)


@pytest.mark.parametrize("case", CASES)
def test_every_parameter_gets_its_gradient(case, found):
    """The derivative along a random direction is that of the naive twin, by central differences."""
    kind, arguments = CASES[case]
    weights, gradients = (named(found("outputs"), f"{case}/{what} ") for what in ("parameter", "gradient"))
    assert gradients.keys() == weights.keys()
    assert ("gamma1" in weights) == ("gamma2" in weights) == arguments.get("trainable_gains", False)
    X, rng, step = module_runs.tokens(BATCH, TOKENS, WIDTH), np.random.default_rng(1), 1e-5

    def value(name, change):
        return sum(np.sin(naive(kind, one, weights | {name: weights[name] + change}, arguments)).sum() for one in X)

    for name, gradient in gradients.items():
        along = rng.standard_normal(gradient.shape) / math.sqrt(gradient.size)
        numerical = (value(name, step * along) - value(name, -step * along)) / (2 * step)
        # Central differences leave h²/6 of a third derivative, and rounding over h.
        assert abs((gradient * along).sum() - numerical) < 1e-6 * np.linalg.norm(gradient), name


@pytest.mark.parametrize("name", LAWS)
def test_networks_of_modules_have_the_law_of_the_layers(name, found, library):
    """Mean and covariance of V after one block; trace and a correlation after all of them."""
    sizes = {key: value for key, value in LAWS[name].items() if key != "causal"}
    pattern = si.CAUSAL if LAWS[name].get("causal") else si.Pattern()
    layer = si.ShapedTransformer(**module_runs.LAW_OF, **sizes, pattern=pattern)
    width, depth = module_runs.LAW_WIDTH, module_runs.DEPTH
    exact = si.sample_networks(layer, module_runs.V0, width=width, depth=depth, networks=2000, key=jr.key(5))
    exact = exact["covariance"].values[:, 1:]
    V = found("law")[name]
    assert V.shape[1:] == exact.shape[1:]
    first = [packed(each[:, 0]) for each in (V, exact)]
    rows, columns = np.triu_indices(first[0].shape[1])
    centred = [each - each.mean(axis=0) for each in first]
    for what, samples in (("mean", first), ("covariance", [x[:, rows] * x[:, columns] for x in centred])):
        (ours, error), (theirs, its_error) = map(budget.mean_and_error, samples)
        z = (ours - theirs) / np.hypot(error, its_error)
        print(f"\n{library}, {name}, {what} after one block: z from {z.min():+.2f} to {z.max():+.2f} of {z.size}")
        budget.assert_estimate(ours, theirs, np.hypot(error, its_error))
    of_last = {
        "tr V": lambda V: np.trace(V[:, -1], axis1=1, axis2=2),
        "correlation": lambda V: V[:, -1, 0, 1] / np.sqrt(V[:, -1, 0, 0] * V[:, -1, 1, 1]),
    }
    for what, statistic in of_last.items():
        p = stats.ks_2samp(statistic(V), statistic(exact)).pvalue  # pyright: ignore[reportAttributeAccessIssue]
        print(f"{library}, {name}, {what} after {depth} blocks: p = {p:.3f}")
        budget.assert_same_distribution(statistic(V), statistic(exact))


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_half_precision_keeps_what_is_small(dtype, found, library):
    of, number = named(found("half"), f"{dtype}/"), PRECISIONS[dtype]
    exact, epsilon = of["A − I in double"], float(ml_dtypes.finfo(number).eps) / 2
    error, scale = np.abs(of["A − I in half"] - exact).max(), np.abs(exact).max()
    identity = np.eye(TOKENS)
    beside_identity = np.abs((identity + exact).astype(number).astype(float) - identity - exact).max()
    print(f"\n{library}, {dtype}: A − I of {scale:.3g} is off by {error:.2g}, beside I by {beside_identity:.2g}")
    # Queries, keys and their products are rounded, and the error is one of A − I, not of A.
    assert error < 4 * epsilon * scale
    assert beside_identity > 5 * error
    assert all(np.isfinite(each).all() for each in named(of, "gradient ").values())
    kept, given, gain = of["types"]
    assert kept == given
    assert "float32" in gain


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_half_precision_keeps_norms_over_depth(dtype, found, library):
    """With λ rounded to 1 squared norms would grow by 1 + γ² in each of the two layers of a block."""
    half, double = ((found("half")[f"{dtype}/X in {name}"] ** 2).sum(axis=1) for name in ("half", "double"))
    growth = (1 + module_runs.HALF_GAMMA**2) ** (2 * module_runs.HALF_DEPTH) - 1
    off = np.abs(half / double - 1).max()
    print(f"\n{library}, {dtype}: squared norms are off by {off:.2g}; a λ of 1 adds {growth:.2g}")
    assert off < growth / 10


@pytest.mark.parametrize("case", ["attention", "heads", "sizes"])
def test_padding_changes_nothing(case, found):
    of = named(found("padding"), f"{case}/")
    for mask in ("columns", "both", "row"):
        assert_agrees(of[mask][:, :KEPT], of["kept"], rtol=1e-13)
        assert np.isfinite(of[mask]).all()
    assert all(np.isfinite(each).all() for each in named(of, "gradient ").values())


def test_layers_are_handed_over(found):
    """Modules made of layers compute what those with the same arguments do."""
    made = found("handed over")
    for case in ("gains", "expansion", "transformer", "sizes"):
        assert_agrees(made[case], found("outputs")[f"{case}/X"], rtol=1e-13)


def test_what_is_wrong_is_said_in_one_line(found):
    assert {name: str(said) for name, said in named(found("handed over"), "error ").items()} == {
        "pattern": "pattern: modules are causal or not and take any mask with X; the layer has 2 prompts of 2, 3 "
        "tokens",
        "kind": "layer: a ShapedTransformer is needed, got ShapedAttention",
        "over depth": "layer: a ShapedAttention is needed, got OverDepth; take the layer at a depth-time, layer.at(t)",
        "heads": "heads: the width 16 is not a multiple of 3",
        "gamma": "gamma: must be in (0, 1], got 1.5",
        "tau0": "tau0: must be greater than 0 and finite, got 0",
        "expansion": "expansion: times the width 16 must be a whole number, got 0.3",
    }


@pytest.mark.torch
def test_modules_of_pytorch_can_be_made_before_their_memory():
    """As sharded training makes large ones: on the device `meta`, with `reset_parameters` of every part later."""
    lines = (
        "import torch",
        "from sdeinfer.modules.torch import ShapedTransformer",
        "make = lambda: ShapedTransformer(16, 0.5, 1.0, 1.0, -1.0, gamma1=0.9, trainable_gains=True)",
        "torch.manual_seed(0)",
        "expected = make().state_dict()",
        "with torch.device('meta'): module = make()",
        "module.to_empty(device='cpu')",
        "torch.manual_seed(0)",
        "for part in module.modules():",
        "    if hasattr(part, 'reset_parameters'): part.reset_parameters()",
        "assert expected['attention.gamma1'] == 0.9",
        "assert all(value.equal(expected[name]) for name, value in module.state_dict().items())",
    )
    torch_interpreter.run("-c", "\n".join(lines), libraries="torch, sdeinfer", JAX_ENABLE_X64="1")
