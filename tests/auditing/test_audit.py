"""The books of an audit, without PyTorch: laws, records written by hand, functions of JAX, recipes."""

import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.internals import (
    Declared,
    Graph,
    Law,
    Node,
    Record,
    Row,
    StoredTensor,
    copies,
    critical,
    law_of,
    of_seed,
    pooled_ratio,
    repeated_slices,
    streams_of,
)
from scipy import stats

import sdeinfer as si

RULES = si.audit.recipes


def test_numpy_and_scipy_are_enough():
    """Of the room, and of an audit of books."""
    blocked = "jax jaxlib numpyro pandas xarray equinox lineax jaxtyping beartype typer matplotlib arviz"
    lines = (
        "import sys",
        f"sys.modules.update(dict.fromkeys({blocked!r}.split()))",
        "import sdeinfer.auditing as room",
        "assert all(getattr(room, name) for name in dir(room))",
        "room.audit.recipes.gpt2(), room.audit.Monitor, room.audit.scaling",
    )
    subprocess.run([sys.executable, "-W", "error", "-c", "\n".join(lines)], check=True)


def of(x):
    flat = np.asarray(x, float).ravel()
    return StoredTensor(np.shape(x), lambda index: flat[index], float(flat.min()), float(flat.max()))


def drawn(seed=0, shape=(96, 128)):
    return np.random.default_rng(seed).standard_normal(shape)


def truncated(edge):
    x = drawn(1, 40_000)
    return x[np.abs(x) < edge][:12_000].reshape(100, 120)


LAWS = {
    "normal": drawn(),
    "uniform": np.random.default_rng(0).uniform(-1, 1, (96, 128)),
    "truncated": truncated(2.0),
    "orthogonal": np.linalg.qr(drawn(0, (128, 128)))[0],
    "constant": np.ones(5),
    "zeros": np.zeros((3, 3)),
    "not finite": np.full((4, 4), np.nan),
}


@pytest.mark.parametrize("name", LAWS)
def test_laws(name):
    law = law_of(of(LAWS[name]))
    assert law.name == name
    if name in ("normal", "uniform"):
        assert abs(math.log(law.sd / (1 if name == "normal" else 3**-0.5))) < critical(10) * law.error


def test_the_error_of_a_standard_deviation():
    """√((2 + κ₄)/(4N)) against the spread of many samples."""
    rng = np.random.default_rng(0)
    for draw in (rng.standard_normal, lambda shape: rng.uniform(-1, 1, shape)):
        found = [law_of(of(draw((24, 24)))) for _ in range(1200)]
        ratio = np.std(np.log([law.sd for law in found])) / np.mean([law.error for law in found])
        assert abs(ratio - 1) < 5 / math.sqrt(2 * 1200)


def test_the_level_is_that_of_all_tests_together():
    """One false alarm in 10,000 correct models, on both sides, whatever the number of tests."""
    for count in (1, 10, 1000):
        assert 2 * count * stats.norm.sf(critical(count)) == pytest.approx(1e-4)


def test_a_pooled_ratio_is_that_of_all_entries():
    """Of 400 and 1,200 entries that are normal and 10 % and 20 % too large: the error of 1,600."""
    matrix = si.auditing.Matrix("up", 64, 64, 64, 3)
    one = Declared(0.0, 1.0)
    own = [Row(matrix, Law(n, n, 0.0, x, 0.0, 3.0, "normal"), one) for n, x in ((400, 1.1), (1200, 1.2))]
    expected = math.log((1.1**2 + 3 * 1.2**2) / 4) / 2, 1 / math.sqrt(2 * 1600)
    assert pooled_ratio(own) == pytest.approx(expected)


def test_copies_and_blocks():
    x, y = drawn(0, (64, 64)), drawn(1, (64, 64))
    near = 0.8 * x + 0.6 * y
    parameters = {"x": of(x), "same": of(2 * x), "near": of(near), "other": of(drawn(2, (64, 64)))}
    found = copies(parameters, {name: law_of(each) for name, each in parameters.items()})
    assert [(first, second) for first, second, _ in found] == [("x", "same"), ("x", "near")]
    assert repeated_slices(of(np.concatenate([x, x]))) == 2
    assert repeated_slices(of(np.concatenate([x, x, x, x], 1))) == 4
    assert repeated_slices(of(x)) == 1


def test_the_same_entries_in_another_order_are_copies():
    x, y = drawn(0, (64, 64)), drawn(1, (64, 64))
    half = np.concatenate([y[:32], x[32:]])
    parameters = {"x": of(x), "turned": of(0.5 * x.T), "half": of(half), "other": of(drawn(2, (64, 64)))}
    parameters |= {"heads": of(np.repeat(y.reshape(64, 8, 8)[:, :1], 8, 1))}
    found = copies(parameters, {name: law_of(each) for name, each in parameters.items()})
    assert {(first, second) for first, second, _ in found} == {("x", "turned"), ("x", "half")}
    assert repeated_slices(parameters["heads"]) == 8
    assert repeated_slices(of(np.sign(x))) == 1, "signs are alike by chance"


