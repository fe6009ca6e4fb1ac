"""Figures of a tuned layer and of its transfer, through what they draw."""

import dataclasses

import jax.random as jr
import numpy as np
import pandas as pd
import pytest
from helpers.budget import assert_within
from matplotlib import pyplot
from matplotlib.figure import Figure

import sdeinfer as si
from sdeinfer.plots import plot_transfer, plot_tuned


def labels(axes) -> dict[str, float]:
    """The vertical lines."""
    return {str(line.get_label()): float(line.get_xdata()[0]) for line in axes.lines}


def shares(axes) -> list[float]:
    """The share of networks of each colour."""
    return [sum(bar.get_height() for bar in bars) for bars in axes.containers]


def test_each_constraint_has_a_panel_with_its_bound_and_shares_of_networks(tuned):
    """New networks agree with those of the criteria; bars may leave out one network in a hundred."""
    constraints = tuned.constraints
    panels = plot_tuned(tuned, paths=400, key=jr.key(1))
    assert [axes.get_title("left") for axes in panels] == [str(each) for each in constraints[:4]]
    value = {str(name): float(row["value"]) for name, row in tuned.criteria.iterrows()}
    inside, beyond, quantiles, spreads = panels
    assert list(labels(inside).values()) == [2]
    share, others = inside.get_legend_handles_labels()[1]
    assert share.startswith(f"P = {value[str(constraints[0])]:.4g} ± ")
    assert (share[-12:], others) == (", bound 0.95", "others")
    found = {label.split(" ± ")[0]: x for label, x in labels(quantiles).items()}
    assert found["bound 30"] == 30
    np.testing.assert_allclose(found[f"90% quantile {value[str(constraints[2])]:.4g}"], value[str(constraints[2])])
    low, high, *bounds = [line.get_xdata()[0] for line in spreads.lines]
    np.testing.assert_allclose([high - low, bounds[1] - bounds[0]], [2 * value[str(constraints[3])], 10])
    for axes, row in ((inside, 0), (beyond, 1)):
        p, error = tuned.criteria[["value", "error"]].to_numpy(float)[row]
        off = max(0.0, abs(shares(axes)[0] - p) - 0.01)
        assert_within(off / np.hypot(error, np.sqrt(p * (1 - p) / 400)))
    for axes in (inside, beyond, quantiles):
        assert 0.98 < sum(shares(axes)) <= 1 + 1e-12
    for bars in inside.containers:  # no bar is on both sides of the bound
        ends = [[bar.get_x(), bar.get_x() + bar.get_width()] for bar in bars if bar.get_height()]
        assert all(low >= 2 - 1e-9 or high <= 2 + 1e-9 for low, high in ends)
    wanted, unwanted = (bars.patches[0].get_facecolor() for bars in inside.containers)
    assert [bars.patches[0].get_facecolor() for bars in beyond.containers] == [unwanted, wanted]


def test_given_axes_are_filled_in_order(tuned):
    given = Figure().subplots(1, 5)
    assert plot_tuned(tuned, key=jr.key(1), axes=given) == list(given)
    assert [axes.get_xscale() for axes in given] == ["linear"] * 4 + ["log"]  # a factor with a bound far away
    with pytest.raises(si.InputError, match="there are 5 constraints to plot, got 6 axes"):
        plot_tuned(tuned, key=jr.key(1), axes=Figure().subplots(1, 6))
    free = dataclasses.replace(tuned, problem=dataclasses.replace(tuned.problem, constraints=()))
    with pytest.raises(si.InputError, match="tuned: nothing to plot: it was tuned without"):
        plot_tuned(free, key=jr.key(1))
    assert not pyplot.get_fignums()


def test_a_transfer_has_a_panel_for_each_criterion():
    table = pd.MultiIndex.from_product([(128, 256), (16, 64)], names=["width", "depth"]).to_frame(index=False)
    table = table.assign(criterion="P(norm factor < 2) ≥ 0.95", bound=0.95, promised=0.9 + table["depth"] / 1e3)
    table = table.assign(promised_error=0.01, chain=0.91, chain_error=0.01, weights=np.nan, weights_error=np.nan)
    (panel,) = plot_transfer(table)
    lines = {line.get_label(): line for line in panel.lines}
    np.testing.assert_allclose(lines["n = 128, promised"].get_ydata(), [0.916, 0.964])
    np.testing.assert_allclose(lines["bound"].get_ydata(), 0.95)
    assert (panel.get_title("left"), panel.get_ylabel()) == ("P(norm factor < 2) ≥ 0.95", "P(norm factor < 2)")
    assert len(panel.figure.legends[0].get_texts()) == 5
    assert len(panel.containers) == 2  # chains of both widths; networks with weights have no values
    looks = {(line.get_linestyle(), line.get_color()) for name, line in lines.items() if str(name).endswith("promised")}
    assert len(looks) == 2
    with pytest.raises(si.InputError, match="axes: 1 are needed, got 0"):
        plot_transfer(table, axes=[])
