"""Figures are tested through what they draw; how they look is for eyes."""

import numpy as np
import pytest
import xarray as xr
from matplotlib import pyplot
from matplotlib.figure import Figure

from sdeinfer import InputError
from sdeinfer.criteria import GradientNorms
from sdeinfer.diagnostics import innovation_tests, summarise
from sdeinfer.plots import (
    correlation_bands,
    pair_correlations,
    plot_correlation_paths,
    plot_gradient_norms,
    plot_innovations,
    plot_posterior,
    plot_ranks,
    plot_terminal_correlation,
)


def test_pair_correlations_are_those_of_each_matrix(networks):
    rho = pair_correlations(networks["covariance"])
    assert rho.dims == ("network", "layer", "pair")
    V = networks["covariance"].values[4, 5]
    np.testing.assert_allclose(
        rho.values[4, 5], [V[a, b] / np.sqrt(V[a, a] * V[b, b]) for a, b in ((0, 1), (0, 2), (1, 2))]
    )


def test_bands_start_at_the_initial_correlation_and_widen_without_exploded_paths(networks):
    bands = correlation_bands(networks["covariance"])
    np.testing.assert_allclose(bands.isel(layer=0), 0.1, atol=1e-12)
    width = bands.sel(quantile=0.95) - bands.sel(quantile=0.05)
    assert width.isel(layer=-1) > width.isel(layer=1) > 0
    exploded = networks["covariance"].copy(deep=True)
    exploded[0, 5:] = np.nan
    assert np.isfinite(correlation_bands(exploded)).all()


def test_correlation_paths_draw_networks_and_predictions_over_depth_time(fitted):
    axes = plot_correlation_paths(fitted)
    assert axes.get_xlabel() == "depth-time t = ℓ/n"
    lines = {line.get_label(): line for line in axes.lines}
    np.testing.assert_allclose(lines["fit, median"].get_xdata()[-1], 10 / 96)
    expected = pair_correlations(fitted["observed_data"]["covariance"]).isel(layer=-1).median().item()
    np.testing.assert_allclose(lines["networks, median"].get_ydata()[-1], expected)


def test_terminal_correlations_are_densities(fitted):
    axes = plot_terminal_correlation(fitted)
    assert axes.get_xlabel() == "correlation between tokens ρ after layer 10"
    finite = np.isfinite(fitted["posterior_predictive"]["covariance"].isel(layer=-1, token_a=0, token_b=0)).sum().item()
    assert [line.get_label() for line in axes.lines] == ["networks (24)", f"fit ({finite})"]
    assert finite > 24
    for line in axes.lines:
        assert 0.9 < np.trapezoid(line.get_ydata(), line.get_xdata()) <= 1.001
        assert np.abs(line.get_xdata()).max() <= 1


def test_posterior_and_ranks_have_a_panel_a_parameter(fitted):
    panels = plot_posterior(fitted)
    assert [axes.get_title().partition(" = ")[0] for axes in panels] == ["γ", "τ0", "c₊ − c₋"]
    assert len({axes.figure for axes in panels}) == 1
    draws = fitted["posterior"]["gamma"].values
    low, high = panels[0].get_xlim()
    assert np.mean((low < draws) & (draws < high)) >= 0.99
    mean, sd = (float(number) for number in panels[0].get_title().removeprefix("γ = ").split(" ± "))
    assert abs(mean - draws.mean()) < 0.1 * draws.std()
    assert sd == pytest.approx(draws.std(), rel=0.05)
    truth = [line.get_xdata()[0] for line in panels[0].lines if line.get_linestyle() == "--"]
    np.testing.assert_allclose(truth, [0.6])
    # The density is zero at one height.
    assert len({np.round(low / high, 9) for low, high in (axes.get_ylim() for axes in panels)}) == 1
    rows = summarise(fitted)
    for axes, name in zip(panels, ("gamma", "tau0", "c_gap"), strict=True):
        interval, point = axes.lines[1:3]
        np.testing.assert_allclose(interval.get_xdata(), rows.loc[name, ["hdi_low", "hdi_high"]].astype(float))
        np.testing.assert_allclose([point.get_xdata()[0], point.get_ydata()[0]], [rows.loc[name, "mean"], 0.0])


