"""Data sets with known parameters or known failures, and the verdict of `check` on each."""

import warnings
from typing import Any

import jax.random as jr
import numpy as np
from baselines import Baseline, sample_baseline

import sdeinfer as si
from sdeinfer.layers import Architecture

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


def baseline(**switches):
    return lambda key: sample_baseline(Baseline(**switches), V0, **SIZES, key=key)


def shaped(layer, V0=V0, **sizes):
    return lambda key: si.sample_networks(layer, V0, **SIZES | sizes, key=key)


VANILLA = {"identity": False, "centred": False, "temperature": "usual", "c": None}
PLANTED = {
    "Pre-LN": (baseline(**VANILLA, layer_norm=True), "transformer", {}),
    "usual temperature": (baseline(temperature="usual"), "transformer", {}),
    "not centred": (baseline(centred=False), "transformer", {}),
    "no identity": (baseline(identity=False), "transformer", {}),
    "weights of sd 1.1": (baseline(weights=1.1), "transformer", {}),
    "shared weights": (baseline(shared=True), "transformer", {}),
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
    layer = Architecture(name).layer(**parameters, c_plus=gap / 2, c_minus=-gap / 2)
    return shaped(layer, start, width=width, depth=depth, networks=networks), name


def cases(first: int) -> list[tuple[str, str, int]]:
    """Group, name and seed of every data set.

    Arguments:
        first: the first seed.
    """
    seeds = {group: range(first, first + count) for group, count in SEEDS.items()}
    found = [(group, group, seed) for group in ("in range", "at the edge") for seed in seeds[group]]
    for group, names in (("wrong sizes", WRONG), ("planted", PLANTED), ("planted", UNIDENTIFIED)):
        found += [(group, name, seed) for name in names for seed in seeds[group]]
    return found


def judged(group: str, name: str, seed: int) -> dict[str, Any]:
    """The verdict on one data set, without knowing the truth, and the distance of the posterior from it."""
    key, options, kind = jr.fold_in(jr.key(11), seed), {}, ""
    sizes: dict[str, Any] = {}
    if group in ("in range", "at the edge"):
        sample, kind = good(seed, edge=group == "at the edge")
    elif name in WRONG:
        layer, true, sizes = WRONG[name]
        own = {field: getattr(layer, field) for field in layer.parameters()}
        sample = shaped(type(layer)(**own, **true), networks=MANY)
        kind = "attention" if layer is ATTENTION else "feedforward"
    elif name in UNIDENTIFIED:
        sample, kind, _ = UNIDENTIFIED[name]
    else:
        sample, kind, options = PLANTED[name]
    try:
        data = sample(jr.fold_in(key, 0))
        truth = {name: float(x) for name, x in data.attrs.items() if str(name).startswith("truth_")}
        data = data.assign_attrs({name: x for name, x in data.attrs.items() if name not in truth})
        for attribute in truth:
            del data.attrs[attribute]
        architecture = Architecture(kind, **sizes)
        post = si.fit(si.models.full_path, data, architecture=architecture, **options, key=jr.fold_in(key, 1))
        with warnings.catch_warnings():
            # ArviZ's, of diagnostics that few draws do not allow.
            warnings.simplefilter("ignore")
            found = si.check(post)
    except si.InputError as error:
        return {"group": group, "name": name, "seed": seed, "refused": str(error)}
    post.attrs |= truth
    if name in ("usual temperature", "shared weights"):
        # Parameters with which they are, or would be but for the sharing, shaped Transformers.
        tau0 = 1.0 if name == "shared weights" else SIZES["width"] ** -0.5
        post.attrs |= {"truth_gamma": 0.5, "truth_tau0": tau0, "truth_c_plus": 1.0, "truth_c_minus": -1.0}
    known, draws = si.diagnostics.known_truth(post), post["posterior"].to_dataset()
    z = {}
    for each, parameter in architecture.coordinates.sampled.items():
        if each in known and parameter.identified:
            u = parameter.to_real(draws[each].values)
            z[each] = float((u.mean() - parameter.to_real(np.asarray(known[each]))) / u.std())
    wrong = [] if name not in WRONG else [architecture.in_words(size) for size in (WRONG[name][1] | WRONG[name][2])]
    return {
        "group": group,
        "name": name,
        "seed": seed,
        "trusted": found.passed,
        "cause": found.cause.name if found.cause else "",
        "conditional": any(size in found.assumed for size in wrong),
        "unidentified": found.unidentified,
        "z": z,
        "verdict": found.verdict,
        "used": 1 - post.attrs["left_out"],
    }
