"""Tuning at width n: exact laws of one token, and what networks keep of its promises."""

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pandas as pd
import pytest
from helpers.budget import assert_estimate, assert_visible
from helpers.internals import _in_residuals, _moved, as_module, coefficients
from scipy import optimize, stats

import sdeinfer as si
from sdeinfer import criteria as of

ONE, WIDTH, DEPTH, BOUND = np.eye(1), 4, 4, 1.0
SIZES: dict[str, Any] = {"width": WIDTH, "depth": DEPTH, "paths": 2048, "step": 0.1}
ARGUMENTS: dict[str, Any] = {**SIZES, "fixed": {"tau0": 1.0}, "maximise": "gamma"}


@functools.cache
def log_factor(gamma):
    """Mean and variance of log V′/V of one layer of attention for one token, by quadrature.

    V′/V = |λ√n e + γ g|²/n with λ² = 1 − γ² and n normals g: γ²/n times a noncentral chi-square variable.
    """
    law = stats.ncx2(WIDTH, WIDTH * (1 - gamma**2) / gamma**2)
    logs = np.log(law.ppf((np.arange(20_000) + 0.5) / 20_000) * gamma**2 / WIDTH)
    return logs.mean(), logs.var()


def exact_spread(gamma):
    return math.sqrt(DEPTH * log_factor(gamma)[1])


def limit_spread(gamma):
    return math.sqrt(2 * gamma**2 * (2 - gamma**2) * DEPTH / WIDTH)


def largest(spread, bound=BOUND):
    return optimize.brentq(lambda gamma: spread(gamma) - bound, 0.05, 0.99)


@pytest.fixture(scope="module")
def tuned():
    return si.tune("attention", ONE, subject_to=[of.spread(of.LogNorm()) <= BOUND], **ARGUMENTS, key=jr.key(0))


def test_the_exact_law_of_one_token(tuned):
    row = tuned.parameters.loc["gamma"]
    # Fresh networks have their own error, and so do those on which γ was found.
    assert_estimate(row["value"], largest(exact_spread), row["error"])
    assert_visible(largest(limit_spread) - largest(exact_spread), row["error"])
    assert tuned.law == "finite-width"


def test_slopes_are_differences_far_from_bounds_and_near(tuned):
    """Of the spread's slack, in logs, on a line below a third of the bound, and for a bound of 0; and of E log V′/V."""
    norm = of.LogNorm()
    goals = (of.spread(norm) <= BOUND, of.spread(norm) >= BOUND, of.expectation(norm) >= 0.0)
    problem, h = dataclasses.replace(tuned.problem, constraints=goals), 1e-5
    for gamma in (0.1, 0.5):
        u = np.array([math.log(gamma / (1 - gamma))])
        found, up, down = (problem.residuals(u + step) for step in (0.0, h, -h))
        slopes = [(one.value - other.value) / (2 * h) for one, other in zip(up, down, strict=True)]
        np.testing.assert_allclose([each.slope[0] for each in found], slopes, rtol=1e-5)


def test_a_bound_on_a_probability_is_one_on_a_quantile():
    norm, level = of.LogNorm(), 0.9
    values, never = np.random.default_rng(0).normal(size=100), np.zeros(100, bool)
    same = {
        of.probability(norm, below=0.5) >= level: of.quantile(norm, level) <= 0.5,
        of.probability(norm, below=0.5) <= level: of.quantile(norm, level) >= 0.5,
        of.probability(norm, above=0.5) >= level: of.quantile(norm, 1 - level) >= 0.5,
        of.probability(norm, above=0.5) <= level: of.quantile(norm, 1 - level) <= 0.5,
    }
    for goals in same.items():
        (event, *compared), (quantile, *expected) = map(_in_residuals, goals)
        assert compared == expected
        assert event.estimate(values, never).value == pytest.approx(quantile.estimate(values, never).value, rel=1e-12)


def test_the_objective_is_the_mean_over_depth(tuned):
    """Of the straight lines between the knots."""
    (free,) = tuned.problem.space.free
    space = dataclasses.replace(tuned.problem.space, free=(dataclasses.replace(free, knots=3),))
    u, h = np.array([-1.0, 0.3, 0.8]), 1e-5
    problem = dataclasses.replace(tuned.problem, space=space)
    (found,) = problem.objectives(u)
    np.testing.assert_allclose(found.value, np.trapezoid(1 / (1 + np.exp(-u)), [0.0, 0.5, 1.0]))
    changes = [problem.objectives(u + step)[0].value - problem.objectives(u - step)[0].value for step in h * np.eye(3)]
    np.testing.assert_allclose(found.slope, np.array(changes) / (2 * h), rtol=1e-5)
    values = {"value": [0.1, 0.2, 0.4], "error": [0.02] * 3, "at_end": [False] * 3}
    parameters = pd.DataFrame(values, index=[f"gamma[{knot}]" for knot in range(3)])
    assert "gamma = 0.225 ± 0.02" in dataclasses.replace(tuned, problem=problem, parameters=parameters).verdict


