"""Criteria on samples: known distributions, derivatives against differences and exact laws, and bad input."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_estimate
from scipy import stats

import sdeinfer as si
from sdeinfer import criteria as of

COUNT = 4096
CRITERIA = {
    "mean": (of.expectation(of.LogNorm()), lambda law: law.mean()),
    "spread": (of.spread(of.LogNorm()), lambda law: law.std()),
    "quantile": (of.quantile(of.LogNorm(), 0.9), lambda law: law.ppf(0.9)),
    "below": (of.probability(of.LogNorm(), below=0.7), lambda law: law.cdf(0.7)),
    "above": (of.probability(of.LogNorm(), above=0.7), lambda law: law.sf(0.7)),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_estimates_and_their_smooth_values_are_those_of_a_known_law(name, key):
    """The smooth value is biased by O(N^{−4/5}), far below the Monte Carlo error that both have."""
    criterion, exact = CRITERIA[name]
    law, never = stats.norm(0.2, 0.6), np.zeros(COUNT, bool)
    values = 0.2 + 0.6 * np.asarray(jr.normal(key, (COUNT,)))
    found = criterion.estimate(values, never)
    assert_estimate(found.value, exact(law), found.error)
    smooth = float(jax.jit(criterion.smooth)(values, never))
    assert abs(smooth - found.value) < found.error


def test_errors_are_those_of_large_samples():
    """Of a normal law with sd σ, by its quantiles: σ/√N, σ/√2N, and √(p (1 − p)/N), over the density for a quantile."""
    law, never = stats.norm(0.2, 0.6), np.zeros(COUNT, bool)
    values = law.ppf((np.arange(COUNT) + 0.5) / COUNT)
    p = {"quantile": 0.9, "below": law.cdf(0.7), "above": law.sf(0.7)}
    expected = {name: np.sqrt(x * (1 - x)) for name, x in p.items()} | {"mean": 0.6, "spread": 0.6 / np.sqrt(2)}
    expected["quantile"] /= law.pdf(law.ppf(0.9))
    for name, (criterion, _) in CRITERIA.items():
        found = criterion.estimate(values, never).error * np.sqrt(COUNT)
        np.testing.assert_allclose(found, expected[name], rtol=0.02, err_msg=name)


def test_smooth_probabilities_take_the_quartiles_for_the_scale_of_heavy_tails(key):
    """Φ(u) + u φ(u)/2 at a bandwidth of N^{−1/5} standard deviations of the normal law with these quartiles."""
    values = np.asarray(jr.cauchy(key, (100,)))
    low, high = np.quantile(values, [0.25, 0.75])
    u = (0.7 - values) / ((high - low) / (2 * stats.norm.ppf(0.75)) * 100 ** (-1 / 5))
    expected = np.mean(stats.norm.cdf(u) + u * stats.norm.pdf(u) / 2)
    found = CRITERIA["below"][0].smooth(jnp.asarray(values), jnp.zeros(100, bool))
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@pytest.mark.one_case("quantile")
@pytest.mark.parametrize("name", CRITERIA)
def test_derivatives_are_those_of_the_law(name, key):
    """By the mean μ and the sd σ of g = μ + σz, against the exact law; their spread over 16 samples is the error."""
    criterion, exact = CRITERIA[name]
    never = jnp.zeros(COUNT, bool)

    def value(parameters, z):
        return criterion.smooth(parameters[0] + parameters[1] * z, never)

    at = np.array([0.2, 0.6])
    found = jax.jit(jax.vmap(jax.grad(value), (None, 0)))(at, jr.normal(key, (16, COUNT)))
    change = 1e-5 * np.eye(2)
    expected = [(exact(stats.norm(*(at + d))) - exact(stats.norm(*(at - d)))) / 2e-5 for d in change]
    # The bias is allowed h⁴/8 of the fourth derivative of the distribution function, at most 1.4/σ⁴: see `_criteria`.
    bias = 1.4 * COUNT ** (-4 / 5) / 8
    error = np.std(found, axis=0, ddof=1) / 4
    assert_estimate(np.mean(found, axis=0), expected, np.hypot(error, bias))


def test_paths_that_explode_do_not_count_as_inside():
    values, exploded = np.zeros(100), np.arange(100) < 30
    for criterion in (of.probability(of.LogNorm(), below=1.0), of.probability(of.LogNorm(), above=-1.0)):
        assert criterion.estimate(values, exploded).value == 0.7
        assert np.isclose(criterion.smooth(jnp.asarray(values), jnp.asarray(exploded)), 0.7)


def test_statistics_are_what_they_are_named(key):
    V0 = np.array([[1.0, 0.2, 0.1], [0.2, 2.0, 0.3], [0.1, 0.3, 0.5]])
    A = np.asarray(jr.normal(key, (5, 4, 3, 3)))
    V, D = A @ A.swapaxes(-1, -2) + 0.1 * np.eye(3), A.swapaxes(-1, -2) @ A
    paths = of.Ensemble(*map(jnp.asarray, (V0, V, D, np.zeros(5, bool))))
    last = V[:, -1]
    rho = np.stack([v / np.sqrt(np.outer(np.diag(v), np.diag(v))) for v in last])[:, *np.triu_indices(3, 1)]
    change = np.log(np.diagonal(last, axis1=1, axis2=2) / np.diag(V0))
    eigenvalues = np.linalg.eigvalsh(V)
    margin = np.minimum(np.log(50 / eigenvalues[..., -1]), np.log(eigenvalues[..., 0] / 0.01)).min(axis=1)
    growth = np.log(np.trace(D[:, -1], axis1=1, axis2=2))
    expected = {
        of.MeanCorrelation(): rho.mean(axis=1),
        of.LargestCorrelation(): rho.max(axis=1),
        of.EffectiveRank(): np.array(
            [np.linalg.eigvalsh(v).sum() ** 2 / (np.linalg.eigvalsh(v) ** 2).sum() for v in last]
        ),
        of.LogNorm(1): change[:, 1],
        of.NormFactor(): np.exp(abs(change).max(axis=1)),
        of.RangeMargin(0.01, 50.0): margin,
        of.LogGradientNorm(): growth,
        of.GradientFactor(2): np.exp(abs(growth)),
    }
    for statistic, values in expected.items():
        np.testing.assert_allclose(statistic(paths), values, rtol=1e-10, err_msg=str(statistic))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: of.quantile(of.LogNorm(), 1.0), "a level between 0 and 1 is needed, got 1"),
        (lambda: of.probability(of.LogNorm()), "give either below or above"),
        (lambda: of.probability(of.LogNorm(), below=np.inf), "a finite value is needed"),
        (lambda: of.probability(of.LogNorm(), below=1.0) >= 1.5, "a bound between 0 and 1 is needed, got 1.5"),
        (lambda: of.expectation(of.LogNorm()) <= np.nan, "a finite bound is needed"),
        (lambda: 0.1 <= of.expectation(of.LogNorm()) <= 0.2, "chained comparisons are two constraints"),
        (lambda: of.RangeMargin(2.0, 1.0), "lowest < highest"),
        (lambda: of.LogNorm(4).check(3), "a token from 0 to 2 is needed"),
    ],
)
def test_bad_input_is_one_line(make, message):
    with pytest.raises(si.InputError, match=message) as caught:
        make()
    assert "\n" not in str(caught.value)
