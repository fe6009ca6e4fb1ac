"""Data sets with known parameters or known failures, and the verdict of `check` on each."""

from typing import Any

import jax.random as jr
import numpy as np
from calibration.judged import fit_and_check
from helpers.cases import layer_of
from helpers.internals import sizes_in_words
from helpers.numpy_networks import Network, covariances

import sdeinfer as si
from sdeinfer.layers import template

SEEDS = {"in range": 150, "at the edge": 100, "wrong sizes": 8, "planted": 8}
"""Number of data sets of each group; of each case for wrong sizes and planted failures."""

SIZES = {"width": 128, "depth": 16, "networks": 128}
MANY = 512
"""Networks that know every parameter. Of data sets of 128, one in six leaves the gap or τ0 open, and most do not
tell two architectures apart, since the noise of one is that of the other at another γ."""

V0 = si.equicorrelated(tokens=3, correlation=0.2, norm=1.5)
TRANSFORMER = si.ShapedTransformer(gamma=0.5, tau0=1.0, c_plus=2.0, c_minus=-2.0)
FEEDFORWARD = si.ResidualFeedForward(gamma=0.5, c_plus=2.0, c_minus=-2.0)
ATTENTION = si.ShapedAttention(gamma=0.5, tau0=1.0)


def unshaped(**fields):
    """Networks of NumPy, with c₊ = −c₋ = 1 where they have them."""
    network = Network(c_plus=1.0, c_minus=-1.0, **fields)

    def sample(key):
        V = covariances(network, np.asarray(V0), **SIZES, seed=int(jr.bits(key)))
        return si.covariance_dataset(V, width=SIZES["width"])

    return sample


def shaped(layer, V0=V0, **sizes):
    return lambda key: si.sample_networks(layer, V0, **SIZES | sizes, key=key)


VANILLA = {"identity": False, "centred": False, "shaped_temperature": False, "plain_relu": True}
PLANTED = {
    "Pre-LN": (unshaped(**VANILLA, layer_norm=True), "transformer", {}),
    "usual temperature": (unshaped(shaped_temperature=False), "transformer", {}),
    "not centred": (unshaped(centred=False), "transformer", {}),
    "no identity": (unshaped(identity=False), "transformer", {}),
    "weights of sd 1.1": (unshaped(weights=1.1), "transformer", {}),
    "shared weights": (unshaped(shared_by="layers"), "transformer", {}),
    "ten draws": (shaped(TRANSFORMER, networks=MANY), "transformer", {"draws": 10}),
    "feed-forward as attention": (shaped(FEEDFORWARD, networks=MANY), "attention", {}),
    "transformer as MLP": (shaped(TRANSFORMER, networks=MANY), "mlp", {}),
    "transformer as feed-forward": (shaped(TRANSFORMER, networks=MANY), "feedforward", {}),
    "the limit's law at n = 32": (shaped(TRANSFORMER, networks=MANY, width=32), "transformer", {"law": "limit"}),
}
"""How the data are made, what is fitted to them and how."""

UNIDENTIFIED = {
    "one token": (shaped(FEEDFORWARD, si.equicorrelated(tokens=1, correlation=0.0, norm=1.5)), "feedforward", "c_gap"),
    "unit norms, τ0 = 5": (
        shaped(
            si.ShapedTransformer(gamma=0.5, tau0=5.0, c_plus=2.0, c_minus=-2.0),
            si.equicorrelated(tokens=3, correlation=0.2),
        ),
        "transformer",
        "tau0",
    ),
}
"""Data that do not identify a parameter, and its name."""

WRONG = {
    "4 heads as 1": (ATTENTION, {"heads": 4}, {}),
    "1 head as 4": (ATTENTION, {}, {"heads": 4}),
    "an output projection as none": (ATTENTION, {"output_projection": True}, {}),
    "no output projection as one": (ATTENTION, {}, {"output_projection": True}),
    "expansion 4 as 1": (FEEDFORWARD, {"expansion": 4}, {}),
    "expansion 1 as 4": (FEEDFORWARD, {}, {"expansion": 4}),
}
"""A layer, its sizes, and the sizes that are fitted."""


