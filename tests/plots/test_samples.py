"""Bands, densities and grids of any samples, through what they draw."""

import numpy as np
import pytest
import xarray as xr
from matplotlib import pyplot

import sdeinfer as si
from sdeinfer.plots import plot_bands, plot_densities, plot_grid, plot_tokens

X = np.array([0.0, 0.5, 1.0])
SAMPLES = np.arange(11.0)[:, None] * np.array([1.0, 2.0, 3.0])


def lines(axes) -> dict:
    return {line.get_label(): line for line in axes.lines}


def heights(band) -> list[float]:
    """The lowest and highest of a band."""
    y = band.get_paths()[0].vertices[:, 1]
    return [y.min(), y.max()]


def test_a_band_has_the_median_and_quantiles_of_each_label():
    axes = plot_bands(X, {"networks": SAMPLES, "SDE": 2 * SAMPLES})
    for (label, line), scale, band in zip(lines(axes).items(), (1, 2), axes.collections, strict=True):
        np.testing.assert_array_equal(line.get_xdata(), X)
        np.testing.assert_allclose(line.get_ydata(), scale * np.array([5.0, 10, 15]), err_msg=label)
        np.testing.assert_allclose(heights(band), scale * np.array([1.0, 27]))
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["networks", "SDE"]


def test_labels_differ_without_colours_and_another_call_goes_on():
    axes = pyplot.figure().subplots()
    samples = {"a": SAMPLES, "b": SAMPLES, "c": SAMPLES}
    assert plot_bands(X, samples, axes=axes) is axes
    plot_bands(X, {"d": SAMPLES}, axes=axes)
    looks = {(line.get_linestyle(), line.get_marker()) for line in axes.lines}
    assert len(looks) == len({line.get_color() for line in axes.lines}) == 4
    assert axes.get_legend() is None


@pytest.mark.filterwarnings("error")
def test_a_band_is_open_where_samples_diverge_and_no_numbers_are_left_out():
    samples = SAMPLES[:10].copy()
    samples[9:, 1] = np.inf
    samples[5:, 2] = np.inf
    axes = plot_bands(X, {"a": samples}, interval=(0, 0.8))
    assert axes.collections[0].get_paths()[0].vertices[:, 0].max() == 0.5
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [4.5, 9, np.nan])
    odd = plot_bands(X, {"a": samples[:9]}, interval=None)  # the median is a sample, and the next one is infinite
    np.testing.assert_allclose(odd.lines[0].get_ydata(), [4, 8, 12])
    mean = plot_bands(X, {"a": samples}, line="mean", interval=None)
    np.testing.assert_allclose(mean.lines[0].get_ydata(), [4.5, np.nan, np.nan])
    assert not mean.collections
    samples = np.concatenate([SAMPLES, np.full((4, 3), np.nan)])
    samples[:, 0] = np.nan
    axes = plot_bands(X, {"a": samples})
    np.testing.assert_allclose(axes.lines[0].get_ydata(), [np.nan, 10, 15])


def test_densities_of_networks_and_of_the_sde_integrate_to_one():
    rng = np.random.default_rng(0)
    networks = np.append(rng.normal(size=300), [np.nan, np.inf])
    axes = plot_densities(networks, rng.normal(size=1000))
    assert list(lines(axes)) == ["networks (300)", "SDE (1000)"]
    for line in axes.lines:
        assert 0.98 < np.trapezoid(line.get_ydata(), line.get_xdata()) <= 1.001
    (bars,) = axes.containers  # of networks
    np.testing.assert_allclose(sum(bar.get_width() * bar.get_height() for bar in bars), 1)
    assert axes.get_ylabel() == "density"


def test_densities_stay_within_the_support_and_equal_samples_have_none():
    axes = plot_densities(np.linspace(-0.99, 0.99, 50), np.linspace(-0.9, 0.99, 50), support=(-1, 1))
    assert all(np.abs(line.get_xdata()).max() <= 1 for line in axes.lines)
    axes = plot_densities(np.full(5, 0.2), [0.1, 0.2, 0.4])
    assert list(lines(axes)) == ["SDE (3)"]
    assert axes.get_legend_handles_labels()[1] == ["networks (5)", "SDE (3)"]
    assert plot_densities([1.0], [np.inf]).get_legend_handles_labels()[1] == ["networks (1)", "SDE (0)"]


