"""Clusters and their plateaus on tokens whose clusters are known, and first clusters over random starts."""

import jax
import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_estimate, assert_mean, assert_within, mean_and_error
from scipy.special import iv

from sdeinfer import InputError, meanfield

STARTS, TOKENS = 100, 500
TIMES = np.linspace(0.0, 12.0, 121)
"""In units of 1/I_0(β) for the flow without normalisation; the first clusters are there at 6 or so at the latest."""

OFF = 0.5
"""Linear growth predicts the mean number to half a cluster: it leaves out what happens as the tokens meet."""


def on_circle(angles):
    return np.stack([np.cos(angles), np.sin(angles)], axis=-1)


def test_neighbours_are_linked_by_chains():
    tokens = on_circle(np.deg2rad([0.0, 2.0, 4.0, 90.0, 180.0, 181.0]))
    labels = meanfield.clusters(tokens)
    assert [list(labels == label).count(True) for label in np.unique(labels)] == [3, 1, 2]
    assert len(np.unique(meanfield.clusters(tokens, close=0.9998))) == 5


def test_counts_and_plateaus():
    ts = np.arange(5.0)
    trajectory = on_circle(np.deg2rad([[0, 90, 180], [0, 90, 180], [0, 90, 91], [0, 90, 91], [0, 1, 2]]))
    counts = meanfield.cluster_counts(trajectory)
    assert counts.tolist() == [3, 3, 2, 2, 1]
    assert meanfield.plateaus(ts, counts) == [(3, 0.0, 2.0), (2, 2.0, 4.0), (1, 4.0, 4.0)]
    assert meanfield.plateaus(ts, counts, lasting=2.0) == [(2, 2.0, 4.0)]


def assert_share(found, least: float):
    """The share of starts is `least` or more."""
    error = (least * (1 - least) / STARTS) ** 0.5
    assert_within(min((np.mean(found) - least) / error, 0.0), f"share {np.mean(found):.2f} ± {error:.2f} for {least}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("beta", "normalised"), [(5.0, True), (9.0, True), (20.0, True), (50.0, True), (9.0, False), (20.0, False)]
)
def test_random_tokens_form_the_clusters_of_the_fastest_modes(beta, normalised):
    """100 starts of 500 tokens, whose numbers have a Monte Carlo error of 0.05 (β = 5) to 0.1 (β = 50) in the mean.

    The mean is the expected one within `OFF`; most starts have argmax_k λ_k or a neighbour, at least three in four.
    """
    flow, ts = meanfield.SelfAttentionFlow(beta, normalised=normalised), TIMES / (1 if normalised else iv(0, beta))
    counts = []
    for key in jr.split(jr.key(0), STARTS):
        trajectory = meanfield.solve(flow, meanfield.random_tokens(TOKENS, 2, key=key), ts, rtol=1e-5, atol=1e-6)
        counts.append(meanfield.first_clusters(flow, ts, trajectory).clusters)
    fastest = meanfield.fastest_mode(beta, dimension=2)
    (mean, error), off = mean_and_error(counts), np.array(counts) - fastest
    expected = meanfield.expected_first_clusters(beta, TOKENS)
    print(f"\nβ = {beta:g}: argmax {fastest}, expected {expected:.2f}, mean {mean:.2f} ± {error:.2f}", end=", ")
    print(f"equal {(off == 0).mean():.2f}, within ±1 {(np.abs(off) <= 1).mean():.2f}, {np.bincount(counts).tolist()}")
    assert_estimate(mean, np.clip(mean, expected - OFF, expected + OFF), error)
    assert_share(np.abs(off) <= 1, 0.75)


