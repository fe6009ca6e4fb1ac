"""Fits of networks of which something was not declared, or is not identified; networks of `numpy_networks`."""

from typing import Any

import jax.random as jr
import numpy as np
from calibration.judged import fit_and_check
from helpers.numpy_networks import states_of

import sdeinfer as si
from sdeinfer.layers import template

SIZES: dict[str, dict[str, Any]] = {
    "prompts of one network": {"depth": 24, "width": 128, "start": "prompts", "shared_by": "networks"},
    "networks": {"depth": 24, "width": 128},
    "networks of other prompts": {"depth": 24, "width": 128, "start": "prompts"},
    "a mask": {"networks": 64, "depth": 16, "width": 128, "norm": 1.6, "causal": True},
    "no mask": {"networks": 64, "depth": 16, "width": 128, "norm": 1.6},
    "a softmax that chooses, n = 96": {"depth": 6, "width": 96, "norm": 1.4},
    "a softmax that chooses, n = 256": {"depth": 6, "width": 256, "norm": 1.4},
}


def judged(name: str, seed: int) -> dict[str, Any]:
    """What `check` says of a fit that declares neither mask nor prompts."""
    rng = np.random.default_rng([571, seed])
    gamma, tau0, gap = rng.uniform(0.3, 0.7), rng.uniform(0.6, 1.2), rng.uniform(0.5, 5)
    if "chooses" in name:
        gamma, tau0 = (float(np.exp(rng.uniform(*np.log(limits)))) for limits in ((0.02, 0.2), (0.03, 0.3)))
    X = states_of(seed, **SIZES[name], gamma=gamma, tau0=tau0, c_plus=gap / 2, c_minus=-gap / 2)
    data = si.covariance_dataset(si.observe(X)["covariance"].values, width=X.shape[-1])
    truth = {"gamma": gamma, "tau0": tau0, "c_gap": gap}
    found = fit_and_check(data, template("transformer"), truth, key=jr.key(seed))
    return {"name": name, **found}
