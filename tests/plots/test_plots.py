"""Figures are tested through what they draw; how they look is for eyes."""

import numpy as np

from sdeinfer.plots import (
    correlation_bands,
    pair_correlations,
    plot_correlation_paths,
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


def test_bands_start_at_the_initial_correlation_and_widen(networks):
    bands = correlation_bands(networks["covariance"])
    np.testing.assert_allclose(bands.isel(layer=0), 0.1, atol=1e-12)
    width = bands.sel(quantile=0.95) - bands.sel(quantile=0.05)
    assert width.isel(layer=-1) > width.isel(layer=1) > 0


def test_bands_leave_exploded_paths_out(networks):
    exploded = networks["covariance"].copy(deep=True)
    exploded[0, 5:] = np.nan
    assert np.isfinite(correlation_bands(exploded)).all()


def test_correlation_paths_draw_networks_and_sde_over_depth_time(fitted):
    axes = plot_correlation_paths(fitted).axes[0]
    assert axes.get_xlabel() == "depth-time t = ℓ/n"
    lines = {line.get_label(): line for line in axes.lines}
    np.testing.assert_allclose(lines["SDE, median"].get_xdata()[-1], 10 / 96)
    expected = pair_correlations(fitted["observed_data"]["covariance"]).isel(layer=-1).median().item()
    np.testing.assert_allclose(lines["networks, median"].get_ydata()[-1], expected)


def test_terminal_correlations_are_densities(fitted):
    axes = plot_terminal_correlation(fitted).axes[0]
    for line in axes.lines:
        assert 0.9 < np.trapezoid(line.get_ydata(), line.get_xdata()) <= 1.001


def test_posterior_and_ranks_have_a_panel_a_parameter(fitted):
    titles = {axes.get_title() for axes in plot_posterior(fitted).axes}
    assert {"γ", "τ0", "c₊ − c₋", "c₊", "c₋"} <= titles
    assert {"γ", "τ0", "c₊ − c₋"} <= {axes.get_title() for axes in plot_ranks(fitted).axes}