@pytest.mark.one_case
@pytest.mark.parametrize("beta", [5.0, 50.0])
def test_random_tokens_have_the_peaks_of_a_normal_potential(beta):
    """The formula of Rice, before any growth: 400 starts, error 0.03 (β = 5) and 0.06 (β = 50)."""
    tokens = on_circle(np.random.default_rng(0).uniform(0, 2 * np.pi, (400, 2000)))
    k = np.arange(1, 100)
    spectrum = iv(k, beta) ** 2
    expected = ((k**4 * spectrum).sum() / (k**2 * spectrum).sum()) ** 0.5
    assert_mean(meanfield.peaks(tokens, beta), expected)


def test_the_expected_number_tends_to_the_fastest_mode():
    for beta in (2.0, 9.0, 50.0):
        fastest = meanfield.fastest_mode(beta, dimension=2)
        assert abs(meanfield.expected_first_clusters(beta, 10**100) - fastest) < 0.02, beta


def test_peaks_part_at_the_width_of_the_potential():
    """Two equal tokens at an angle a: the middle has the second derivative ∝ β sin²(a/2) − cos(a/2)."""
    beta = 9.0
    middle = (-1 + (1 + 4 * beta**2) ** 0.5) / (2 * beta)  # the cosine c of a/2 with β(1 − c²) = c
    for factor, expected in ((0.97, 1), (1.03, 2)):
        half = factor * np.arccos(middle)
        assert meanfield.peaks(on_circle([half, -half]), beta) == expected
    assert meanfield.peaks(np.eye(2), 1e4) == 2


def test_first_clusters_of_a_perturbed_ring():
    """Mode 3 alone grows to three clusters, which stay while the trajectory lasts."""
    angles = np.asarray(meanfield.angles(90))
    tokens, ts = on_circle(angles + 0.01 * np.sin(3 * angles)), np.linspace(0, 12, 49)
    flow = meanfield.SelfAttentionFlow(5.0)
    trajectory = meanfield.solve(flow, tokens, ts)
    speeds = jax.jit(jax.vmap(lambda x: (flow(x) ** 2).sum()))(trajectory)
    assert meanfield.first_clusters(flow, ts, trajectory) == (3, ts[np.argmax(speeds)], 12.0)
    with pytest.raises(InputError, match="later times are needed"):
        meanfield.first_clusters(flow, ts[:4], trajectory[:4])


@pytest.mark.slow
def test_long_lived_numbers_of_clusters():
    """Published settings: 32 tokens, β = 9, until T = 30 in steps of 0.1, clusters where ⟨x, x′⟩ > 0.999; 100 starts.

    At least nine starts in ten have a number that lasts from t to 2t, after the first clusters have formed, and end
    with as many clusters as peaks. The Monte Carlo error of the first number is 0.07.
    """
    beta, ts, size = 9.0, np.arange(301) / 10, 32
    flow, first, numbers, equal = meanfield.SelfAttentionFlow(beta), [], [], []
    for key in jr.split(jr.key(1), STARTS):
        trajectory = meanfield.solve(flow, meanfield.random_tokens(size, 2, key=key), ts)
        first.append(meanfield.first_clusters(flow, ts, trajectory))
        formed = ts >= first[-1].start
        counts = meanfield.peaks(trajectory[formed], beta)
        numbers.append([state.clusters for state in meanfield.plateaus(ts[formed], counts, lasting=2.0)])
        equal.append(meanfield.cluster_counts(trajectory[-1:])[0] == counts[-1])
    mean, error = mean_and_error([state.clusters for state in first])
    expected, until = meanfield.expected_first_clusters(beta, size), np.median([state.end for state in first])
    print(f"\nfirst: {mean:.2f} ± {error:.2f}, expected {expected:.2f}, until {until:.1f} (median); ", end="")
    print(f"long-lived: {np.bincount(sum(numbers, [])).tolist()}; clusters are peaks: {np.mean(equal):.2f}")
    assert_estimate(mean, np.clip(mean, expected - OFF, expected + OFF), error)
    assert_share([len(states) > 0 for states in numbers], 0.9)
    assert_share(equal, 0.9)
