"""Figures are tested through what they draw; how they look is for eyes."""

import numpy as np
import pytest
import xarray as xr
from matplotlib import pyplot
from matplotlib.figure import Figure

from sdeinfer import InputError
from sdeinfer.criteria import GradientNorms
from sdeinfer.diagnostics import innovation_tests
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
    assert [line.get_label() for line in axes.lines] == ["networks (72)", f"fit ({3 * finite})"]
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
    assert [axes.get_title() for axes in plot_ranks(fitted)] == ["γ", "τ0", "c₊ − c₋"]


def test_posteriors_share_the_panels_of_chosen_parameters(fitted):
    panels = plot_posterior({"one": fitted, "two": fitted}, parameters=["c_plus", "gamma"])
    assert [axes.get_title() for axes in panels] == ["c₊", "γ"]
    legend = panels[-1].get_legend()
    assert legend is not None
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
    assert 4 <= draws.shape[1] / _ranked(even) <= 12
    apart = _ranks_of_gamma(fitted, draws + np.array([[1.0], [0.0], [0.0], [0.0]]))
    assert _ranked(apart) == _ranked(even)
    assert "p=0.00" not in even.texts[0].get_text()
    assert "p=0.00" in apart.texts[0].get_text()


def _ranked(axes):
    """The draws of a chain; lines of fewer points are parts that ArviZ highlights."""
    return max(len(line.get_xdata()) for line in axes.lines)


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
