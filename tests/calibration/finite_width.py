"""Data sets of finite networks with parameters from the prior, and the ranks of these in their posteriors."""

import dataclasses

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from calibration.study import PARETO_K, draw_parameters, posterior, statistics
from helpers.cases import layer_of
from helpers.internals import Assumptions, problem_of
from helpers.ranges import marked

import sdeinfer as si
from sdeinfer.layers import template
from sdeinfer.models import full_path

KEY = 20230630
SIZES = {32: (50, 4), 64: (200, 8), 128: (500, 16), 512: (500, 64), 1024: (250, 128)}
"""Networks and depth at each width."""

TRANSFORMER = template("transformer")
PATTERNS = {
    "full": si.Pattern(),
    "causal": si.CAUSAL,
    "prompts": si.Pattern(prompts=(2, 2)),
    "single precision": si.Pattern(),
}
LAWS = ("finite-width", "limit")
NOT_MOVED = "finite-width, mode of the statistics"
ASSUMED = {
    name: {law: Assumptions(template("transformer", pattern=pattern), law) for law in LAWS}
    for name, pattern in PATTERNS.items()
}
WIDTHS = {"prompts": [64], "single precision": [64]}
CASES = [(name, width) for name in PATTERNS for width in WIDTHS.get(name, SIZES)]
IDENTIFIED = ("gamma", "tau0", "c_gap")


def initial_covariance(width, key, tokens=3):
    """Tokens of different norms and correlations; V/√n is 0.1 to 0.4, so that attention shows at every width."""
    key_scale, key_tokens = jr.split(key)
    X = jr.normal(key_tokens, (tokens, 12), jnp.float32)
    scale = jnp.exp(jr.uniform(key_scale, (), jnp.float32, jnp.log(0.1), jnp.log(0.4)))
    return scale * np.sqrt(width, dtype=np.float32) * X @ X.T / 12


def data_set(width, key, assumptions=ASSUMED["full"]["finite-width"], *, more: int = 1):  # noqa: B008 immutable
    """Parameters from the prior, and networks with them; None where none is in the law's range.

    `more` times as many networks as stated, in single precision.
    """
    key_parameters, key_start, key_networks = jr.split(key, 3)
    networks, depth = SIZES[width]
    truth = draw_parameters(assumptions, key_parameters)
    kind = assumptions.kind
    V0 = initial_covariance(width, key_start, sum(kind.pattern.prompts) or 3)
    try:
        layer = layer_of(kind, **truth)
        data = si.sample_networks(layer, V0, width=width, depth=depth, networks=more * networks, key=key_networks)
        return truth, marked(problem_of(full_path, assumptions), data)
    except si.InputError:
        return truth, None


def ranks_of(pattern: str, width: int, number: int) -> dict:
    """Ranks of the true parameters in the posteriors of one data set, by each of `LAWS`; empty if it is out of range.

    `by_nuts` counts the posteriors for which importance sampling was not good enough. Data always are in single
    precision; by the pattern of that name, densities are too, of what `prepare` returns where that is the default.
    """
    key_data, key_fit = jr.split(jr.fold_in(jr.fold_in(jr.key(KEY), width), number))
    truth, data = data_set(width, key_data, ASSUMED[pattern]["finite-width"])
    # Leaving a data set out by what its data say does not bias the others.
    if data is None:
        return {}
    found, by_nuts = {}, 0
    prepared = {law: statistics(data, assumptions) for law, assumptions in ASSUMED[pattern].items()}
    prepared[NOT_MOVED] = without_the_move(prepared["finite-width"])
    for law, own in prepared.items():
        drawn = posterior(own, key_fit, single=pattern == "single precision")
        by_nuts += drawn.k > PARETO_K
        found[law] = drawn.ranks(truth, IDENTIFIED)
    return {"ranks": found, "by_nuts": int(by_nuts), "left_out": float(1 - data["used"].values[:, :-1].mean())}


def without_the_move(prepared):
    """The statistics with their own mode in place of that of the exact law."""
    adjustment = prepared.adjustment
    still = dataclasses.replace(adjustment, shift=jnp.zeros_like(adjustment.shift))
    return dataclasses.replace(prepared, adjustment=still)
