"""Transitions outside the range of the law are left out, by a rule on the covariances from which they start."""

import math

import jax.random as jr
import numpy as np
import pytest
from helpers import references
from helpers.budget import assert_estimate
from helpers.cases import random_covariance
from helpers.fits import AtTheMode
from helpers.internals import (
    LARGEST_LOGIT,
    USED,
    Assumptions,
    ColdestLayer,
    LayerAt,
    Path,
    Range,
    attention_bend,
    attention_drift_next,
    attention_growth,
    logit_scale,
    logit_spread,
    mean_spread,
    measures_of,
    problem_of,
    range_to_fit,
    rounding,
    transitions_allowed,
)
from helpers.ranges import selected
from scipy.special import softmax

import sdeinfer as si
from sdeinfer.layers import template
from sdeinfer.observation import covariance_dataset

FULL_PATH = si.models.full_path
TRANSFORMER = Assumptions(template("transformer"))
EXPLODING = si.ShapedTransformer(gamma=0.5, tau0=0.5, c_plus=0.0, c_minus=-1.5)


def in_range_of(data, largest=LARGEST_LOGIT, assumptions=TRANSFORMER):
    """Whether each transition is used, and what was found."""
    path, attributes, _ = selected(problem_of(FULL_PATH, assumptions), data, largest)
    return path.used, attributes


def to_fit(data, largest):
    """What a fit selects."""
    problem = problem_of(FULL_PATH, TRANSFORMER)
    return range_to_fit(problem, data, problem.transitions(data), largest)


def exploding(networks: int, depth: int, seed: int, norm: float = 2.0, tokens: int = 4):
    """Logits of a spread of 0.63 at the start, and of hundreds within some tens of layers."""
    V0 = si.equicorrelated(tokens=tokens, correlation=0.2, norm=norm)
    sizes = {"width": 128, "depth": depth, "networks": networks}
    return si.sample_networks(EXPLODING, V0, **sizes, method="chain", key=jr.key(seed))


@pytest.fixture(scope="module")
def burst():
    """Networks of which most start in range; of as many tokens as others that are fitted, which are compiled for."""
    return exploding(32, 40, 1, norm=1.2, tokens=3)


def test_small_covariances_are_all_kept_but_what_was_left_out_before_stays_so():
    V0 = si.equicorrelated(tokens=3, correlation=0.1, norm=0.7)
    truth = si.ShapedTransformer(gamma=0.6, tau0=1.0, c_plus=1.0, c_minus=-3.0)
    quiet = si.sample_networks(truth, V0, width=96, depth=10, networks=24, key=jr.key(1))
    used, found = in_range_of(quiet)
    assert used.all()
    assert found["pilot_tau0"] > 0
    assert USED not in quiet
    kept = np.arange(24) > 2
    found, _ = in_range_of(quiet.assign({USED: (("network", "layer"), np.repeat(kept[:, None], 11, axis=1))}))
    np.testing.assert_array_equal(found, np.repeat(kept[:, None], 10, axis=1))


def test_the_rule_looks_at_the_start_of_a_transition_only(burst):
    scale, (used, found) = logit_scale(burst), in_range_of(burst)
    bound = scale[used].max()
    assert bound <= LARGEST_LOGIT * found["pilot_tau0"]
    np.testing.assert_array_equal(used, scale <= bound)
    assert 0 < used.sum() < used.size
    # Some of those kept end outside.
    assert (scale[:, 1:][used[:, :-1]] > bound).any()


def test_growth_by_attention_is_the_largest_relative_change_of_the_drift():
    V = np.asarray(random_covariance(4))
    change = np.linalg.eigvals(np.linalg.solve(V, references.attention_drift(V)))
    np.testing.assert_allclose(attention_growth(V[None], np.array([32])), abs(change).max() / 32, rtol=1e-10)


def starts_of(V, width: float) -> Path:
    """Transitions that start at given covariances, each of a network of its own."""
    number = np.arange(len(V))
    return Path(V[:, None], np.full(len(V), width), number, 0 * number, gap=np.ones(1, int))


def near_a_line(condition: float) -> np.ndarray:
    """Three tokens of different lengths, near a line: no other direction is as large as 1/condition."""
    u, rest = np.array([1.0, 0.6, -0.8]), np.array([0.3, -1.0, 0.5])
    third = np.cross(u, rest)
    return np.outer(u, u) + (np.outer(rest, rest) + np.outer(third, third)) / condition


