"""Correlations and gradients over depth, by the SDE and in networks."""

import warnings

import numpy as np
import xarray as xr
from jaxtyping import Float
from matplotlib.axes import Axes

from sdeinfer._arguments import checked
from sdeinfer._files import InputError
from sdeinfer.criteria import GradientNorms
from sdeinfer.infer._predictive import law_of_predictions
from sdeinfer.plots._samples import densities
from sdeinfer.plots._style import NETWORKS, SDE, finish, legend_below, one_panel

type Quantiles = tuple[Float[np.ndarray, " _"], Float[np.ndarray, "5 _"]]
"""Places, and the quantiles at `_PROBABILITIES` there."""

_PROBABILITIES = (0.05, 0.25, 0.5, 0.75, 0.95)


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
        return rho.quantile(_PROBABILITIES, dim=[dim for dim in rho.dims if dim != "layer"], skipna=True)


@checked
def plot_correlation_paths(post: xr.DataTree, *, axes: Axes | None = None) -> Axes:
    """Plot median and bands of the correlations over depth-time t = ℓ/n, networks against predictions of the fit.

    Arguments:
        post: the result of `fit`.
        axes: where to plot, without a legend; None for a new figure with one.
    """
    predicted = correlation_bands(_covariance(post, "posterior_predictive"))
    observed = correlation_bands(_covariance(post, "observed_data").sel(layer=predicted["layer"]))
    widths = np.unique(post.children["constant_data"].to_dataset()["width"])
    scale, label = (float(widths[0]), "depth-time t = ℓ/n") if len(widths) == 1 else (1.0, "layer ℓ")
    t = predicted["layer"].values / scale
    labels = {"xlabel": label, "ylabel": "correlation between tokens ρ", "law": _law(post)}
    return _plot_quantiles((t, predicted.values), (t, observed.values), population="correlations", axes=axes, **labels)


@checked
def plot_terminal_correlation(post: xr.DataTree, *, axes: Axes | None = None) -> Axes:
    """Plot the density of the correlations at the last layer, networks against predictions: Fig. 1 (right), 3 (left).

    The legend counts networks and predictions of networks; each has a correlation for every pair of tokens.

    Arguments:
        post: the result of `fit`.
        axes: where to plot, without a legend; None for a new figure with one.
    """
    predicted = _covariance(post, "posterior_predictive").isel(layer=-1)
    observed = _covariance(post, "observed_data").sel(layer=predicted["layer"])
    rho, counts = zip(*map(_finite_correlations, (observed, predicted)), strict=True)
    panel = densities(rho, counts, support=(-1.0, 1.0), law=_law(post), axes=axes)
    panel.set_xlabel(f"correlation between tokens ρ after layer {predicted['layer'].item():g}")
    return panel


def plot_gradient_norms(
    found: GradientNorms, networks: GradientNorms | None = None, *, token: int = 0, axes: Axes | None = None
) -> Axes:
    """Plot median and bands of squared gradient norms over depth-time t = ℓ/n, of the SDE and of networks (Fig. 2).

    A band is left open where its upper end is +∞, since too many paths explode.

    Arguments:
        found: the result of `gradient_norms`.
        networks: norms of networks in the same units, as `GradientNorms(layers / width, norms)` with the norms of
            `sample_gradients`. The law of the SDE is that for one gradient of the outputs: `cotangents=1`.
        token: number of the token, from 0; 0 for gradients of weights.
        axes: where to plot, without a legend; None for a new figure with one.
    """
    of_networks = None if networks is None else _of_gradients(networks, token)
    labels = {"yscale": "log", "xlabel": "depth-time t = ℓ/n", "ylabel": "squared gradient norm / n", "law": "SDE"}
    return _plot_quantiles(_of_gradients(found, token), of_networks, population="networks", axes=axes, **labels)


def _plot_quantiles(
    predicted: Quantiles, networks: Quantiles | None, *, law: str, population: str, axes: Axes | None, **labels: str
) -> Axes:
    """Plot a law's median and two bands of a population, and five quantiles of networks; a band is open at NaN."""
    panel = one_panel(axes, height=3.8)
    x, quantiles = predicted
    for low, high, share, alpha in ((0, -1, "90%", 0.18), (1, -2, "50%", 0.3)):
        label = f"{law}, {share} of {population}"
        panel.fill_between(x, quantiles[low], quantiles[high], color=SDE, alpha=alpha, lw=0, label=label)
    panel.plot(x, quantiles[2], color=SDE, label=f"{law}, median")
    if networks is not None:
        x, quantiles = networks
        panel.plot(x, quantiles[2], "o", color=NETWORKS, ms=5, label="networks, median")
        for place in (0, 1, 3, 4):
            label = "_" if place else "networks, 5, 25, 75 and 95%"
            panel.plot(x, quantiles[place], "_", color=NETWORKS, ms=9, mew=2, label=label)
    panel.set(**labels)
    finish(panel)
    if axes is None:
        legend_below([panel])
    return panel


def _finite_correlations(V: xr.DataArray) -> tuple[Float[np.ndarray, " correlations"], int]:
    """The correlations of all networks that did not explode, and how many networks these are."""
    rho = pair_correlations(V).values
    finite = np.isfinite(rho).all(axis=-1)
    return rho[finite].ravel(), int(finite.sum())


def _law(post: xr.DataTree) -> str:
    """The law of the predictions, for legends."""
    return "SDE" if law_of_predictions(post) == "limit" else "fit"


def _covariance(post: xr.DataTree, group: str) -> xr.DataArray:
    if group not in post.children or not post[group]["covariance"].size:
        raise InputError(f"post: has no {group}")
    return post.children[group].to_dataset()["covariance"]


def _of_gradients(gradients: GradientNorms, token: int) -> Quantiles:
    """NaN instead of +∞, which opens a band."""
    norms = gradients.quantiles(np.array(_PROBABILITIES))[..., token]
    return gradients.times, np.where(np.isfinite(norms), norms, np.nan)
