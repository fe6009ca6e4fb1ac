"""The figure of a tuned layer, through what it draws."""

import dataclasses

import jax.random as jr
import numpy as np
import pytest
from budget import assert_within
from matplotlib import pyplot
from matplotlib.figure import Figure

import sdeinfer as si


def labels(axes) -> dict[str, float]:
    """The vertical lines."""
    return {str(line.get_label()): float(line.get_xdata()[0]) for line in axes.lines}


def shares(axes) -> list[float]:
    """The share of networks of each colour."""
    return [sum(bar.get_height() for bar in bars) for bars in axes.containers]


def test_each_constraint_has_a_panel_with_its_bound(tuned):
    constraints = tuned.problem.constraints
    panels = tuned.plot(key=jr.key(1))
    assert [axes.get_title("left") for axes in panels] == [str(each) for each in constraints[:4]]
    assert [axes.get_xlabel() for axes in panels] == [str(each.criterion.statistic) for each in constraints[:4]]
    value = {str(name): float(row["value"]) for name, row in tuned.criteria.iterrows()}
    inside, beyond, quantiles, spreads = panels
    assert list(labels(inside).values()) == [2]
    share, others = inside.get_legend_handles_labels()[1]
    assert share.startswith(f"P = {value[str(constraints[0])]:.4g} ± ")
    assert share.endswith(", bound 0.95")
    assert others == "others"
    assert list(labels(beyond).values()) == [0.5]
    found = {label.split(" ± ")[0]: x for label, x in labels(quantiles).items()}
    assert found["bound 30"] == 30
    np.testing.assert_allclose(found[f"90% quantile {value[str(constraints[2])]:.4g}"], value[str(constraints[2])])
    low, high, *bounds = [line.get_xdata()[0] for line in spreads.lines]
    np.testing.assert_allclose(high - low, 2 * value[str(constraints[3])])
    np.testing.assert_allclose(bounds[1] - bounds[0], 10)
    assert len({axes.figure for axes in panels}) == 1


def test_bars_are_shares_of_networks(tuned):
    """New paths agree with those of the criteria; bars may leave out one network in a hundred."""
    inside, beyond, quantiles, _ = tuned.plot(paths=400, key=jr.key(1))
    for axes, row in ((inside, 0), (beyond, 1)):
        value, error = tuned.criteria[["value", "error"]].to_numpy(float)[row]
        off = max(0.0, abs(shares(axes)[0] - value) - 0.01)
        assert_within(off / np.hypot(error, np.sqrt(value * (1 - value) / 400)))
    for axes in (inside, beyond, quantiles):
        assert 0.98 < sum(shares(axes)) <= 1 + 1e-12
    wanted, others = (bars.patches[0].get_facecolor() for bars in inside.containers)
    assert [bars.patches[0].get_facecolor() for bars in beyond.containers] == [others, wanted]


def test_given_axes_are_filled_in_order(tuned):
    given = Figure().subplots(1, 5)
    assert tuned.plot(key=jr.key(1), axes=given) == list(given)
    assert given[4].get_title("left") == str(tuned.problem.constraints[4])
    assert [axes.get_xscale() for axes in given] == ["linear"] * 4 + ["log"]  # a factor with a bound far away
    one = Figure().subplots()
    assert tuned.plot(paths=16, key=jr.key(1), axes=one) == [one]
    with pytest.raises(si.InputError, match="there are 5 constraints to plot, got 6 axes"):
        tuned.plot(key=jr.key(1), axes=Figure().subplots(1, 6))


def test_without_constraints_there_is_no_figure(tuned):
    free = dataclasses.replace(tuned, problem=dataclasses.replace(tuned.problem, constraints=()))
    with pytest.raises(si.InputError, match="tuned: it was tuned without constraints"):
        free.plot(key=jr.key(1))
    assert not pyplot.get_fignums()


def test_prompts_have_panels_of_their_own_unless_it_is_their_mean_that_counts(tuned):
    rows = tuned.criteria.iloc[[0, 0]].set_axis(["goal, prompt 0", "goal, prompt 1"])
    V0 = np.concatenate([tuned.V0, 4 * tuned.V0])
    problem = dataclasses.replace(tuned.problem, V0=V0, constraints=tuned.problem.constraints[:1])
    both = dataclasses.replace(tuned, problem=problem, criteria=rows).plot(key=jr.key(1))
    assert [axes.get_title("left") for axes in both] == ["goal, prompt 0", "goal, prompt 1"]
    assert shares(both[0]) != shares(both[1])
    mean = dataclasses.replace(problem, over="mean")
    (pooled,) = dataclasses.replace(tuned, problem=mean, criteria=rows[:1]).plot(key=jr.key(1))
    np.testing.assert_allclose(shares(pooled)[0], np.mean([shares(axes)[0] for axes in both]), atol=0.02)
