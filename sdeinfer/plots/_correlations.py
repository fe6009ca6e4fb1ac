"""Correlations of observed networks against predictions of the SDE: over depth-time, and at the last layer."""

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.stats import gaussian_kde

PROBABILITIES = (0.05, 0.25, 0.5, 0.75, 0.95)
NETWORKS, SDE = "#d1495b", "#2e5eaa"


def pair_correlations(covariance: xr.DataArray) -> xr.DataArray:
    """Correlations ρ_αβ of all token pairs α < β; a dimension `pair` replaces the two token dimensions."""
    V = covariance.transpose(..., "token_a", "token_b")
    rows, columns = np.triu_indices(V.sizes["token_a"], k=1)
    scale = np.sqrt(np.diagonal(V.values, axis1=-2, axis2=-1))
    rho = V.values[..., rows, columns] / (scale[..., rows] * scale[..., columns])
    dims = (*V.dims[:-2], "pair")
    coords = {name: V.coords[name] for name in V.dims[:-2] if name in V.coords}
    return xr.DataArray(rho, dims=dims, coords=coords, name="correlation")


def correlation_bands(covariance: xr.DataArray) -> xr.DataArray:
    """Quantiles of the correlations of all pairs, networks and draws, per layer; exploded paths are left out."""
    rho = pair_correlations(covariance)
    return rho.quantile(PROBABILITIES, dim=[dim for dim in rho.dims if dim != "layer"], skipna=True)


def plot_correlation_paths(post: xr.DataTree) -> Figure:
    """Plot median and bands of the correlations over depth-time t = ℓ/n, networks against SDE at posterior draws."""
    predicted = correlation_bands(_covariance(post, "posterior_predictive"))
    observed = correlation_bands(_covariance(post, "observed_data").sel(layer=predicted["layer"]))
    scale, label = _depth_axis(post)
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    t = predicted["layer"].values / scale
    for low, high, alpha in ((0.05, 0.95, 0.18), (0.25, 0.75, 0.3)):
        band = predicted.sel(quantile=low), predicted.sel(quantile=high)
        axes.fill_between(t, *band, color=SDE, alpha=alpha, lw=0, label=f"SDE, {high - low:.0%} of correlations")
    axes.plot(t, predicted.sel(quantile=0.5), color=SDE, label="SDE, median")
    axes.plot(t, observed.sel(quantile=0.5), "o", color=NETWORKS, ms=5, label="networks, median")
    for probability in (0.05, 0.25, 0.75, 0.95):
        name = "networks, 5, 25, 75 and 95%" if probability == PROBABILITIES[0] else None
        axes.plot(t, observed.sel(quantile=probability), "_", color=NETWORKS, ms=9, mew=2, label=name)
    axes.set(xlabel=label, ylabel="correlation between tokens ρ")
    _finish(axes)
    axes.legend(frameon=False, fontsize="small", loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def plot_terminal_correlation(post: xr.DataTree) -> Figure:
    """Plot the density of the correlations at the last layer, networks against SDE: Fig. 1 (right) and 3 (left)."""
    predicted = _covariance(post, "posterior_predictive").isel(layer=-1)
    observed = _covariance(post, "observed_data").sel(layer=predicted["layer"])
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    samples = {"networks": observed, "SDE at posterior draws": predicted}
    finite = {name: _finite(pair_correlations(V)) for name, V in samples.items()}
    together = np.concatenate(list(finite.values()))
    grid = np.linspace(max(together.min() - 0.05, -1), min(together.max() + 0.05, 1), 400)
    bins = np.linspace(grid[0], grid[-1], 25)
    for (name, rho), colour in zip(finite.items(), (NETWORKS, SDE), strict=True):
        label = f"{name} ({len(rho)} correlations)"
        axes.hist(rho, bins=bins, density=True, color=colour, alpha=0.25, label=label if len(rho) < 3 else None)
        if len(rho) >= 3:
            axes.plot(grid, gaussian_kde(rho)(grid), color=colour, label=label)
    axes.set(xlabel=f"correlation between tokens ρ after layer {predicted['layer'].item():g}", ylabel="density")
    _finish(axes)
    axes.legend(frameon=False, fontsize="small")
    return figure


def _covariance(post: xr.DataTree, group: str) -> xr.DataArray:
    return post.children[group].to_dataset()["covariance"]


def _finite(values: xr.DataArray) -> np.ndarray:
    flat = values.values.ravel()
    return flat[np.isfinite(flat)]


def _depth_axis(post: xr.DataTree) -> tuple[float, str]:
    widths = np.unique(post.children["constant_data"].to_dataset()["width"])
    return (float(widths[0]), "depth-time t = ℓ/n") if len(widths) == 1 else (1.0, "layer ℓ")


def _finish(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