def good(seed: int, *, edge: bool) -> tuple[Any, str]:
    """A random architecture with random parameters and tokens, deep in the range of the law or at its edge."""
    rng = np.random.default_rng([seed, edge])
    width, tokens = int(rng.choice([64, 128, 256, 512])), int(rng.choice([2, 3, 4]))
    depth, networks = int(rng.choice([8, 16, 32, 64])), int(rng.choice([64, 128, 256]))
    name = str(rng.choice(["transformer", "attention"]))
    gap, correlation = float(rng.uniform(1, 5)), float(rng.uniform(0, 0.5))
    parameters = {"gamma": float(rng.uniform(0.2, 0.9)), "tau0": float(np.exp(rng.uniform(np.log(0.4), np.log(2.0))))}
    # The spread of the logits in the first layer; it grows with V.
    spread = float(rng.uniform(0.4, 1.0) if edge else rng.uniform(0.1, 0.35))
    square = spread * parameters["tau0"] * np.sqrt(width) / np.sqrt(1 - correlation)
    start = si.equicorrelated(tokens=tokens, correlation=correlation, norm=float(np.sqrt(square)))
    layer = layer_of(template(name), **parameters, c_plus=gap / 2, c_minus=-gap / 2)
    return shaped(layer, start, width=width, depth=depth, networks=networks), name


def cases(first: int) -> list[tuple[str, str, int]]:
    """Group, name and seed of every data set, of which `first` is the first."""
    named = {"in range": ["in range"], "at the edge": ["at the edge"], "wrong sizes": WRONG}
    named |= {"planted": [*PLANTED, *UNIDENTIFIED]}
    return [
        (group, name, seed)
        for group, names in named.items()
        for name in names
        for seed in range(first, first + SEEDS[group])
    ]


TAU0_AS_USUAL = {"usual temperature": SIZES["width"] ** -0.5, "shared weights": 1.0}
"""Unshaped networks that are, or would be but for the sharing, shaped Transformers with this τ0."""


def judged(group: str, name: str, seed: int) -> dict[str, Any]:
    """The verdict on one data set, without knowing the truth, and the distance of the posterior from it."""
    key, options, architecture = jr.fold_in(jr.key(11), seed), {}, template("transformer")
    wrong = {}
    if group in ("in range", "at the edge"):
        sample, kind = good(seed, edge=group == "at the edge")
        architecture = template(kind)
    elif name in WRONG:
        layer, true, fitted = WRONG[name]
        own = {field: getattr(layer, field) for field in layer.parameters()}
        sample, wrong = shaped(type(layer)(**own, **true), networks=MANY), true | fitted
        architecture = template("attention" if layer is ATTENTION else "feedforward", **fitted)
    elif name in UNIDENTIFIED:
        sample, kind, _ = UNIDENTIFIED[name]
        architecture = template(kind)
    else:
        sample, kind, options = PLANTED[name]
        architecture = template(kind)
    data = sample(jr.fold_in(key, 0))
    truth = {str(name): float(x) for name, x in data.attrs.items() if str(name).startswith("truth_")}
    data.attrs = {name: x for name, x in data.attrs.items() if name not in truth}
    known = {name.removeprefix("truth_"): x for name, x in truth.items()}
    if name in TAU0_AS_USUAL:
        known = {"gamma": 0.5, "tau0": TAU0_AS_USUAL[name], "c_plus": 1.0, "c_minus": -1.0}
    if "c_plus" in known:
        known["c_gap"] = known["c_plus"] - known["c_minus"]
    found = fit_and_check(data, architecture, known, **options, key=jr.fold_in(key, 1))
    words = sizes_in_words(architecture)
    named = any(words[size] in found.get("assumed", ()) for size in wrong)
    return {"group": group, "name": name, "wrong_size_named": named, **found}
