"""Rank collapse in residual networks of attention, and how 1/√L avoids it (Noci et al. 2022, arXiv 2206.03126).

Their claim: with attention that averages over all tokens, as it nearly does at initialisation, correlations of tokens
tend to 1 with depth; with residual branches of strength α = α̃/√L in L layers they do not. Of their text only the
introduction was read; the recursion is derived here. For tokens that are alike (mean square q, product p, and
a = p + (q − p)/T) a layer without a norm has the expectations

    q′ = q + α²a,    p′ = p + α²a

at every width: q − p stays, and a is multiplied by 1 + α². The correlation of wide networks, p_L/q_L, tends to 1 for a
constant α. With α = α̃/√L it has a limit below 1, by e^α̃² in place of (1 + α²)^L. Norms before the branches or after
the sums are in `exchangeable`.
"""

import math

import numpy as np
import pytest
from helpers.budget import assert_estimate, assert_mean, mean_and_error
from replays.exchangeable import Position, Tokens, average, chain_correlations, correlations, residual

import sdeinfer as si
from sdeinfer.blocks import Block, SelfAttention

TOKENS, CORRELATION = 8, 0.2
START = Tokens(1.0, CORRELATION, TOKENS)
POSITIONS: dict[str, Position] = {"no norm": None, "Pre-LN": "pre", "Post-LN": "post"}

UNIFORM = 1e6
"""Temperature without visible logits."""

UNSCALED = 12
"""Layers after which Post-LN tokens without scaling are still apart in more than rounding."""


def block_of(strength: float, position: Position) -> Block:
    norm = None if position is None else "layer"
    return Block(SelfAttention(temperature=UNIFORM), strength, norm, position or "pre")


CASES = [(name, depth, True) for depth in (32, 128) for name in POSITIONS]
CASES += [(name, UNSCALED, False) for name in POSITIONS]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "depth", "scaled"), CASES)
def test_correlations_over_depth(name, depth, scaled, key):
    position, strength = POSITIONS[name], 1 / math.sqrt(depth) if scaled else 1.0
    every = depth // 4
    sizes = {"width": 1_024, "depth": depth, "networks": 256, "observe_every": every}
    estimate, error = chain_correlations(block_of(strength, position), START, **sizes, key=key)
    expected = correlations(START, lambda tokens: residual(tokens, average, strength, position), depth)[::every]
    for number in range(1, len(estimate)):
        print(
            f"{name}, α = {strength:.3g}, layer {every * number}: 1 − ρ of the chain {1 - estimate[number]:.4g} "
            f"± {error[number]:.2g}, of the recursion {1 - expected[number]:.4g}"
        )
    assert_estimate(estimate[1:], expected[1:], error[1:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "width", "depth", "strength"),
    [("weights", 32, 16, 0.25), ("chain", 64, 32, 1 / math.sqrt(32)), ("chain", 512, UNSCALED, 1.0)],
)
def test_expected_squares_and_products_are_exact_at_every_width(method, width, depth, strength, key):
    V0 = si.equicorrelated(tokens=TOKENS, correlation=CORRELATION, norm=1.0)
    sizes = {"width": width, "depth": depth, "networks": 1_024, "observe_every": depth}
    V = si.sample_networks(block_of(strength, None), V0, **sizes, method=method, key=key)["covariance"].values[:, -1]
    squares = np.trace(V, axis1=1, axis2=2) / TOKENS
    averages = V.mean(axis=(1, 2))
    growth = (1 + strength**2) ** depth
    a, apart = (1 + (TOKENS - 1) * CORRELATION) / TOKENS, 1 - CORRELATION
    expected = np.array([growth * a + apart * (1 - 1 / TOKENS), growth * a])
    values = np.stack([squares, averages], axis=1)
    mean, error = mean_and_error(values)
    for k, name in enumerate(("q", "a")):
        print(
            f"{method}, n = {width}, {depth} layers, α = {strength:.3g}: E {name} = {expected[k]:.5g}, "
            f"measured {mean[k]:.5g} ± {error[k]:.2g}"
        )
    assert_mean(values, expected)