@pytest.fixture
def grid():
    values = np.array([[1.0, 2, 3], [4, np.inf, np.nan]])
    coords = {"tau0": [0.5, 1.0], "gamma": [0.1, 0.2, 0.4]}
    return xr.DataArray(values, coords, name="loss", attrs={"units": "nats"})


def test_a_grid_has_a_cell_and_a_label_for_each_value(grid):
    axes = plot_grid(grid, limits=(1, 3))
    np.testing.assert_array_equal(axes.images[0].get_array().filled(-1), [[1, 2, 3], [3, 3, -1]])
    assert [text.get_text() for text in axes.texts] == ["1", "2", "3", "4", "inf", "nan"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("gamma", "tau0")
    assert [text.get_text() for text in axes.get_xticklabels()] == ["0.1", "0.2", "0.4"]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["0.5", "1"]
    bar = axes.images[0].colorbar
    assert (bar.ax.get_ylabel(), bar.extend, (bar.vmin, bar.vmax)) == ("loss (nats)", "max", (1, 3))


def test_a_grid_takes_labels_and_axes(grid):
    given = pyplot.figure().subplots(1, 2)[1]
    axes = plot_grid(grid.isel(tau0=[0]), labels=[["a", "b", "c"]], axes=given)
    assert axes is given
    assert [text.get_text() for text in axes.texts] == ["a", "b", "c"]
    assert axes.images[0].colorbar.extend == "neither"


def test_tokens_on_the_circle_and_on_the_sphere():
    axes = plot_tokens([[2.0, 0.0], [0.0, -1.0]])
    np.testing.assert_allclose(axes.collections[1].get_offsets(), [[1, 0], [0, -1]])
    # The pole of the view is in the middle, its antipode is behind; distances to both are sines of the angle.
    x = np.array([[1.0, 1, 1], [-1, -1, -1], [-1, 2, 0], [1, 0, 0]])
    behind, front = plot_tokens(x, colours=["r", "g", "b", "k"]).collections
    np.testing.assert_allclose(behind.get_offsets(), [[0, 0]], atol=1e-15)
    np.testing.assert_allclose(
        np.linalg.norm(front.get_offsets(), axis=1), [0, (14 / 15) ** 0.5, (2 / 3) ** 0.5], atol=1e-15
    )
    assert behind.get_alpha() < front.get_alpha()


REFUSED = [
    (lambda: plot_bands(X[None], {"a": SAMPLES}), r"x: the shape \(points,\) is needed, got \(1, 3\)"),
    (lambda: plot_bands(X, {"a": SAMPLES[:, :2]}), r"samples: 'a' needs the shape \(samples, 3\), got \(11, 2\)"),
    (lambda: plot_bands(X, {"a": SAMPLES[:0]}), r"got \(0, 3\)"),
    (lambda: plot_bands(X, {"a": SAMPLES}, interval=(0.9, 0.1)), r"interval: levels .* got \(0.9, 0.1\)"),
    (lambda: plot_bands(X, {"a": SAMPLES}, line="mode"), "line: median or mean is needed, got 'mode'"),
    (lambda: plot_densities(np.ones((2, 2)), [1.0]), r"networks: the shape \(samples,\) is needed, got \(2, 2\)"),
    (lambda: plot_densities([], [np.nan, np.inf]), "networks, sde: no sample is finite"),
    (lambda: plot_grid(xr.DataArray([1.0], dims="x")), r"values: two dimensions are needed, got \('x',\)"),
    (lambda: plot_grid(xr.DataArray([[np.nan]])), "values: none is finite"),
    (lambda: plot_grid(xr.DataArray([[1.0, 2.0]]), labels=[["a"]]), r"labels: the shape \(1, 2\) is needed"),
    (lambda: plot_grid(xr.DataArray([[1.0]]), limits=(2, 1)), r"limits: two increasing numbers .* got \(2, 1\)"),
    (lambda: plot_tokens(np.ones((3, 4))), r"tokens: shape \(n, 2\) or \(n, 3\) is needed, got \(3, 4\)"),
    (lambda: plot_tokens(np.ones((3, 2)), colours=["r"]), "colours: 3 are needed, got 1"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED)
@pytest.mark.usefixtures("unchecked")
def test_other_shapes_are_refused(call, message):
    with pytest.raises(si.InputError, match=message):
        call()
    assert not pyplot.get_fignums()