def test_a_posterior_of_many_digits_has_its_numbers_below_its_name(fitted):
    posterior = fitted["posterior"].to_dataset()
    posterior["tau0"] = 0.02 + 1e-5 * posterior["tau0"]
    assert [axes.get_title().count("\n") for axes in plot_posterior(fitted)] == [0, 0, 0]
    panels = plot_posterior(fitted.assign(posterior=xr.DataTree(posterior)))
    assert [axes.get_title().partition("\n")[0] for axes in panels] == ["γ", "τ0", "c₊ − c₋"]
    posterior["tau0"] = 1e30 * posterior["tau0"]
    assert len(plot_posterior(fitted.assign(posterior=xr.DataTree(posterior)))[1].get_title()) < 25


def test_the_density_of_a_long_tail_is_that_of_the_bulk(fitted):
    """One draw in two hundred is a thousand times as large as the others."""
    posterior = fitted["posterior"].to_dataset().copy(deep=True)
    far = np.arange(posterior["gamma"].size).reshape(posterior["gamma"].shape) % 400 == 0
    bulk = posterior["gamma"].values[~far]
    posterior["gamma"] = posterior["gamma"].where(~far, 1000.0)
    curve = plot_posterior(fitted.assign(posterior=xr.DataTree(posterior)))[0].lines[0]
    x, density = curve.get_data()
    assert abs(x[density.argmax()] - np.median(bulk)) < bulk.std()
    assert np.sum((bulk.min() < x) & (x < bulk.max())) > 300


def test_ranks_are_curves_of_chains_that_share_a_scale(fitted):
    panels = plot_ranks(fitted)
    assert [axes.get_title().partition(", p ")[0] for axes in panels] == ["γ", "τ0", "c₊ − c₋"]
    assert {axes.get_xlabel() for axes in panels} == {"fractional rank"}
    assert [axes.get_ylabel() for axes in panels] == ["ECDF difference", "", ""]
    assert len({axes.get_ylim() for axes in panels}) == 1
    assert [text.get_text() for text in panels[0].figure.legends[0].get_texts()] == ["chain 0", "chain 1"]
    first, second = (curve_of(panels[0], f"chain {chain}") for chain in (0, 1))
    # The ranks of two chains of equal length are even together.
    np.testing.assert_allclose(first, -second, atol=2 / len(first))


def test_posteriors_share_the_panels_of_chosen_parameters(fitted):
    panels = plot_posterior({"one": fitted, "two": fitted}, parameters=["c_plus", "gamma"])
    assert [axes.get_title() for axes in panels] == ["c₊", "γ"]
    assert [text.get_text() for text in panels[0].figure.legends[0].get_texts()] == ["one", "two"]
    intervals = [line.get_ydata()[0] for line in panels[1].lines if len(line.get_xdata()) == 2][:2]
    assert intervals[0] > intervals[1] > panels[1].get_ylim()[0]
    given = list(Figure().subplots(1, 2))
    legend = plot_posterior({"one": fitted, "two": fitted}, parameters=["c_plus", "gamma"], axes=given)[-1].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["one", "two"]
    with pytest.raises(InputError, match="parameters: tau9 is not latent in the posterior"):
        plot_posterior(fitted, parameters=["tau9"])


@pytest.mark.long
def test_ranks_of_slow_chains_are_those_of_near_independent_draws(fitted):
    """With an autocorrelation of 0.8, nine draws are worth an independent one; less for the tails. Chains that disagree
    keep as many draws as others do."""
    rng, correlation = np.random.default_rng(3), 0.8
    draws = rng.normal(size=(4, 2000))
    for k in range(1, draws.shape[1]):
        draws[:, k] = correlation * draws[:, k - 1] + np.sqrt(1 - correlation**2) * draws[:, k]
    even = _ranks_of_gamma(fitted, draws)
    assert 4 <= draws.shape[1] / len(curve_of(even, "chain 0")) <= 12
    apart = _ranks_of_gamma(fitted, draws + np.array([[1.0], [0.0], [0.0], [0.0]]))
    assert len(curve_of(apart, "chain 0")) == len(curve_of(even, "chain 0"))
    assert "p < 0.01" not in even.get_title()
    assert "p < 0.01" in apart.get_title()
    labels = [{line.get_label() for line in axes.lines} for axes in (even, apart)]
    assert ["uneven" in of_panel for of_panel in labels] == [False, True]
    # The ranks of the chain that is too large are missing among the low ones.
    assert curve_of(apart, "chain 0").min() < -0.2


