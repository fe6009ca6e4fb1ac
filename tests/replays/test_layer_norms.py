"""Correlations over depth in Fig. 4 of Giorlandino and Goldt 2025 (arXiv 2505.24333): Pre- and Post-LN, 100 layers.

A layer is attention and a ReLU MLP of n hidden units; weights have variances σ_w²/n, biases σ_b², values 1/n, and
skips 1. Tokens start with a correlation of .2. Logits have variance β² log T in a prompt of T tokens. The figure is
drawn by the recursion of infinitely many tokens (`Gain-controlled-propagation.ipynb` in the repository
aGiorlandino/ICLR-Signal-Propagation-Transformers at 53577ed), in which attention averages over all tokens where
β < √(2/(1 − ρ)), and centred attention, less that average, adds nothing: such networks are MLPs.

What is compared: curves read from the picture of that notebook, with its reading error; the recursion, derived anew in
`exchangeable`; and chains of covariances, with their Monte Carlo errors, against the recursion of as many tokens.
"""

import math
from typing import Literal

import numpy as np
import pytest
from helpers.budget import assert_estimate, assert_visible, mean_and_error
from replays.exchangeable import (
    Position,
    Tokens,
    average,
    chain_correlations,
    correlations,
    correlations_of_networks,
    relu,
    residual,
)

import sdeinfer as si
from sdeinfer.blocks import MLP, Block, SelfAttention

CORRELATION, WEIGHTS, BIASES, BETA, DEPTH = 0.2, 0.2, 0.02**2, 0.1, 100

READ = {
    ("post", "plain"): {10: 0.997, 20: 1.001, 50: 1.001, 100: 1.001},
    ("pre", "plain"): {10: 0.891, 20: 0.951, 50: 0.982, 100: 0.992},
    ("post", "centred"): {20: 0.288, 50: 0.395, 100: 0.526},
    ("pre", "centred"): {10: 0.243, 20: 0.276, 50: 0.344, 100: 0.411},
}
"""Middle of each line by layer; at layer 10 one line covers another."""

PIXEL = 0.8 / 622
"""Correlation by pixel: ticks from .2 to 1 are 622 apart."""

READING_ERROR = 2 * PIXEL
"""Ticks and lines are each drawn to the nearest pixel."""

UNIFORM = 1e6
"""Temperature without visible logits."""

COLLAPSED = 20
"""Layers after which covariances of plain Post-LN are singular to rounding."""

TOKENS = {"plain": 16, "centred": 8}
CHAINS = {"plain": {"width": 1_024, "networks": 64}, "centred": {"width": 4_096, "networks": 64}}
EVERY = 10


def layer_of(position: Literal["pre", "post"], attention: str, temperature: float = UNIFORM) -> si.Stack:
    mlp = MLP(gain=WEIGHTS, activation="relu", expansion=1.0, bias=BIASES)
    feed_forward = Block(mlp, math.sqrt(WEIGHTS), "layer", position, bias=BIASES)
    if attention == "centred":
        return si.Stack([feed_forward])
    return si.Stack([Block(SelfAttention(temperature=temperature), 1.0, "layer", position), feed_forward])


def recursion(position: Position, attention: str, tokens: float, depth: int) -> np.ndarray:
    def layer(state: Tokens) -> Tokens:
        if attention == "plain":
            state = residual(state, average, 1.0, position)
        return residual(state, relu(WEIGHTS, BIASES), math.sqrt(WEIGHTS), position, BIASES)

    return correlations(Tokens(1.0, CORRELATION, tokens), layer, depth)


@pytest.mark.slow
@pytest.mark.parametrize(("position", "attention"), READ)
def test_the_recursion_is_the_figure(position, attention):
    curve = recursion(position, attention, math.inf, DEPTH)
    for layer, read in READ[position, attention].items():
        print(f"{position}-LN, {attention}, layer {layer}: read {read} ± {READING_ERROR:.4f}, ours {curve[layer]:.4f}")
        assert abs(curve[layer] - read) <= READING_ERROR


@pytest.mark.slow
@pytest.mark.parametrize(("position", "attention"), READ)
def test_chains_have_the_correlations_of_the_recursion(position, attention, key):
    depth = COLLAPSED if (position, attention) == ("post", "plain") else DEPTH
    tokens = TOKENS[attention]
    start = Tokens(1.0, CORRELATION, tokens)
    sizes = {"depth": depth, "observe_every": EVERY} | CHAINS[attention]
    estimate, error = chain_correlations(layer_of(position, attention), start, **sizes, key=key)
    expected = recursion(position, attention, tokens, depth)[::EVERY]
    limit = recursion(position, attention, math.inf, depth)[::EVERY]
    for number in range(1, len(estimate)):
        print(
            f"{position}-LN, {attention}, layer {EVERY * number}: chain {estimate[number]:.4f} ± {error[number]:.4f}, "
            f"recursion of {tokens} tokens {expected[number]:.4f}, of infinitely many {limit[number]:.4f}"
        )
    assert_estimate(estimate[1:], expected[1:], error[1:])


@pytest.mark.slow
def test_logits_of_their_size_change_less_than_can_be_read(key):
    start = Tokens(1.0, CORRELATION, TOKENS["plain"])
    sizes = {"depth": COLLAPSED, "observe_every": EVERY} | CHAINS["plain"]
    temperature = 1 / (BETA * math.sqrt(math.log(start.number)))
    layers = [layer_of("pre", "plain", value) for value in (temperature, UNIFORM)]
    with_logits, uniform = (correlations_of_networks(layer, start, **sizes, key=key) for layer in layers)
    change, error = mean_and_error((with_logits - uniform)[:, 1:])
    for k, number in enumerate(range(EVERY, COLLAPSED + 1, EVERY)):
        print(f"β = {BETA}, layer {number}: the correlation changes by {change[k]:.2g} ± {error[k]:.1g}")
    assert_visible(READING_ERROR - np.abs(change), error)
