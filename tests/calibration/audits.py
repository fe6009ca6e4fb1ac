"""Audits of networks of random residual blocks: as declared, and with a factor in one kind of branch or in one layer.

A factor of the increments of a kind, or of a layer, is a factor of the strength there, without consequences for other
branches before norms: what they read keeps its covariance up to them, since increments of the data are multiplied.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.random as jr
import numpy as np
import xarray as xr
from calibration.branches import drawn_layer

import sdeinfer as si
from sdeinfer.auditing._inputs import MOST_TOKENS
from sdeinfer.auditing._judge import judge, log_densities
from sdeinfer.auditing._observe import Seen, scaled
from sdeinfer.auditing._recipe import Recipe
from sdeinfer.blocks import SelfAttention

IN_KIND = 1.2
"""The factor in one kind of branch."""

IN_LAYER, LAYERS = (1.1, 1.2, 1.35, 1.6, 2.0), 12
"""The factors in one layer of so many."""

AS_DECLARED = Recipe("the declared blocks", "this study", lambda matrix: matrix.fan_in**-0.5)
"""Its standard deviations are not used: the blocks have their strengths."""


def drawn_data(seed: int) -> tuple[si.Stack, xr.Dataset]:
    """Random blocks of one layer, and the branches of one network of them, with one to three prompts."""
    rng = np.random.default_rng([91, seed])
    layer, sizes = drawn_layer(rng)
    tokens = sizes.pop("tokens")
    prompts = (tokens,) * min(int(rng.choice([1, 2, 3])), MOST_TOKENS // tokens)
    layer = with_prompts(layer, prompts)
    V0 = si.equicorrelated(tokens=sum(prompts), correlation=rng.uniform(0.0, 0.6), norm=1.0)
    return layer, si.sample_branches(layer, V0, **sizes, key=jr.key(seed))


def with_prompts(layer: si.Stack, prompts: tuple[int, ...]) -> si.Stack:
    """The blocks, whose attention is inside of prompts."""
    blocks = [
        dataclasses.replace(
            block, branch=dataclasses.replace(block.branch, pattern=si.Pattern(block.branch.pattern.causal, prompts))
        )
        if isinstance(block.branch, SelfAttention)
        else block
        for block in layer.layers
    ]
    return si.Stack(blocks)


def passed(data: xr.Dataset, layer: si.Stack, coefficients: np.ndarray, factors: Any = 1.0) -> tuple[bool, str]:
    """Whether an audit passes, and its verdict, with the increments of each branch multiplied by a factor."""
    factors = np.broadcast_to(factors, data.sizes["branch"])
    found = judge(Seen(scaled(data, factors[None])), layer, moved(coefficients, factors), AS_DECLARED, name="network")
    return found.passed, found.verdict[:160]


def moved(coefficients: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """The coefficients of increments that are multiplied by factors a: the polynomials at log g² − log a².

    What does not depend on g moves by a constant, which is left out.
    """
    c, log_factor = coefficients, 2 * np.log(factors)[:, None]
    constant = c[..., 0] - c[..., 1] * log_factor + c[..., 2] * log_factor**2
    return np.stack([constant, c[..., 1] - 2 * c[..., 2] * log_factor, c[..., 2], c[..., 3]], axis=-1)


def audits_of(seed: int) -> dict[str, Any]:
    """Verdicts on one network: as it is, with a factor in one kind of branch, and with one in one of 12 layers."""
    try:
        layer, data = drawn_data(seed)
        coefficients = log_densities(data, layer)
        own, verdict = passed(data, layer, coefficients)
    except si.InputError as error:  # tokens of deep Post-LN networks become parallel
        return {"seed": seed, "refused": str(error)}
    branches, rng = data.sizes["branch"], np.random.default_rng([92, seed])
    kind = int(rng.integers(2))
    of_kind = np.where(np.arange(branches) % 2 == kind, IN_KIND, 1.0)
    sizes = {"width": int(data["width"][0]), "depth": branches // 2, "tokens": data.sizes["token_a"]}
    found = {"seed": seed, **sizes, "kind": kind, "passed": own, "verdict": verdict}
    found["passed_kind"] = passed(data, layer, coefficients, of_kind)[0]
    if branches >= 2 * LAYERS:
        first = data.isel(branch=slice(2 * LAYERS), other_branch=slice(2 * LAYERS))
        of_first = coefficients[:, : 2 * LAYERS]
        where = 2 * int(rng.integers(LAYERS)) + kind
        found["passed_layer"] = [
            passed(first, layer, of_first, np.where(np.arange(2 * LAYERS) == where, factor, 1.0))[0]
            for factor in IN_LAYER
        ]
    jax.clear_caches()
    return found


def found_factor(shares: np.ndarray, share: float = 0.95) -> float:
    """The least factor of `IN_LAYER` from which on so many networks do not pass; infinite if there is none."""
    enough = np.minimum.accumulate((1 - shares >= share)[::-1])[::-1]
    return IN_LAYER[int(enough.argmax())] if enough.any() else math.inf