def test_profiles_are_stretched_with_the_depth(tuned, key):
    """A γ that steps up in the middle of four layers does so in the middle of eight."""

    def step_up(time):
        return jnp.where(time < DEPTH / WIDTH / 2, 0.2, 0.8)

    space = dataclasses.replace(tuned.problem.space, profiled=("gamma",))
    fixed = {**tuned.problem.fixed, "gamma": as_module(step_up)}
    stepped = dataclasses.replace(tuned, problem=dataclasses.replace(tuned.problem, space=space, fixed=fixed))
    sizes = {"widths": [WIDTH], "depths": [2 * DEPTH], "networks": 4096, "with_weights": 0}
    row = si.transfer(stepped, **sizes, key=key).criteria.iloc[0]
    exact = math.sqrt(DEPTH * (log_factor(0.2)[1] + log_factor(0.8)[1]))
    for source in ("promised", "chain"):
        assert_estimate(row[source], exact, row[f"{source}_error"])


def test_values_are_those_of_networks(tuned, key):
    """Fresh networks at the tuned γ have the stated value."""
    spread, error = tuned.criteria[["value", "error"]].iloc[0]
    assert_estimate(spread, exact_spread(tuned.values["gamma"]), error)
    logs = tuned.sample(paths=2048, key=key)["log norm of token 0"]
    assert_estimate(logs.std(ddof=0), spread, math.hypot(error, error))
    found = si.transfer(tuned, widths=[WIDTH], depths=[DEPTH], networks=2048, with_weights=256, key=key)
    row = found.criteria.iloc[0]
    for source in ("promised", "chain", "weights"):
        assert_estimate(row[source], spread, math.hypot(row[f"{source}_error"], error))


def test_criteria_of_paths_are_moved_to_those_of_chains(tuned):
    paths = dataclasses.replace(tuned.problem, law="limit", offsets={})
    chains = dataclasses.replace(paths, law="finite-width")
    moved, changed = _moved(paths, tuned.u)
    for criterion in paths.compared:
        values = [each.criterion(criterion, tuned.u)[0] for each in (moved, chains, paths)]
        np.testing.assert_allclose(values[0].value, values[1].value)
        np.testing.assert_allclose(values[0].slope, values[2].slope)
    assert changed
    assert not _moved(moved, tuned.u)[1]


def test_gradients_are_those_of_networks_of_width_n_from_four_columns_a_token_on(tuned, key):
    goals = (of.expectation(of.LogGradientNorm()) <= 1, of.expectation(of.LogGradientNorm(1)) <= 1)
    sizes = {"width": 8, "depth": 8, "paths": 1024, "V0": np.array([[[1.0, 0.3], [0.3, 1.2]]])}
    problem = dataclasses.replace(tuned.problem, constraints=goals, law="finite-width", offsets={}, **sizes)
    assert problem.of_chains == problem.statistics
    assert not dataclasses.replace(problem, width=7).of_chains
    weights = problem.fresh("weights", paths=1024, key=key)
    for goal in goals:
        (chains,), (expected,) = (each.estimates(goal.criterion, tuned.u) for each in (problem, weights))
        assert_estimate(chains.value, expected.value, math.hypot(chains.error, expected.error))


def test_coefficients_are_those_of_the_layer_over_unit_time(tuned):
    """γ²(2 − γ²) d/n, and its derivative by logit γ."""
    problem, gamma = tuned.problem, 0.3
    at = jnp.array([math.log(gamma / (1 - gamma))]), dict(problem.fixed), jnp.array([0.5]), jnp.asarray(DEPTH / WIDTH)
    found, slopes = coefficients(problem.space, *at)
    np.testing.assert_allclose(found.linear_noise, gamma**2 * (2 - gamma**2) * DEPTH / WIDTH)
    slope = 4 * gamma * (1 - gamma**2) * gamma * (1 - gamma) * DEPTH / WIDTH
    np.testing.assert_allclose(slopes.linear_noise, slope)


def test_the_limit_is_that_of_the_middle_of_each_interval(tuned):
    """γ(t)² = t, a profile: the noise γ²(2 − γ²) d/n at the middles of the solver's intervals, in unit time."""
    space = dataclasses.replace(tuned.problem.space, profiled=("gamma",))
    fixed = {**tuned.problem.fixed, "gamma": as_module(lambda time: jnp.sqrt(time * WIDTH / DEPTH))}
    problem = dataclasses.replace(tuned.problem, space=space, fixed=fixed)
    ends = np.asarray(problem.grid.steps)
    middles = (ends[1:] + ends[:-1]) / 2
    found, _ = problem.limit(tuned.u)
    np.testing.assert_allclose(found.limit.linear_noise[:, 0], middles * (2 - middles) * DEPTH / WIDTH, rtol=1e-6)


def test_offsets_move_values_and_estimates(tuned):
    criterion = tuned.problem.criteria[0]
    plain, moved = (dataclasses.replace(tuned.problem, offsets=x) for x in ({}, {criterion: np.array([0.3])}))
    for what in ("criterion", "estimates"):
        value, other = (getattr(problem, what)(criterion, tuned.u)[0].value for problem in (plain, moved))
        np.testing.assert_allclose(other - value, 0.3)


def trace(paths):
    return paths.last.trace(axis1=1, axis2=2)


@pytest.mark.long
def test_goals_are_had_that_some_networks_explode_past():
    """E tr V is 3.06 at γ = 0.5 and 3.21 at 0.68; then some networks, finite, are larger than all paths."""
    V0, goal = np.asarray(si.equicorrelated(tokens=3, correlation=0.2)), of.expectation(trace) <= 3.3
    sizes: dict[str, Any] = {"width": 128, "depth": 38, "paths": 1024, "step": 0.05}
    found = si.tune("attention", V0, maximise="gamma", fixed={"tau0": 0.9}, subject_to=goal, **sizes, key=jr.key(3))
    assert 0.6 < found.values["gamma"] < 0.9
