"""Ticks of log axes and legends, which all figures share."""

import numpy as np
import pytest
from matplotlib import pyplot

from sdeinfer.plots import finish, legend_below, panels_of


def ticks(axis) -> dict[float, str]:
    """Labels of the major and minor ticks on an axis."""
    low, high = axis.get_view_interval()
    both = zip(axis.get_ticklocs(), axis.get_ticklabels(), strict=True)
    minor = zip(axis.get_ticklocs(minor=True), axis.get_ticklabels(minor=True), strict=True)
    return {x: label.get_text() for x, label in [*both, *minor] if low <= x <= high and label.get_text()}


@pytest.mark.parametrize("last", [8, 15, 30, 61, 150, 250])
@pytest.mark.parametrize("first", [-200, -51, 0])
def test_an_axis_of_many_decades_has_a_few_even_ticks(first, last):
    axes = pyplot.figure().subplots()
    axes.plot([1, 2], [10.0**first, 10.0**last])
    axes.set_yscale("log")
    finish(axes)
    axes.figure.canvas.draw()
    exponents = np.log10(sorted(ticks(axes.yaxis)))
    assert 3 <= len(exponents) <= 7
    assert np.ptp(np.diff(exponents)) < 1e-6
    assert np.abs(exponents).min() < 1e-9
    steps = np.diff(exponents).round()
    assert set(steps) <= {2, 3, 5, 10, 20, 30, 50, 100}


def test_ticks_near_one_are_numbers_and_others_powers():
    axes = pyplot.figure().subplots()
    axes.set(yscale="log", ylim=(0.05, 30), xscale="log", xlim=(1e-6, 1e-2))
    finish(axes)
    axes.figure.canvas.draw()
    assert ticks(axes.yaxis) == {0.1: "0.1", 1.0: "1", 10.0: "10"}
    assert ticks(axes.xaxis)[1e-4] == "$\\mathdefault{10^{-4}}$"


def test_chosen_ticks_and_linear_axes_stay():
    axes = pyplot.figure().subplots()
    axes.set(xscale="log", xlim=(1, 1e40), ylim=(0, 1))
    axes.set_xticks([16, 32], ["16", "32"])
    before = axes.get_yticks().tolist()
    finish(axes)
    axes.figure.canvas.draw()
    assert axes.get_xticks().tolist() == [16, 32]
    assert axes.get_yticks().tolist() == before


@pytest.mark.parametrize(("labels", "columns"), [(["a"], 1), (["a", "b", "c", "d", "e"], 4), (["a" * 25, "b"], 2)])
def test_a_legend_has_as_many_columns_as_there_is_room(labels, columns):
    (axes,) = panels_of(None, 1)
    for label in labels:
        axes.plot([0, 1], label=label)
    legend_below([axes])
    (legend,) = axes.figure.legends
    assert legend._ncols == columns
    axes.figure.canvas.draw()
    assert legend.get_window_extent().width <= axes.figure.bbox.width
