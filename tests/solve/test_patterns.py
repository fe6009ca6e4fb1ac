"""Networks with patterns against the SDE of the covariances, of tangents and of gradients, at T = ¼ of width 256."""

import dataclasses

import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_same_distribution
from helpers.cases import layer_of
from helpers.internals import sample_gradients, sample_tangents
from scipy import linalg, stats

import sdeinfer as si
from sdeinfer.layers import template

WIDTH, DEPTH, TOKENS = 256, 64, 4
LAYERS = (0, DEPTH // 3, 2 * DEPTH // 3)
T = DEPTH / WIDTH
NETWORKS, PATHS, CHAINS = 256, 2**11, 2**13
"""With weights; of the SDE beside them; and of covariances alone, which the chain draws fast."""

PATTERNS = {
    "no mask": (si.Pattern(), 1),
    "causal": (si.CAUSAL, 1),
    "prompts": (si.Pattern(prompts=(2, 2)), 1),
    "causal prompts": (si.Pattern(causal=True, prompts=(2, 2)), 0),
}
"""Patterns, and a token that moves and that others see. Tokens 0 and 1 are in one prompt, 1 and 2 in different ones."""


def layer_with(name: str, gamma: float, pattern: si.Pattern):
    kind = template(name) if name == "feedforward" else template(name, pattern=pattern)
    layer = layer_of(kind, gamma=gamma, tau0=1.0, c_plus=1.0, c_minus=-1.0)
    # The limit does not depend on the width of the keys, and drawing them takes most of attention's time.
    return layer if name == "feedforward" else dataclasses.replace(layer, key_width=16)


def correlation(V, i: int, j: int):
    return V[:, i, j] / np.sqrt(V[:, i, i] * V[:, j, j])


def one_moves(token: int):
    return np.diag(np.arange(TOKENS) == token).astype(np.float32)


def networks(name: str, gamma: float, patterns: list[tuple[si.Pattern, int]], V0, key):
    """D from a token that moves, and gradients; of all patterns at once, which pass through the same weights.

    The tokens of all patterns are blocks of one mask, so that a network's weights, which take most of the time, are
    drawn once. No block attends to another, and each is compared on its own.
    """
    mask = linalg.block_diag(*(pattern.mask(TOKENS) for pattern, _ in patterns))
    layer, many = layer_with(name, gamma, si.Pattern.of_mask(mask)), np.eye(len(patterns), dtype=np.float32)
    starts, D0 = np.kron(many, V0), linalg.block_diag(*(one_moves(token) for _, token in patterns))
    sizes = {"width": WIDTH, "depth": DEPTH, "networks": NETWORKS}
    keys = jr.split(key)
    joint = sample_tangents(layer, starts, directions=D0, observe_every=DEPTH, **sizes, key=keys[0])[:, -1]
    D = joint[:, len(starts) :, len(starts) :]
    # Of one cotangent: the average over many of them has the same mean, and another law. Its squared norm over n, which
    # is 1 for large n, is divided out: it spreads by √(2/n), as much as the gradients of the last layers.
    norms, _ = sample_gradients(layer, starts, layers=[*LAYERS, DEPTH], cotangents=1, **sizes, key=keys[1])
    norms = norms[:, :-1] / norms[:, -1:]
    blocks = [slice(TOKENS * number, TOKENS * (number + 1)) for number in range(len(patterns))]
    return [(D[:, block, block], norms[:, :, block]) for block in blocks]


@pytest.mark.slow
@pytest.mark.parametrize("gamma", [0.2, 0.5])
@pytest.mark.parametrize("name", ["attention", "feedforward", "transformer"])
def test_networks_have_the_sdes_distribution(name, gamma, key):
    V0 = np.asarray(si.equicorrelated(tokens=TOKENS, correlation=0.2, norm=1.2), np.float32)
    patterns = {"": (si.Pattern(), 1)} if name == "feedforward" else PATTERNS
    drawn = networks(name, gamma, list(patterns.values()), V0, jr.fold_in(key, 0))
    compared = []
    for number, (label, (D, norms)) in enumerate(zip(patterns, drawn, strict=True), start=1):
        pattern, moving = patterns[label]
        layer, keys = layer_with(name, gamma, pattern), jr.split(jr.fold_in(key, number), 4)
        sizes = {"width": WIDTH, "depth": DEPTH, "observe_every": DEPTH}
        V = finite(si.sample_networks(layer, V0, **sizes, networks=CHAINS, key=keys[0])["covariance"].values[:, -1])
        V_sde = finite(si.simulate(layer, V0, [T], paths=CHAINS, key=keys[1])[:, 0])
        # With steps of .01 the spread of the tangent of a token that starts without one is up to 6 % too small.
        D_sde = finite(
            si.tangents(layer, V0, [T], one_moves(moving), paths=PATHS, step=0.0025, key=keys[2]).tangent[:, 0]
        )
        times = np.array(LAYERS) / WIDTH
        norms_sde = si.criteria.gradient_norms(layer, V0, times, time=T, paths=PATHS, key=keys[3]).norms
        statistics = {
            "correlation of tokens 0 and 1": (correlation(V, 0, 1), correlation(V_sde, 0, 1)),
            "correlation of tokens 1 and 2": (correlation(V, 1, 2), correlation(V_sde, 1, 2)),
        }
        seeing = pattern.mask(TOKENS)[:, moving] if name != "feedforward" else np.eye(TOKENS)[moving]
        for token in range(TOKENS):
            if seeing[token]:
                what = f"log D of token {token} (token {moving} moves)"
                statistics[what] = np.log(D[:, token, token]), np.log(D_sde[:, token, token])
            else:
                assert max(D[:, token, token].max(), D_sde[:, token, token].max()) < 1e-9
        for place, token in enumerate((0, 1, 3)):
            what = f"log squared gradient, layer {LAYERS[place]}, token {token}"
            statistics[what] = np.log(norms[:, place, token]), np.log(finite(norms_sde[:, place, token]))
        for what, (x, y) in statistics.items():
            test = stats.ks_2samp(x, y, method="asymp")
            print(
                f"{name:11} γ {gamma} {label:14} {what:41} networks {x.mean():8.4f} ± {x.std():.4f}, "
                f"SDE {y.mean():8.4f} ± {y.std():.4f}, KS {test.statistic:.4f}, p {test.pvalue:.2g}"
            )
        compared += statistics.values()
    for x, y in compared:
        assert_same_distribution(x, y)


def finite(paths):
    """The paths that do not explode, at least 99.5 % of them."""
    paths = np.asarray(paths, np.float64)
    ends = np.isfinite(paths.reshape(len(paths), -1)).all(axis=1)
    assert ends.mean() >= 0.995, f"{np.mean(~ends):.2%} of the paths explode"
    return paths[ends]
