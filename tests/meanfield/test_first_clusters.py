"""First clusters on the circle: their number over random starts and the number that linear growth predicts."""

import jax
import jax.random as jr
import numpy as np
import pytest
from budget import assert_estimate, assert_mean, assert_within, mean_and_error
from meanfield.test_clusters import on_circle
from scipy.special import iv

from sdeinfer import InputError, meanfield

STARTS, TOKENS = 100, 500
TIMES = np.linspace(0.0, 12.0, 121)
"""In units of 1/I_0(β) for the flow without normalisation; the first clusters are there at 6 or so at the latest."""

OFF = 0.5
"""Linear growth predicts the mean number to half a cluster: it leaves out what happens as the tokens meet."""


def first_clusters(beta: float, *, normalised: bool = True) -> np.ndarray:
    """The number of the first clusters of each start."""
    flow, ts = meanfield.SelfAttentionFlow(beta, normalised=normalised), TIMES / (1 if normalised else iv(0, beta))
    counts = []
    for key in jr.split(jr.key(0), STARTS):
        trajectory = meanfield.solve(flow, meanfield.random_tokens(TOKENS, 2, key=key), ts, rtol=1e-5, atol=1e-6)
        counts.append(meanfield.first_clusters(flow, ts, trajectory).clusters)
    return np.array(counts)


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
    counts, fastest = first_clusters(beta, normalised=normalised), meanfield.fastest_mode(beta, dimension=2)
    mean, error = mean_and_error(counts)
    expected, off = meanfield.expected_first_clusters(beta, TOKENS), counts - fastest
    print(f"\nβ = {beta:g}: argmax {fastest}, expected {expected:.2f}, mean {mean:.2f} ± {error:.2f}", end=", ")
    print(f"equal {(off == 0).mean():.2f}, within ±1 {(np.abs(off) <= 1).mean():.2f}, {np.bincount(counts).tolist()}")
    assert_estimate(mean, np.clip(mean, expected - OFF, expected + OFF), error)
    assert_share(np.abs(off) <= 1, 0.75)


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
        found = [meanfield.expected_first_clusters(beta, n) for n in (10, 10**4, 10**100)]
        assert np.abs(np.array(found) - fastest)[2] < 0.02, (beta, found)
    with pytest.raises(InputError, match="number: at least 2 tokens are needed, got 1"):
        meanfield.expected_first_clusters(9.0, 1)


def test_peaks_part_at_the_width_of_the_potential():
    """Two equal tokens at an angle a: the middle has the second derivative ∝ β sin²(a/2) − cos(a/2)."""
    beta = 9.0
    middle = (-1 + (1 + 4 * beta**2) ** 0.5) / (2 * beta)  # the cosine c of a/2 with β(1 − c²) = c
    for factor, expected in ((0.97, 1), (1.03, 2)):
        half = factor * np.arccos(middle)
        assert meanfield.peaks(on_circle([half, -half]), beta) == expected
    assert meanfield.peaks(np.eye(2), 1e4) == 2
    with pytest.raises(InputError, match=r"tokens: shape \(\*times, n, 2\) is needed"):
        meanfield.peaks(np.eye(3), beta)


def test_first_clusters_of_a_perturbed_ring():
    """Mode 3 alone grows to three clusters, which stay while the trajectory lasts."""
    angles = np.asarray(meanfield.angles(90))
    tokens, ts = on_circle(angles + 0.01 * np.sin(3 * angles)), np.linspace(0, 12, 49)
    flow = meanfield.SelfAttentionFlow(5.0)
    trajectory = meanfield.solve(flow, tokens, ts)
    found = meanfield.first_clusters(flow, ts, trajectory)
    speeds = jax.jit(jax.vmap(lambda x: (flow(x) ** 2).sum()))(trajectory)
    assert found == (3, ts[np.argmax(speeds)], 12.0)
    with pytest.raises(InputError, match="later times are needed"):
        meanfield.first_clusters(flow, ts[:4], trajectory[:4])
    with pytest.raises(InputError, match="flow: must have Q = K = V = None"):
        meanfield.first_clusters(meanfield.SelfAttentionFlow(5.0, V=-np.eye(2)), ts, trajectory)
    with pytest.raises(InputError, match=r"trajectory: shape \(times, n, 2\) is needed"):
        meanfield.first_clusters(flow, ts, trajectory[0])


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
    expected = meanfield.expected_first_clusters(beta, size)
    print(
        f"\nfirst: {mean:.2f} ± {error:.2f}, expected {expected:.2f}, until {np.median([s.end for s in first]):.1f}",
        end="",
    )
    print(f" (median); long-lived: {np.bincount(sum(numbers, [])).tolist()}; clusters are peaks: {np.mean(equal):.2f}")
    assert_estimate(mean, np.clip(mean, expected - OFF, expected + OFF), error)
    assert_share([len(states) > 0 for states in numbers], 0.9)
    assert_share(equal, 0.9)
