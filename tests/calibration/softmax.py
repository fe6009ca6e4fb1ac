"""Fits of networks whose softmax chooses, so that the data do not identify τ0; networks of `numpy_networks`."""

from typing import Any

import jax.random as jr
import numpy as np
from calibration.judged import fit_and_check
from helpers.numpy_networks import states_of

import sdeinfer as si
from sdeinfer.layers import template


def judged(width: int, seed: int) -> dict[str, Any]:
    """What `check` says."""
    rng = np.random.default_rng([571, seed])
    gamma, tau0 = (float(np.exp(rng.uniform(*np.log(limits)))) for limits in ((0.02, 0.2), (0.03, 0.3)))
    gap = rng.uniform(0.5, 5)
    truth = {"gamma": gamma, "tau0": tau0, "c_gap": gap}
    X = states_of(seed, depth=6, width=width, norm=1.4, gamma=gamma, tau0=tau0, c_plus=gap / 2, c_minus=-gap / 2)
    data = si.covariance_dataset(si.observe(X)["covariance"].values, width=width)
    return fit_and_check(data, template("transformer"), truth, key=jr.key(seed))
