"""Goals in words."""

import pytest

import sdeinfer as si
from sdeinfer import criteria as of
from sdeinfer.tuning import parse_constraint, parse_criterion


@pytest.mark.parametrize(
    ("text", "constraint"),
    [
        ("E[mean correlation] <= 0.5", of.expectation(of.MeanCorrelation()) <= 0.5),
        ("E[effective rank] ≥ 2", of.expectation(of.EffectiveRank()) >= 2),
        ("q95(largest correlation) <= 0.9", of.quantile(of.LargestCorrelation(), 0.95) <= 0.9),
        ("q99.9(norm factor)<=.5", of.quantile(of.NormFactor(), 0.999) <= 0.5),
        ("P(norm factor<2)>=0.95", of.probability(of.NormFactor(), below=2) >= 0.95),
        ("P( log gradient norm  > -1 ) ≥ 9e-1", of.probability(of.LogGradientNorm(), above=-1) >= 0.9),
        ("  sd[log norm of token 12] >= +0.5", of.spread(of.LogNorm(12)) >= 0.5),
        ("P(margin in [1e-5, 12.5] > 0) >= 0.9", of.probability(of.RangeMargin(1e-5, 12.5), above=0) >= 0.9),
        ("E[gradient factor] ≤ 2", of.expectation(of.GradientFactor()) <= 2),
    ],
)
def test_goals_are_read(text, constraint):
    assert parse_constraint(text) == constraint
    assert parse_criterion(text.replace("≤", "<=").replace("≥", ">=").split("<=")[0].split(">=")[0]) == (
        constraint.criterion
    )


def test_a_word_is_a_parameter():
    assert parse_criterion(" gamma ") == "gamma"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "constraint: '' is not understood"),
        ("E[norm factor]", r"constraint: 'E\[norm factor\]' is not understood"),
        ("norm factor <= 2", "criterion: 'norm factor' is not understood; E"),
        ("E[norm] <= 2", "statistic: 'norm' is not understood; statistics are mean correlation, largest"),
        ("E[log norm of token x] <= 2", "statistic: 'log norm of token x' is not understood"),
        ("1 <= E[norm factor] <= 2", r"criterion: '1 <= E\[norm factor\]' is not understood"),
        ("P(norm factor < 2) >= often", "constraint: .* is not understood"),
        ("P(norm factor < 2) >= 1.5", "a bound between 0 and 1 is needed, got 1.5"),
        ("q150(norm factor) <= 2", "a level between 0 and 1 is needed, got 1.5"),
        ("P(margin in [5, 1] > 0) >= 0.9", "0 ≤ lowest < highest"),
    ],
)
def test_what_is_not_understood_is_said_in_one_line(text, message):
    with pytest.raises(si.InputError, match=message) as caught:
        parse_constraint(text)
    assert "\n" not in str(caught.value)