def test_laws_of_few_entries_and_of_matrices_with_zeros():
    """Of 3 × 500 uniform laws all are named; 8 columns of zeros in 64 lower σ, a row of zeros does not."""
    rng = np.random.default_rng(0)
    for size in (256, 512, 1024):
        assert {law_of(of(rng.uniform(-1, 1, size))).name for _ in range(500)} == {"uniform"}
    x = drawn(0, (64, 64))
    x[:, :8] = 0
    assert law_of(of(x)).sd == pytest.approx(x.std())
    padded = drawn(1, (64, 64))
    padded[0] = 0
    assert law_of(of(padded)).sd == pytest.approx(padded[1:].std())


def test_no_copies_among_many_independent_tensors():
    parameters = {str(seed): of(drawn(seed, (40, 40))) for seed in range(200)}
    assert not copies(parameters, {name: law_of(each) for name, each in parameters.items()})


def record(*nodes):
    for number, node in enumerate(nodes):
        node.number = number
    return Record("by hand", list(nodes), {}, {}, [nodes[-1]], np.zeros)


def node(kind, *inputs, factors=(), **others):
    return Node(kind, inputs, (2, 3), factors=factors, rows=np.ones(2), **others)


def test_a_record_by_hand():
    """X′ = .9 X + .5 W f(V X), then a norm on the stream."""
    x = node("embedding")
    up = node("product", x, parameters=("V",))
    hidden = node("other", up)
    down = node("product", hidden, parameters=("W",))
    branch = node("scale", down, factors=(0.5,), about={"uniform": True})
    stream = node("scale", x, factors=(0.9,), about={"uniform": True})
    total = node("sum", stream, branch, factors=(1.0, 1.0))
    norm = node("norm", total)
    again = node("product", norm, parameters=("U",))
    last = node("sum", norm, again, factors=(1.0, -2.0))
    (chain,) = streams_of(Graph(record(x, up, hidden, down, branch, stream, total, norm, again, last)))
    first, second = chain
    assert (first.skip.factor, first.writers[0].factor, first.normed) == (0.9, 0.5, False)
    assert (second.skip.factor, second.writers[0].factor, second.normed) == (1.0, -2.0, True)
    assert [each.writers[0].node.parameters for each in chain] == [("W",), ("U",)]


N, LAYERS = 64, 3


def weights(seed=0, sd=0.02, last=1.0):
    rng = np.random.default_rng(seed)
    shapes = {"q": (N, N), "k": (N, N), "v": (N, N), "o": (N, N), "up": (N, 2 * N), "down": (2 * N, N)}
    scale = {"o": last, "down": last}
    return {
        name: jnp.asarray(sd * scale.get(name, 1.0) * rng.standard_normal((LAYERS, *shape)), jnp.float32)
        for name, shape in shapes.items()
    }


def network(parameters, x, *, factor=1.0, scale=N**-0.5, causal=True, inverse=False):
    def norm(x):
        root = jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
        return x * root if inverse else x / root

    def layer(x, own):
        u = norm(x)
        logits = scale * (u @ own["q"]) @ (u @ own["k"]).T
        logits = jnp.where(np.tri(len(x), dtype=bool), logits, -1e9) if causal else logits
        x = x + factor * (jax.nn.softmax(logits) @ (u @ own["v"]) @ own["o"])
        return x + factor * jax.nn.relu(norm(x) @ own["up"]) @ own["down"], None

    return jax.lax.scan(layer, x, parameters)[0]


def audited(change=None, recipe="gpt2", last=(2 * LAYERS) ** -0.5, **options):
    settings = {
        name: options.pop(name) for name in ("causal", "norm", "like", "allow") if name in options and name != "causal"
    }
    parameters = weights(last=last)
    if change is not None:
        parameters = change(parameters)

    def model(parameters, x):
        return network(parameters, x, **options)

    X = np.random.default_rng(5).standard_normal((8, N)).astype(np.float32)
    return si.audit((model, parameters), X, recipe=recipe, **settings)


def test_a_function_of_jax():
    found = audited()
    assert found.passed, found.verdict
    roles = {row.matrix.role for row in found.rows}
    assert roles == {"query", "key", "value", "attention output", "up", "mlp output"}
    assert found.layers == LAYERS
    assert str(audited(recipe=None)).startswith("nothing declared: model: 3 layers of width 64, norms before branches")
    assert audited(recipe=None).passed is None


def copied(parameters):
    return parameters | {"up": parameters["up"].at[2].set(parameters["up"][0])}


def divided(parameters):
    return parameters | {"down": parameters["down"] / (2 * LAYERS)}


def wider(parameters):
    return parameters | {"v": parameters["v"].at[1].multiply(1.3)}


