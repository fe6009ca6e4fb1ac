"""Goals in words say what criteria print."""

import itertools

import pytest

import sdeinfer as si
from sdeinfer import criteria as of
from sdeinfer.tuning import parse_constraint, parse_criterion

STATISTICS = [
    of.MeanCorrelation(),
    of.LargestCorrelation(),
    of.EffectiveRank(),
    of.LogNorm(0),
    of.LogNorm(12),
    of.NormFactor(),
    of.RangeMargin(0, 5),
    of.RangeMargin(1e-5, 12.5),
    of.LogGradientNorm(),
    of.LogGradientNorm(3),
    of.GradientFactor(),
    of.GradientFactor(3),
]
CRITERIA = [
    of.expectation,
    of.spread,
    *(lambda statistic, level=level: of.quantile(statistic, level) for level in (1e-6, 0.07, 0.5, 0.95, 0.999)),
    *(lambda statistic, value=value: of.probability(statistic, below=value) for value in (-1.5, 0, 2, 1e-7, 1e20)),
    lambda statistic: of.probability(statistic, above=-2.5e-4),
]


def test_every_built_in_statistic_is_tried():
    built_in = {cls for cls in vars(si.criteria).values() if isinstance(cls, type)}
    base = si.criteria.AbstractStatistic
    own = {cls for cls in built_in if issubclass(cls, base) and not cls.__abstractmethods__}
    assert own - {si.criteria.FunctionStatistic} == {type(each) for each in STATISTICS}


@pytest.mark.parametrize("statistic", STATISTICS, ids=str)
def test_what_is_printed_is_read(statistic):
    for make, bound in itertools.product(CRITERIA, (0.05, 0.95, 1e-5)):
        criterion = make(statistic)
        assert parse_criterion(str(criterion)) == criterion
        for constraint in (criterion <= bound, criterion >= bound):
            assert parse_constraint(str(constraint)) == constraint
            typed = str(constraint).replace("≤", "<=").replace("≥", ">=")
            assert parse_constraint(typed) == constraint


@pytest.mark.parametrize(
    ("text", "constraint"),
    [
        ("q95(largest correlation) <= 0.9", of.quantile(of.LargestCorrelation(), 0.95) <= 0.9),
        ("q99.9(norm factor)<=.5", of.quantile(of.NormFactor(), 0.999) <= 0.5),
        ("  95 %  quantile of norm factor ≤ 2 ", of.quantile(of.NormFactor(), 0.95) <= 2),
        ("P(norm factor<2)>=0.95", of.probability(of.NormFactor(), below=2) >= 0.95),
        ("P( log gradient norm  > -1 ) ≥ 9e-1", of.probability(of.LogGradientNorm(), above=-1) >= 0.9),
        ("sd[log norm of token 0] >= +0.5", of.spread(of.LogNorm(0)) >= 0.5),
        ("P(norm factor > 2) < 0.1", of.probability(of.NormFactor(), above=2) <= 0.1),
        ("E[norm factor] > 2", of.expectation(of.NormFactor()) >= 2),
    ],
)
def test_short_forms_and_spaces(text, constraint):
    assert parse_constraint(text) == constraint


def test_a_word_is_a_parameter():
    assert parse_criterion(" gamma ") == "gamma"
    assert parse_criterion("E[effective rank]") == of.expectation(of.EffectiveRank())


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
        ("P(norm factor < 2) >= nan", "constraint: .* is not understood"),
        ("P(norm factor < 2) >= 1.5", "a bound between 0 and 1 is needed, got 1.5"),
        ("q0(norm factor) <= 2", "a level between 0 and 1 is needed, got 0"),
        ("q150(norm factor) <= 2", "a level between 0 and 1 is needed, got 1.5"),
        ("E[norm factor] <= 1e999", "a finite bound is needed, got inf"),
        ("P(margin in [5, 1] > 0) >= 0.9", "0 ≤ lowest < highest"),
    ],
)
def test_what_is_not_understood_is_said_in_one_line(text, message):
    with pytest.raises(si.InputError, match=message) as caught:
        parse_constraint(text)
    assert "\n" not in str(caught.value)


def test_an_objective_that_is_not_understood():
    with pytest.raises(si.InputError, match="criterion: 'effective rank' is not understood; .* statistics are mean"):
        parse_criterion("effective rank")
