"""Random data sets of shaped networks of NumPy, and the verdict of `check` on each."""

import math

import jax.random as jr
import numpy as np
from calibration.judged import fit_and_check
from helpers.numpy_networks import Case, Network, hidden_states, tokens_of

import sdeinfer as si
from sdeinfer.layers import template

SHAPES = ("any", "equicorrelated", "near copies", "unequal norms", "nearly low rank", "low rank")
"""Kinds of initial Gram matrices."""

WORK = 3e8
"""Bound on networks × depth × tokens × width, which keeps a data set below some ten seconds."""


def draw_case(seed: int) -> Case:
    """A random data set: γ .1 to .9, τ0 .3 to 3, gap 0 to 6, m 2 to 6, n 48 to 512, d 8 to 128, 8 to 256 networks."""
    rng = np.random.default_rng([36, seed])
    architecture = str(rng.choice(["transformer", "attention", "feedforward", "mlp"], p=[0.4, 0.35, 0.15, 0.1]))
    attends, grows = architecture in ("transformer", "attention"), architecture in ("transformer", "feedforward")
    tokens = int(rng.integers(2, 7))
    heads = int(rng.choice([1, 2, 4], p=[0.7, 0.15, 0.15])) if attends else 1
    width = max(heads * round(_log_uniform(rng, 48, 512) / heads), heads * 2 * tokens)
    depth, networks = round(_log_uniform(rng, 8, 128)), round(_log_uniform(rng, 8, 256))
    gap, mean = rng.uniform(0, 6), rng.normal(0, math.sqrt(2))
    mean = max(mean, gap / 2 - 0.8 * math.sqrt(width))  # slopes 1 + c/√n that are not positive are no shaped ReLU
    pattern = rng.choice(["all", "causal", "prompts", "causal prompts"], p=[0.6, 0.15, 0.15, 0.1]) if attends else "all"
    V0 = _initial(str(rng.choice(SHAPES, p=[0.4, 0.15, 0.15, 0.15, 0.1, 0.05])), tokens, rng)
    layer = Network(
        architecture=architecture,
        gamma=float(rng.uniform(0.1, 0.9)),
        tau0=_log_uniform(rng, 0.3, 3),
        c_plus=float(mean + gap / 2),
        c_minus=float(mean - gap / 2),
        heads=heads,
        output_projection=bool(attends and rng.random() < 0.2),
        expansion=int(rng.choice([1, 2, 4], p=[0.7, 0.15, 0.15])) if grows else 1,
        causal="causal" in str(pattern),
        prompts=(tokens // 2, tokens - tokens // 2) if "prompts" in str(pattern) else (),
        explicit=bool(rng.random() < 0.1 and width <= 96),
    )
    return Case(layer, V0, width, depth, max(8, min(networks, int(WORK / (depth * tokens * width)))))


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _initial(shape: str, tokens: int, rng: np.random.Generator) -> np.ndarray:
    """A Gram matrix of the initial tokens, whose largest norm is .3 to 4."""
    X = rng.normal(size=(tokens, tokens + 4))
    if shape == "equicorrelated":
        rho = rng.uniform(0, 0.9)
        V = (1 - rho) * np.eye(tokens) + rho
    elif shape == "near copies":
        copied = X[:1] + float(np.exp(rng.uniform(np.log(3e-3), np.log(0.2)))) * X
        copied[-1] = X[-1]
        V = copied @ copied.T / X.shape[1]
    elif shape in ("nearly low rank", "low rank"):
        rank = max(1, tokens - 1 - int(rng.integers(0, 2)))
        V = X[:, :rank] @ X[:, :rank].T / rank
        V += np.diag(np.full(tokens, 1e-4 if shape == "nearly low rank" else 0.0))
    else:
        V = X @ X.T / X.shape[1]
    if shape == "unequal norms":
        norms = np.exp(rng.uniform(0, np.log(10), tokens))
        norms[[0, -1]] = 1, 10
        V = V * np.outer(norms, norms) / 10
    size = float(np.exp(rng.uniform(np.log(0.3), np.log(4.0))))
    return size**2 * V / np.diag(V).max()


def judged(seed: int) -> dict:
    """What the package says of one data set: why it refuses it, or the verdict, and how far the truth is."""
    case, rng = draw_case(seed), np.random.default_rng([37, seed])
    layer, sizes = case.network, {}
    if layer.attends:
        sizes = {"heads": layer.heads, "output_projection": layer.output_projection}
        sizes["pattern"] = si.Pattern(causal=layer.causal, prompts=layer.prompts)
    if layer.architecture in ("transformer", "feedforward"):
        sizes["expansion"] = layer.expansion
    observer = si.observation.Observer(pattern=sizes.get("pattern", si.Pattern()))
    X = tokens_of(case.V0, width=case.width, networks=case.networks, rng=rng)
    line = {"seed": seed, "architecture": layer.architecture, "tokens": len(case.V0), "width": case.width}
    try:
        with np.errstate(all="ignore"):  # some explode
            for state in hidden_states(layer, X, depth=case.depth, rng=rng):
                observer.add(state)
        data = observer.dataset()
    except si.InputError as error:
        return line | {"refused": str(error)}
    truth = {"gamma": layer.gamma, "tau0": layer.tau0, "c_gap": layer.c_plus - layer.c_minus}
    return line | fit_and_check(data, template(layer.architecture, **sizes), truth, key=jr.key(seed))