CHANGES = {
    "depth": ({"last": 1.0}, "√(2L) = 2.45: the factor 1/√(2L) of the attention output matrices is missing"),
    "opposite": ({"last": 1.0, "change": divided}, "matrices is missing; σ of mlp output is 0.408 ± 0.002 times the"),
    "factor": ({"factor": 0.3}, "is multiplied by 0.3, declared 1"),
    "logits": ({"scale": 1.0}, "1/√d_k is missing"),
    "norm": ({"inverse": True}, "a norm multiplies by what it should divide by"),
    "copies": ({"change": copied}, "up[0] and up[2] are equal"),
    "one layer": ({"change": wider}, "v[1]"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_is_wrong_is_named(name):
    options, says = CHANGES[name]
    found = audited(**options)
    assert found.passed is False
    assert says in found.verdict, found.verdict


def test_standard_deviations_are_those_by_hand():
    def matrix(role, fan_in=64, fan_out=256, layers=8):
        return si.auditing.Matrix(role, fan_in, fan_out, 64, layers)

    last = matrix("mlp output", 256, 64)
    assert RULES.gpt2().sd(last) == pytest.approx(0.02 / 4)
    assert RULES.lecun().sd(last) == pytest.approx(1 / 16)
    assert RULES.xavier().sd(last) == pytest.approx(math.sqrt(2 / 320))
    assert RULES.kaiming().sd(last) == pytest.approx(math.sqrt(2 / 256))
    assert RULES.pytorch_linear().sd(last) == pytest.approx(1 / math.sqrt(3 * 256))
    assert RULES.mup(base_width=16).sd(last) == pytest.approx(0.01)
    assert RULES.mup(base_width=16).temperature(64) == 8
    assert RULES.completep(base_width=16, base_layers=2).multiplier(8) == 0.25
    assert RULES.deepnet().sd(matrix("value")) == pytest.approx(math.sqrt(2 / 320) * 64**-0.25)
    assert RULES.deepnet().skip(8) == 2
    own = RULES.of_rules({"*.wo": lambda matrix: 0.02 / math.sqrt(2 * (matrix.layer + 1)), "up": (0.03, "uniform")})
    assert own.sd(si.auditing.Matrix("attention output", 4, 4, 4, 4, 1, "layers.1.wo")) == pytest.approx(0.01)
    assert (own.sd(matrix("up")), own.law(matrix("up")), own.sd(matrix("gate"))) == (0.03, "uniform", None)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"recipe": "gpt3"}, "recipe: one of auto, gpt2, "),
        ({"recipe": "mup"}, r"recipe: mup needs base_width: pass si.audit.recipes.mup\(base_width=256\)"),
        ({"recipe": {"up": -1.0}}, "recipe: a standard deviation, or a function of a Matrix, is needed for up"),
        ({"recipe": "auto"}, "has no configuration that declares one"),
        (
            {"recipe": {"querry": 0.02}},
            "recipe: 'querry' is no role and matches no name of a parameter; the roles are ",
        ),
        ({"allow": ["bugs"]}, "allow: findings are "),
    ],
)
def test_unusable_arguments(arguments, line):
    with pytest.raises(si.InputError, match=line):
        si.audit((network, weights()), np.ones((4, N), np.float32), **arguments)


class OfSize:
    def __init__(self, size=4):
        self.size = size


class OfSeed:
    def __init__(self, size=4, seed=0):
        self.size = seed


@pytest.mark.parametrize(
    ("make", "expected"),
    [(lambda seed: seed, 7), (lambda: "own", "own"), (lambda seed=1, width=8: (seed, width), (7, 8))],
)
def test_functions_take_a_seed_or_nothing(make, expected):
    assert of_seed(make, 7) == expected
    assert (of_seed(OfSize, 7).size, of_seed(OfSeed, 7).size) == (4, 7)


def test_exponents_over_width_and_depth():
    """Strengths c σ √u of σ = .02/√(2L): ½ over width, −½ over depth; another σ over depth is wrong."""

    def make(width, layers, power=-0.5):
        rng = np.random.default_rng(width + layers)
        last = 0.02 * (2 * layers) ** power
        sizes = {"up": (0.02, (width, 2 * width)), "down": (last, (2 * width, width))}
        own = {
            name: jnp.asarray(sd * rng.standard_normal((layers, *shape)), jnp.float32)
            for name, (sd, shape) in sizes.items()
        }

        def layer(x, own):
            u = x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)
            return x + jax.nn.relu(u @ own["up"]) @ own["down"], None

        return lambda own, x: jax.lax.scan(layer, x, own)[0], own

    def inputs(width):
        return np.random.default_rng(1).standard_normal((4, width)).astype(np.float32)

    sizes = {"widths": [32, 64], "depths": [2, 4], "recipe": "gpt2"}
    found = si.audit.scaling(make, inputs, **sizes)
    assert found.passed, found
    of_strength = [row for row in found.exponents if row["quantity"] == "mlp.strength"]
    for row, expected in zip(of_strength, (0.5, -0.5), strict=True):
        assert row["declared"] == pytest.approx(expected, abs=1e-9)
        assert abs(row["exponent"] - expected) < 4 * row["sd"]
    for row in (row for row in found.sizes if row["quantity"] == "mlp.strength"):
        expected = math.log(0.02 * math.sqrt(2 * row["width"] / (2 * row["layers"])))
        assert abs(row["log_value"] - expected) < 4 * row["sd"]
    assert not si.audit.scaling(lambda *size: make(*size, power=0.0), inputs, **sizes).passed