def test_tokens_near_a_line_leave_it_by_the_fourth_power_of_a_normal():
    """By the exact softmax of one head: the variance of S in the direction where it is largest, and the share of 2a."""
    V, width, tau0, gamma, heads = near_a_line(1e6), 1024, 1.2, 0.4, 1
    L, rng = np.linalg.cholesky(V), np.random.default_rng(0)
    R = np.linalg.inv(L)
    changes, axes = np.linalg.eigh(R @ attention_drift_next(V) @ R.T)
    change, w = changes[-1], axes[:, -1] @ R
    bend = attention_bend(V[None], np.array([width]))[0]
    np.testing.assert_allclose(bend, np.sqrt(change) / width * width**0.25, rtol=1e-6)
    Y = L @ rng.normal(size=(400_000, 3, 3)) @ L.T / (tau0 * np.sqrt(width))
    A = np.eye(3) + softmax(Y, axis=-1) - 1 / 3
    S = np.einsum("a,sab,bc,sdc,d->s", w, A, V, A, w, optimize=True)
    expected = 16 / 3 * width * (change / (tau0**2 * width) ** 2) ** 2 / heads
    np.testing.assert_allclose(width * S.var() / 2, expected, rtol=0.12)  # of leading order, 3 %; by sampling, 2.3 %
    a = gamma**2 * (2 - gamma**2)
    coldest = ColdestLayer(np.log(tau0), noise=a, drift=0.0, mixing=gamma**4 / heads)
    nothing = dict.fromkeys((logit_spread, attention_growth), np.zeros(1))
    grown = coldest.grown(starts_of(V[None], width), nothing | {attention_bend: bend[None]}) / tau0
    np.testing.assert_allclose(grown**4, gamma**4 * expected / a, rtol=1e-6)


def test_the_spread_is_that_of_logits_in_a_row():
    """Of a token, over all it attends to, as the root of the mean variance of x W_Q W_Kᵀ xᵀ/n^{3/2} over weights."""
    V, width = np.asarray(random_covariance(3)), 64
    L, rng = np.linalg.cholesky(V), np.random.default_rng(0)
    logits = L @ rng.normal(size=(100_000, 3, 3)) @ L.T / np.sqrt(width)
    expected = np.sqrt(logits.var(axis=-1, ddof=1).mean(axis=0).max())
    np.testing.assert_allclose(logit_spread(V[None], np.array([width])), expected, rtol=0.01)


def test_the_drift_of_the_coldest_layer_is_without_its_temperature():
    kind = template("attention")
    u = np.asarray(kind.coordinates.unconstrained({"gamma": 0.6, "tau0": 2.5}))
    found = ColdestLayer.of(kind, LayerAt(u, np.array([0.1, 0.2]), np.eye(2)))
    np.testing.assert_allclose((found.drift, np.exp(found.log_tau0)), (0.6**2, 2.5))


def test_near_copies_beside_another_token_are_left_out_at_smaller_logits():
    """One layer moves them by tens of standard deviations, which the series gives to 10 % only."""
    X = np.array([[[1.0, 0.0], [1.0, 0.03], [-0.5, 0.9]], [[1.7, 0.0], [1.4, 1.0], [1.7, 0.8]]])
    V, width = 4 * (X @ X.mT + 1e-4 * np.eye(3)), np.full(2, 64.0)
    spread = logit_spread(V, width)
    measures = {logit_spread: spread, attention_growth: attention_growth(V, width), rounding: np.zeros(2)}
    measures[attention_bend] = np.zeros(2)
    assert spread[0] < spread[1]
    inside = Range(ColdestLayer(drift=0.75**2), 1.01 * spread.max()).contains(starts_of(V, 64.0), measures)
    assert inside.tolist() == [False, True]


@pytest.mark.one_case
@pytest.mark.parametrize("apart", [1e-7, 0.0])
def test_what_is_singular_up_to_rounding_is_left_out(networks, apart):
    near_copies = np.array([[1, 0, 0], [1, apart, 0], [0, 0, 1]])
    late = networks["layer"] >= 7
    data = networks.assign(
        covariance=networks["covariance"].where(~late, near_copies @ networks["covariance"].values @ near_copies.T)
    )
    used, _ = in_range_of(data)
    assert used[:, :7].any()
    assert not used[:, 7:].any()


def test_tokens_that_are_copies_from_the_start_are_an_error(networks):
    copies = np.array([[1, 0, 0], [1, 0, 0], [0, 0, 1]])
    data = networks.assign(
        covariance=networks["covariance"].copy(data=copies @ networks["covariance"].values @ copies.T)
    )
    with pytest.raises(si.InputError, match="network 0, layer 0: singular"):
        in_range_of(data)


def test_correlations_are_refused(networks):
    V = networks["covariance"].values
    norms = np.sqrt(np.diagonal(V, axis1=-2, axis2=-1))
    data = networks.assign(covariance=networks["covariance"].copy(data=V / (norms[..., None] * norms[..., None, :])))
    with pytest.raises(si.InputError, match="network 0: no token changes its norm in any layer"):
        to_fit(data, LARGEST_LOGIT)


