"""Transformers with random shapes that are wrong in one way, and the verdict of `check` on each.

The networks are of NumPy and share no code with the package: one network at a time, with its weights. Each way has its
right answer, which was written down before any fit:

- *caught*: the verdict must not trust the fit. A refusal of the data counts too.
- *harmless*: what is different moves no identified parameter by more than `judged.FAR` posterior sds, or the networks
  follow the law of shaped ones with other parameters, which `truth` has. The verdict may trust the fit or not.

The cause of a verdict that does not trust is *right* if its first cause or the message of a refusal has one of the
words of the way. It is *misleading* if it is not right and states one definite fault that the networks do not have
(`DEFINITE`): another architecture, networks or layers that share weights, attention or a ReLU that is wrong, a wrong
mask, or a softmax out of range. Other causes are neither: growth, noise and memory of V have many sources, which they
list.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from calibration.judged import FAR, fit_and_check, furthest
from helpers.numpy_networks import Case, Network, prompts_of, tokens_of

import sdeinfer as si
from sdeinfer.layers import template

TRAINING_STEPS = 8
"""Steps of gradient descent, each of which reduces the loss by about a tenth: to less than a half in all."""

SIZES = ((1, False, 1), (4, False, 1), (2, True, 2))
"""Heads, output projection and expansion: few, since each compiles its own programs."""


class Way(NamedTuple):
    """A way in which networks are not those that are fitted."""

    answer: Literal["caught", "harmless"]
    words: tuple[str, ...] = ()  # of which a right cause has one


GROWTH, SHARED, BY_STATES = ("growth",), ("share weights", "not independent"), "gamma by hidden states"

WAYS = {
    "nothing": Way("harmless"),
    # Dependent layers.
    "all layers share weights": Way("caught", SHARED),
    "pairs of layers share weights": Way("caught", SHARED),
    "layers are rotations of the first": Way("harmless", (*SHARED, BY_STATES)),
    "trained until the loss is halved": Way("caught", SHARED),
    # Temperatures.
    "temperature √n_k": Way("harmless", ("temperature", "attention's drift")),
    "temperature × 1.5 in one layer": Way("harmless", ("temperature", "attention's drift")),
    "a temperature for each head": Way("harmless", ("temperature", "attention's drift", "noise of attention")),
    # Other operations in a branch.
    "dropout of .1": Way("caught", GROWTH),
    "biases of .05 of a token": Way("harmless", GROWTH),
    "biases of .3 of a token": Way("caught", GROWTH),
    "shaped GELU": Way("harmless", ("ReLU",)),
    "tanh": Way("caught", (*GROWTH, "ReLU")),
    "c± grow with the layer": Way("harmless", ("ReLU",)),
    "undeclared mask": Way("harmless", ("mask",)),
    # Laws of weights.
    "uniform weights": Way("harmless", ("noise of",)),
    "Student t weights": Way("harmless", ("noise of",)),
    "sparse weights": Way("harmless", ("noise of",)),
    "orthogonal weights": Way("caught", ("noise of", BY_STATES)),
    "W_V, W_pre or W_post × 1.05": Way("caught", GROWTH),
    "W_Q or W_K × 1.2": Way("harmless", ("attention",)),
    # Norms.
    "Pre-LN": Way("caught", GROWTH),
    "Pre-RMS": Way("caught", GROWTH),
    "Post-LN": Way("caught", (*GROWTH, "normalis")),
    # Observation.
    "prompts as networks": Way("caught", ("share weights",)),
    "two networks of one seed": Way("caught", ("recorded twice",)),
    "float16": Way("harmless"),
    "hidden states × 2": Way("harmless"),
    "the first layer is missing": Way("harmless", ("noise of one layer",)),
    "layers sorted as words": Way("caught", ("successive layers",)),
    "every second layer is missing": Way("caught", (BY_STATES,)),
}

DEFINITE = {
    "evidence for another architecture": "",
    "correlation between networks": "",
    "scatter of networks": "",
    "transitions in range": "",
    "logit spread, mean": "",
    "layers out of range, sds": "",
    "misfit of the layers": "by attention's drift|by ReLU's drift",
    "move by the misfit, posterior sds": "attention's drift: |ReLU's drift: ",
}
"""Causes that state a definite fault: by their names, and by words of their advice where the name does not suffice."""


def draw_case(name: str, rng: np.random.Generator) -> Case:
    """A shaped Transformer: m 3 to 5, n 64 to 128, d 8 to 24, 64 to 128 networks; logits that spread by .15 to .4."""
    sizes = SIZES[1:] if name == "a temperature for each head" else SIZES
    heads, output_projection, expansion = sizes[int(rng.integers(len(sizes)))]
    tokens, width = int(rng.integers(3, 6)), heads * round(rng.uniform(64, 128) / heads)
    depth, networks = int(rng.integers(12 if "sorted" in name else 8, 25)), int(rng.integers(64, 129))
    gap, tau0 = rng.uniform(1, 5), float(np.exp(rng.uniform(np.log(0.5), np.log(2))))
    mean = max(rng.normal(0, 1), gap / 2 - 0.8 * math.sqrt(width))
    X = rng.normal(size=(tokens, tokens + 4))
    V = X @ X.T / X.shape[1]
    if rng.random() < 0.5:
        V = np.eye(tokens) + rng.uniform(0, 0.6) * (1 - np.eye(tokens))
    network = Network(
        gamma=float(rng.uniform(0.3, 0.8)),
        tau0=tau0,
        c_plus=float(mean + gap / 2),
        c_minus=float(mean - gap / 2),
        heads=heads,
        output_projection=output_projection,
        expansion=expansion,
        causal=name == "undeclared mask",
    )
    size = rng.uniform(0.15, 0.4) * tau0 * math.sqrt(width)
    return Case(network, size * V / np.diag(V).max(), width, depth, networks)


# One network: parameters of all layers, which have a first axis of the layers, and its hidden states.


def draw_parameters(name: str, case: Case, rng: np.random.Generator, layer: int) -> dict[str, np.ndarray]:
    """Weights N(0, 1) of each kind, temperatures and slopes, with what is wrong in them; in one layer, in `layer`."""
    n, d, network = case.width, case.depth, case.network
    shapes = {kind: (n, n) for kind in ("Q", "K", "V")} | ({"O": (n, n)} if network.output_projection else {})
    shapes |= {"pre": (n, network.expansion * n), "post": (network.expansion * n, n)}
    p = {kind: _law(name, (d, *shape), rng) for kind, shape in shapes.items()}
    for W in p.values():
        if name == "all layers share weights":
            W[:] = W[:1]
        elif name == "pairs of layers share weights":
            W[1::2] = W[: 2 * (d // 2) : 2]
        elif name == "layers are rotations of the first":
            W[1:] = orthogonal((d - 1, len(W[0]), len(W[0])), rng) @ W[:1]
    p["temperature"] = np.full((d, network.heads), network.tau0 * math.sqrt(n * (n // network.heads)))
    p["slopes"] = np.tile([network.c_plus, network.c_minus], (d, 1)) / math.sqrt(n)
    match name:
        case "temperature √n_k":
            p["temperature"][:] = math.sqrt(n // network.heads)
        case "temperature × 1.5 in one layer":
            p["temperature"][layer] *= 1.5
        case "a temperature for each head":
            p["temperature"] *= head_factors(network.heads)
        case "c± grow with the layer":
            p["slopes"] *= growth_of_slopes(d)[:, None]
        case "W_V, W_pre or W_post × 1.05":
            p[("V", "pre", "post")[layer % 3]] *= 1.05
        case "W_Q or W_K × 1.2":
            p["QK"[layer % 2]] *= 1.2
        case "biases of .05 of a token" | "biases of .3 of a token":
            sd = float(name.split()[2]) * math.sqrt(np.diag(case.V0).max())
            p |= {"b_" + kind: sd * rng.normal(size=(d, shape[1])) for kind, shape in shapes.items()}
    return p


def head_factors(heads: int) -> np.ndarray:
    """Factors of the temperatures of the heads, .6 to 1.6."""
    return np.geomspace(0.6, 1.6, heads)


def growth_of_slopes(depth: int) -> np.ndarray:
    """Factors of c± in each layer, .5 to 1.5."""
    return np.linspace(0.5, 1.5, depth)


def _law(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Weights of mean 0 and variance 1."""
    match name:
        case "uniform weights":
            return rng.uniform(-math.sqrt(3), math.sqrt(3), shape)
        case "Student t weights":
            return rng.standard_t(5, shape) * math.sqrt(3 / 5)
        case "sparse weights":
            return rng.normal(size=shape) * rng.integers(2, size=shape) * math.sqrt(2)
        case "orthogonal weights":
            square = orthogonal((*shape[:-2], max(shape[-2:]), max(shape[-2:])), rng)
            return math.sqrt(max(shape[-2:])) * square[..., : shape[-2], : shape[-1]]
    return rng.normal(size=shape)


