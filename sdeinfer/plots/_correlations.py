"""Correlations of observed networks against predictions of the SDE: over depth-time, and at the last layer."""

import warnings

import numpy as np
import xarray as xr
from matplotlib.axes import Axes

from sdeinfer._files import InputError
from sdeinfer.plots._densities import plot_densities
from sdeinfer.plots._quantiles import PROBABILITIES, plot_quantiles


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
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "All-NaN slice", RuntimeWarning)  # where all have exploded
        return rho.quantile(PROBABILITIES, dim=[dim for dim in rho.dims if dim != "layer"], skipna=True)


def plot_correlation_paths(post: xr.DataTree, *, axes: Axes | None = None) -> Axes:
    """Plot median and bands of the correlations over depth-time t = ℓ/n, networks against SDE at posterior draws.

    Arguments:
        post: the result of `fit`.
        axes: where to plot, without a legend; None for a new figure with one.

    Example:
        ```python
        post = si.fit(si.models.full_path, data, key=key)
        plots.plot_correlation_paths(post)
        ```
    """
    predicted = correlation_bands(_covariance(post, "posterior_predictive"))
    observed = correlation_bands(_covariance(post, "observed_data").sel(layer=predicted["layer"]))
    scale, label = _depth_axis(post)
    t = predicted["layer"].values / scale
    labels = {"xlabel": label, "ylabel": "correlation between tokens ρ"}
    return plot_quantiles((t, predicted.values), (t, observed.values), population="correlations", axes=axes, **labels)


def plot_terminal_correlation(post: xr.DataTree, *, axes: Axes | None = None) -> Axes:
    """Plot the density of the correlations at the last layer, networks against SDE: Fig. 1 (right) and 3 (left).

    Arguments:
        post: the result of `fit`.
        axes: where to plot, without a legend; None for a new figure with one.

    Example:
        ```python
        figure, (left, right) = pyplot.subplots(1, 2, layout="constrained")
        plots.plot_correlation_paths(post, axes=left)
        plots.plot_terminal_correlation(post, axes=right).legend()
        ```
    """
    predicted = _covariance(post, "posterior_predictive").isel(layer=-1)
    observed = _covariance(post, "observed_data").sel(layer=predicted["layer"])
    rho = (pair_correlations(V).values.ravel() for V in (observed, predicted))
    panel = plot_densities(*rho, support=(-1.0, 1.0), axes=axes)
    panel.set_xlabel(f"correlation between tokens ρ after layer {predicted['layer'].item():g}")
    return panel


def _covariance(post: xr.DataTree, group: str) -> xr.DataArray:
    if group not in post.children or not post[group]["covariance"].size:
        raise InputError(f"post: has no {group}")
    return post.children[group].to_dataset()["covariance"]


def _depth_axis(post: xr.DataTree) -> tuple[float, str]:
    widths = np.unique(post.children["constant_data"].to_dataset()["width"])
    return (float(widths[0]), "depth-time t = ℓ/n") if len(widths) == 1 else (1.0, "layer ℓ")