def test_a_posterior_says_what_it_left_out(networks):
    sampler = AtTheMode(chains=1, draws=20)
    post = si.fit(FULL_PATH, networks, largest_logit=0.15, law="limit", sampler=sampler, predictions=1, key=jr.key(0))
    used = post["constant_data"][USED].values[:, :-1]
    assert post.attrs["left_out"] == 1 - used.mean()
    assert post.attrs["largest_logit"] == 0.15
    assert 0 < post.attrs["left_out"] < 1
    np.testing.assert_array_equal(used, in_range_of(networks, 0.15, Assumptions(template("transformer"), "limit"))[0])


def test_without_a_bound_or_without_attention_all_is_kept(burst):
    for options in ({"largest": math.inf}, {"assumptions": Assumptions(template("feedforward"))}):
        used, found = in_range_of(burst, **options)
        assert used.all()
        assert not found


def test_networks_of_several_widths_are_each_judged_by_their_own(networks):
    # As if the covariances of half of the networks were those of networks of a tenth of the width.
    mixed = networks.assign_coords(width=("network", np.where(np.arange(24) < 12, 96, 9.6)))
    scale, whole = logit_scale(mixed), logit_scale(networks)
    np.testing.assert_allclose(scale[:12], whole[:12], rtol=1e-12)
    np.testing.assert_allclose(scale[12:], whole[12:] * math.sqrt(10), rtol=1e-12)


def test_the_mean_spread_has_the_weights_of_the_information():
    """That of squares, by s⁴."""
    s = np.array([0.1, 0.2, 0.5])
    np.testing.assert_allclose(mean_spread(s) ** 2, np.average(s**2, weights=s**4))


@pytest.mark.parametrize("sd", [0.03, 0.1, 1.0])
def test_the_bound_has_the_least_error(sd):
    """Of the series, s⁴ on average over the information ∝ s⁴, and of the data."""
    spread = np.linspace(0.1, 0.55, 181)
    errors = []
    for count in range(1, len(spread) + 1):
        s = spread[:count]
        of_data = sd * np.sqrt(np.sum(spread[:40] ** 4) / np.sum(s**4))
        errors.append(np.hypot(np.sum(s**4 * s**4) / np.sum(s**4), of_data))
    assert transitions_allowed(spread, LARGEST_LOGIT, seen=40, sd=sd) == 1 + np.argmin(errors)


def test_four_times_as_many_networks_halve_the_error_of_the_data():
    spread = np.linspace(0.1, 0.55, 181)
    more, precise = (
        transitions_allowed(spread, LARGEST_LOGIT, seen=40, sd=sd, data_per_sample=times)
        for sd, times in ((0.1, 4.0), (0.05, 1))
    )
    assert more == precise


def test_a_fit_keeps_half_where_nothing_is_in_range(burst):
    last = burst.isel(layer=slice(20, 24), network=[0, 1])
    late = covariance_dataset(last["covariance"].values, width=128, architecture="transformer")
    with pytest.raises(ValueError, match="covariance: no transition starts inside the range of the law: .* is allowed"):
        in_range_of(late, 1e-6)
    path, found, half = to_fit(late, 1e-6)
    problem = problem_of(FULL_PATH, TRANSFORMER)
    transitions = problem.transitions(late)
    inside = half.contains(transitions, measures_of(transitions, problem.measures))  # as of further chunks
    np.testing.assert_array_equal(transitions.take(np.flatnonzero(inside)).used, path.used)
    used, spread = path.used, logit_scale(late)
    assert used.sum() == used.size / 2
    assert spread[used].max() < spread[~used].min()
    assert "no transition starts inside the range" in found["out_of_range"]


@pytest.mark.slow
def test_networks_that_explode_are_fitted_by_what_is_in_range():
    """With all transitions both laws are sure of absurd fits, which `check` does not trust."""
    data, settings = exploding(32, 64, 1), {"chains": 4, "draws": 500, "warmup": 500, "predictions": 2}
    for law, largest in (("finite-width", LARGEST_LOGIT), ("finite-width", math.inf), ("limit", math.inf)):
        post = si.fit(si.models.full_path, data, law=law, largest_logit=largest, **settings, key=jr.key(5))
        gamma, tau0 = (post["posterior"][name] for name in ("gamma", "tau0"))
        values = ", ".join(f"{x.name} {float(x.mean()):.4g} ± {float(x.std()):.2g}" for x in (gamma, tau0))
        print(f"\n{law}, largest {largest}: {post.attrs['left_out']:.0%} left out; {values} (truth 0.5, 0.5)")
        assert si.check(post).passed == (largest == LARGEST_LOGIT)
        if largest == LARGEST_LOGIT:
            assert_estimate(float(gamma.mean()), 0.5, float(gamma.std()))