def orthogonal(shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """Random rotations and reflections."""
    Q, R = np.linalg.qr(rng.normal(size=shape))
    return Q * np.sign(np.diagonal(R, axis1=-2, axis2=-1))[..., None, :]


def one_layer(name: str, case: Case, X: Any, p: dict[str, Any], rng: np.random.Generator, xp: Any = np) -> Any:
    """Hidden states after a layer with parameters p; by NumPy, or by JAX for its derivatives."""
    gamma = case.network.gamma
    for branch in (_attention, _feedforward):
        added = branch(name, case, _normalised(X, name, xp) if name.startswith("Pre") else X, p, xp)
        if name == "dropout of .1":
            added = added * (rng.random(added.shape) > 0.1) / 0.9
        X = math.sqrt(1 - gamma**2) * X + gamma * added
        X = _normalised(X, name, xp) if name == "Post-LN" else X
    return X


def _normalised(X: Any, name: str, xp: Any) -> Any:
    X = X if name == "Pre-RMS" else X - X.mean(axis=-1, keepdims=True)
    return X / xp.sqrt((X**2).mean(axis=-1, keepdims=True))


def _linear(X: Any, p: dict[str, Any], kind: str) -> Any:
    return X @ p[kind] / math.sqrt(X.shape[-1]) + p.get("b_" + kind, 0.0)


def _attention(name: str, case: Case, X: Any, p: dict[str, Any], xp: Any) -> Any:
    heads, m = case.network.heads, len(X)
    mask = case.network.mask(m)
    Q, K, V = (_linear(X, p, kind).reshape(m, heads, -1).swapaxes(0, 1) for kind in "QKV")
    logits = xp.where(mask, Q @ K.swapaxes(1, 2) / p["temperature"][:, None, None], -xp.inf)
    softmax = xp.exp(logits - logits.max(axis=-1, keepdims=True))
    softmax = softmax / softmax.sum(axis=-1, keepdims=True)
    A = np.eye(m) + softmax - mask / mask.sum(axis=1, keepdims=True)
    joined = (A @ V).swapaxes(0, 1).reshape(m, -1)
    return _linear(joined, p, "O") if case.network.output_projection else joined


def _feedforward(name: str, case: Case, X: Any, p: dict[str, Any], xp: Any) -> Any:
    return _linear(_activation(name, _linear(X, p, "pre"), p["slopes"], xp), p, "post")


def _activation(name: str, x: Any, c: Any, xp: Any) -> Any:
    """A shaped ReLU with the slopes 1 + c; what is in its place has the mean square 1 for normal features."""
    if name == "tanh":
        return np.tanh(x) / math.sqrt(_mean_square(np.tanh))
    if name == "shaped GELU":
        return _shaped_gelu(x, *c) / math.sqrt(_mean_square(lambda x: _shaped_gelu(x, *c)))
    plus, minus = 1 + c[0], 1 + c[1]
    return xp.sqrt(2 / (plus**2 + minus**2)) * xp.where(x > 0, plus * x, minus * x)


def _shaped_gelu(x: np.ndarray, plus: float, minus: float) -> np.ndarray:
    """The slopes 1 + c± far from 0, with the shape of a GELU, x Φ(x) by its usual approximation, between them."""
    share = (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
    return x + (plus * share + minus * (1 - share)) * x


def _mean_square(function: Any) -> float:
    """E f(z)² for a standard normal z."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    return float(weights @ function(nodes) ** 2 / weights.sum())


def trained(case: Case, X: np.ndarray, p: dict[str, np.ndarray], target: np.ndarray) -> dict[str, np.ndarray]:
    """The weights after some gradient steps on the squared distance of the last hidden states from a target."""
    fixed = {name: p[name] for name in ("temperature", "slopes")}
    W = {kind: each for kind, each in p.items() if kind not in fixed}
    return jax.tree.map(np.asarray, _descended(case, X, W, fixed, target)) | fixed


@functools.partial(jax.jit, static_argnums=0)
def _descended(case: Case, X: Any, W: dict[str, Any], fixed: dict[str, Any], target: Any) -> dict[str, Any]:
    def loss(W):
        def step(X, each):
            return one_layer("trained", case, X, each, None, jnp), None

        return jnp.mean((jax.lax.scan(step, X, W | fixed)[0] - target) ** 2) / 2

    def descend(_, W):
        value, slope = jax.value_and_grad(loss)(W)
        square = sum(jnp.sum(each**2) for each in slope.values())
        return {kind: W[kind] - 0.1 * value / square * slope[kind] for kind in W}

    return jax.lax.fori_loop(0, TRAINING_STEPS, descend, W)


def hidden_states(name: str, case: Case, rng: np.random.Generator) -> np.ndarray:
    """Hidden states as they are observed, shape (networks, 1 + depth, tokens, width)."""
    m, n, d = len(case.V0), case.width, case.depth
    start, layer = tokens_of(case.V0, width=n, networks=1, rng=rng)[0], int(rng.integers(d))
    starts = np.broadcast_to(start, (case.networks, m, n))
    if name == "prompts as networks":
        starts = math.sqrt(np.diag(case.V0).max()) * prompts_of(case.networks, m, n, rng)
    found, p = [], {}
    for number, X in enumerate(starts):
        same = (name == "prompts as networks" and number > 0) or (name == "two networks of one seed" and number == 1)
        p = p if same else draw_parameters(name, case, rng, layer)
        if name == "trained until the loss is halved":
            target = math.sqrt(np.diag(case.V0).mean()) * rng.normal(size=X.shape)
            p = trained(case, X, p, target)
        states = [X]
        for index in range(d):
            states.append(one_layer(name, case, states[-1], {kind: each[index] for kind, each in p.items()}, rng))
        found.append(np.stack(states))
    X = np.stack(found)
    match name:
        case "float16":
            return X.astype(np.float16)
        case "hidden states × 2":
            return 2 * X
        case "the first layer is missing":
            return np.delete(X, 1, axis=1)
        case "layers sorted as words":
            return X[:, sorted(range(1 + d), key=str)]
        case "every second layer is missing":
            return X[:, ::2]
    return X


def truth_of(name: str, case: Case) -> dict[str, float]:
    """Parameters of the shaped Transformers that the networks are; of some ways, other ones than were written down."""
    network = case.network
    gap, tau0 = network.c_plus - network.c_minus, network.tau0
    match name:
        case "temperature √n_k":
            tau0 = 1 / math.sqrt(case.width)
        case "a temperature for each head":  # the law has the mean of 1/τ0² over the heads
            tau0 /= math.sqrt(np.mean(head_factors(network.heads) ** -2.0))
        case "W_Q or W_K × 1.2":
            tau0 /= 1.2
        case "hidden states × 2":  # attention's drift is cubic in V
            tau0 *= 4
        case "c± grow with the layer":  # the law has the mean of (c₊ − c₋)² over the layers
            gap *= math.sqrt(np.mean(growth_of_slopes(case.depth) ** 2))
    truth = {"gamma": network.gamma, "tau0": tau0, "c_gap": gap}
    return {key: x for key, x in truth.items() if key != "c_gap" or name not in ("shaped GELU", "tanh")}


def judged(name: str, seed: int) -> dict[str, Any]:
    """The result for one data set that it takes for shaped Transformers of the right sizes."""
    rng = np.random.default_rng([*name.encode(), seed])
    case = draw_case(name, rng)
    network, line = case.network, {"name": name, "seed": seed}
    sizes = {"heads": network.heads, "output_projection": network.output_projection, "expansion": network.expansion}
    try:
        with np.errstate(all="ignore"):  # some explode
            data = si.observe(hidden_states(name, case, rng))
    except si.InputError as error:
        return line | {"refused": str(error)}
    line |= {"tokens": len(case.V0), "width": case.width, "depth": case.depth, "gamma": network.gamma}
    return line | fit_and_check(data, template("transformer", **sizes), truth_of(name, case), key=jr.key(seed))


def outcome(found: dict[str, Any]) -> dict[str, bool]:
    """Whether the verdict on a data set is one that does not trust, with a right or a misleading cause, or a miss."""
    way = WAYS[found["name"]]
    if "refused" in found:
        right = any(word in found["refused"] for word in way.words)
        return {"not trusted": True, "right causes": right, "misleading causes": False, "misses": False}
    if found["trusted"]:
        miss = way.answer == "caught" or furthest(found) > FAR
        return {"not trusted": False, "right causes": False, "misleading causes": False, "misses": miss}
    first = found["verdict"].partition(" (also: ")[0]
    right = any(word in first for word in way.words)
    words = DEFINITE.get(found["cause"])
    definite = words is not None and any(word in first for word in words.split("|"))
    return {"not trusted": True, "right causes": right, "misleading causes": definite and not right, "misses": False}
