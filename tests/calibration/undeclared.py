"""Fits of networks of which something was not declared, or is not identified; networks of `numpy_transformer`."""

import warnings
from typing import Any

import jax.random as jr
import numpy as np
from numpy_transformer import hidden_states

import sdeinfer as si

SIZES: dict[str, dict[str, Any]] = {
    "prompts of one network": {"networks": 16, "depth": 24, "width": 128, "start": "prompts", "shared": True},
    "networks": {"networks": 16, "depth": 24, "width": 128},
    "networks of other prompts": {"networks": 16, "depth": 24, "width": 128, "start": "prompts"},
    "a mask": {"networks": 64, "depth": 16, "width": 128, "norm": 1.6, "causal": True},
    "no mask": {"networks": 64, "depth": 16, "width": 128, "norm": 1.6},
    "a softmax that chooses, n = 96": {"networks": 16, "depth": 6, "width": 96, "norm": 1.4},
    "a softmax that chooses, n = 256": {"networks": 16, "depth": 6, "width": 256, "norm": 1.4},
}


def truth_of(name: str, seed: int) -> dict[str, Any]:
    """Random parameters."""
    rng = np.random.default_rng([571, seed])
    gamma, tau0, gap = rng.uniform(0.3, 0.7), rng.uniform(0.6, 1.2), rng.uniform(0.5, 5)
    if "chooses" in name:
        gamma, tau0 = (float(np.exp(rng.uniform(*np.log(limits)))) for limits in ((0.02, 0.2), (0.03, 0.3)))
    return {"gamma": float(gamma), "tau0": float(tau0), "gap": float(gap)}


def judged(name: str, seed: int) -> dict[str, Any]:
    """What `check` says of a fit that declares neither mask nor prompts, and what `observe` does."""
    truth = truth_of(name, seed)
    X = hidden_states(seed, **SIZES[name], **truth)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        observed = si.observe(X)
    # By their covariances alone, without what `observe` finds.
    data = si.covariance_dataset(observed["covariance"].values, width=X.shape[-1])
    post = si.fit(si.models.full_path, data, architecture="transformer", key=jr.key(seed))
    found, table = si.check(post, data), si.summarise(post)
    known = {"gamma": truth["gamma"], "tau0": truth["tau0"], "c_gap": truth["gap"]}
    identified = [each.split(" ±")[0] for each in found.identified]
    off = {each: abs(table.loc[each, "mean"] - known[each]) / table.loc[each, "sd"] for each in identified}
    return {
        "name": name,
        "warned": any(issubclass(each.category, si.SharedWeightsWarning) for each in caught),
        "trusted": found.passed,
        "cause": "" if found.cause is None else found.cause.name,
        "failed": [each.name for each in found.verdicts if not each.passed and each.topic != "identified"],
        "assumed": list(found.assumed),
        "conditional": found.conditional,
        "verdict": found.verdict,
        "truth": known,
        "off": {each: round(float(z), 2) for each, z in off.items()},
        "left_out": float(post.attrs.get("left_out", 0.0)),
    }