def curve_of(axes, label: str):
    return next(line for line in axes.lines if line.get_label() == label).get_ydata()


def _ranks_of_gamma(fitted, gamma):
    posterior = fitted["posterior"].to_dataset().drop_vars(("chain", "draw"))
    posterior = posterior.isel(chain=[0] * len(gamma), draw=[0] * gamma.shape[1])
    posterior["gamma"] = ("chain", "draw"), gamma
    return plot_ranks(fitted.assign(posterior=xr.DataTree(posterior)))[0]


@pytest.mark.parametrize(
    ("plot", "count"),
    [
        (plot_correlation_paths, 1),
        (plot_terminal_correlation, 1),
        (plot_innovations, 1),
        (plot_posterior, 3),
        (plot_ranks, 3),
    ],
)
def test_given_axes_are_drawn_on_and_returned(fitted, plot, count):
    given = list(Figure().subplots(1, count, squeeze=False)[0])
    if count == 1:
        assert plot(fitted, axes=given[0]) is given[0]
    else:
        assert plot(fitted, axes=given) == given
        with pytest.raises(InputError, match=f"axes: {count} are needed, got 1"):
            plot(fitted, axes=given[0])
    assert all(axes.has_data() for axes in given)
    assert not pyplot.get_fignums()
    plot(fitted)
    assert len(pyplot.get_fignums()) == 1  # which a notebook shows at the end of the cell


def test_innovations_in_each_direction_against_the_band(fitted):
    axes = plot_innovations(fitted)
    table = innovation_tests(fitted)
    assert [text.get_text() for text in axes.figure.legends[0].get_texts()][0] == "99% for all together"
    found = {line.get_ydata()[0]: line for line in axes.lines if line.get_marker() in ("o", "X")}
    assert [label.get_text() for label in axes.get_yticklabels()] == list(table.index[::-1])
    for place, z in enumerate(table["z"][::-1]):
        np.testing.assert_allclose(found[place].get_xdata(), [z])
    band = axes.patches[0].get_extents().transformed(axes.transData.inverted())
    for line in found.values():
        inside = band.x0 <= line.get_xdata()[0] <= band.x1
        assert line.get_marker() == ("o" if inside else "X")


@pytest.fixture
def norms():
    """Of 99 paths at three times and two tokens: 0.1, …, 10 for the first token and twice that for the second."""
    values = np.logspace(-1, 1, 99)[:, None, None] * np.ones((3, 2)) * [1, 2]
    return GradientNorms(np.array([0.0, 0.1, 0.2]), values)


@pytest.mark.parametrize("token", [0, 1])
def test_gradient_norms_have_bands_of_paths_and_marks_of_networks(token, norms):
    networks = GradientNorms(np.array([0.0, 0.2]), 3 * norms.norms[:, :2])
    axes = plot_gradient_norms(norms, networks, token=token)
    assert axes.get_yscale() == "log"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("depth-time t = ℓ/n", "squared gradient norm / n")
    quantiles = norms.quantiles(np.array([0.05, 0.25, 0.5, 0.75, 0.95]))[:, 0, token]
    bands = {band.get_label(): band.get_paths()[0].vertices for band in axes.collections}
    for label, ends in (("SDE, 90% of networks", quantiles[[0, 4]]), ("SDE, 50% of networks", quantiles[[1, 3]])):
        t, heights = bands[label].T
        assert (t.min(), t.max()) == (0.0, 0.2)
        np.testing.assert_allclose([heights.min(), heights.max()], ends)
    lines = {line.get_label(): line for line in axes.lines}
    np.testing.assert_allclose(lines["SDE, median"].get_ydata(), quantiles[2])
    np.testing.assert_array_equal(lines["networks, median"].get_xdata(), networks.times)
    marks = [line.get_ydata()[0] for line in axes.lines if line.get_marker() in ("o", "_")]
    np.testing.assert_allclose(sorted(marks), 3 * quantiles)
    assert len(axes.figure.legends[0].get_texts()) == 5
