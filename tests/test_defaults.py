"""How the networks that `sdeinfer calibrate` samples by default were chosen: what they tell, how near the limit.

The covariances come from the SDE itself, many more paths than networks, so that the figures are of the design and not
of one data set.
"""

import inspect

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import sdeinfer as si
from sdeinfer.cli import calibrate_command
from sdeinfer.infer._measures import logit_scale
from sdeinfer.infer._settings import LARGEST_LOGIT
from sdeinfer.likelihood._full_path import FullPath
from sdeinfer.likelihood._reduction import path_statistics
from sdeinfer.likelihood._transitions import observed_path
from sdeinfer.observation import covariance_dataset

DEFAULT = {name: parameter.default for name, parameter in inspect.signature(calibrate_command).parameters.items()}
PATHS = 512


@pytest.fixture(scope="module")
def paths():
    names = ("gamma", "tau0", "c_plus", "c_minus")
    layer = si.ShapedTransformer(**{name: DEFAULT[name] for name in names})
    V0 = si.equicorrelated(**{name: DEFAULT[name] for name in ("tokens", "correlation", "norm")})
    width, depth = DEFAULT["width"], DEFAULT["depth"]
    V = si.simulate(layer, V0, np.arange(depth + 1) / width, paths=PATHS, step=1 / width, key=jr.key(0))
    return covariance_dataset(np.asarray(V), width=width)


def test_the_defaults_identify_every_parameter_that_the_limit_knows(paths):
    """Fisher information of the full path, in the logarithms of γ, τ0 and c₊ − c₋, by differences."""
    statistics = path_statistics(observed_path(paths))

    @jax.jit
    @jax.vmap
    def log_likelihood(logarithms):
        gamma, tau0, gap = jnp.exp(logarithms)
        law = FullPath(si.ShapedTransformer(gamma, tau0, gap, 0.0).limit(), statistics)
        return law.log_prob(statistics.weights).sum() * DEFAULT["networks"] / PATHS

    truth = np.log([DEFAULT["gamma"], DEFAULT["tau0"], DEFAULT["c_plus"] - DEFAULT["c_minus"]])
    step = 1e-3 * np.eye(3)
    ends = [truth + s * step[:, None] + t * step for s in (1, -1) for t in (1, -1)]
    above, one, other, below = np.asarray(log_likelihood(np.reshape(ends, (-1, 3)))).reshape(4, 3, 3)
    information = -(above - one - other + below) / 4e-6
    relative = np.sqrt(np.diag(np.linalg.inv(information)))
    print(f"relative sd: gamma {relative[0]:.3f}, tau0 {relative[1]:.3f}, c_gap {relative[2]:.3f}")
    assert (relative < [0.01, 0.11, 0.11]).all()


def test_the_defaults_stay_inside_the_range_of_the_law(paths):
    logits = logit_scale(paths) / DEFAULT["tau0"]
    left_out = (logits > LARGEST_LOGIT).mean()
    print(f"99 % of layers below {np.quantile(logits, 0.99):.2f}, {left_out:.2%} above {LARGEST_LOGIT}")
    assert np.quantile(logits, 0.99) < 0.6
    assert left_out < 0.01
