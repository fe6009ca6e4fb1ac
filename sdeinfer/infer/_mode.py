"""The mode of a posterior, the layer there, and the potential and its gradient.

Tests: `tests/infer/test_sandwich.py`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# NumPyro must be imported before its subpackages, see `sdeinfer.likelihood`.
import numpyro as numpyro
from jaxtyping import Array, Float, Int, PyTree
from numpyro.infer.util import potential_energy
from scipy.optimize import minimize

from sdeinfer._compiler import RUN_ONCE
from sdeinfer.infer._densities import constrained, unobserved_structure
from sdeinfer.infer._expansion import SECOND_STEP, curvature, points_around, slopes
from sdeinfer.likelihood import AbstractModel
from sdeinfer.likelihood._path import in_default_types
from sdeinfer.likelihood._statistics import PathStatistics
from sdeinfer.parameters import TAU0

LARGEST_COORDINATE = 8.0
"""Bound on |x| for the unconstrained parameters x, such as logit γ, log τ0, log(c₊ − c₋) and (c₊ + c₋)/2."""

NEWTON_STEPS, LAST_STEP = 8, 1e-3
"""Largest number of Newton steps, and the length in posterior standard deviations below which the mode is reached."""

LEAST_CURVATURE = 0.05
"""Least curvature of the priors: in their tails a log density may be straight, or convex."""


type ShapesOfSites = dict[str, tuple[int, ...]]
"""Names of the latent sites, with the shapes of their unconstrained values."""

type Objective = Callable[[np.ndarray], tuple[float, np.ndarray]]
"""Function from unconstrained values to a potential and its gradient."""


class Mode(NamedTuple):
    """The mode of a posterior density in unconstrained parameters.

    Attributes:
        sites: the latent sites.
        x: unconstrained values of the sites, raveled and concatenated; shape (values,).
        covariance: inverse curvature (Laplace approximation), shape (values, values).
        curvature: Hessian of the potential at x, by differences of gradients; shape (values, values).
    """

    sites: ShapesOfSites
    x: Float[np.ndarray, " values"]
    covariance: Float[np.ndarray, "values values"]
    curvature: Float[np.ndarray, "values values"]

    @property
    def sd(self) -> Float[np.ndarray, " values"]:
        """Standard deviations of the Laplace approximation."""
        return np.sqrt(np.diag(self.covariance))

    def by_site(self, x: Float[np.ndarray, "... values"]) -> dict[str, Float[np.ndarray, "..."]]:
        """Unconstrained values by the names of their sites."""
        return by_site(self.sites, x)


def by_site(sites: ShapesOfSites, x: Float[Any, "... values"]) -> dict[str, Any]:
    """Unconstrained values by the names of their sites, with the leading axes of x."""
    ends = np.cumsum([math.prod(shape) for shape in sites.values()])
    parts = x.__array_namespace__().split(x, ends[:-1], axis=-1)
    return {
        site: part.reshape((*x.shape[:-1], *shape)) for (site, shape), part in zip(sites.items(), parts, strict=True)
    }


def sites_of(model: Callable[..., None], *data: PyTree) -> ShapesOfSites:
    """The latent sites of a program on its data."""
    return {site: leaf.shape for site, leaf in unobserved_structure(model, *data).items()}


def posterior_mode(model: AbstractModel, prepared: PyTree, *, start: Mode | None = None) -> Mode:
    """Find the mode by L-BFGS with gradients, in double precision whatever JAX's default."""
    sites = sites_of(model, prepared)
    return found_from(_objective(model, prepared, sites), sites, start)


def _objective(model: AbstractModel, prepared: PyTree, sites: ShapesOfSites) -> Objective:
    with jax.enable_x64(True):  # noqa: FBT003
        prepared = in_default_types(prepared)

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        with jax.enable_x64(True):  # noqa: FBT003
            value, slope = potential_and_slope(model, prepared, by_site(sites, x))
        return float(value), np.concatenate([np.ravel(slope[site]) for site in sites])

    return objective


def curvature_of_priors(
    model: AbstractModel, prepared: PathStatistics, mode: Mode
) -> Float[np.ndarray, "values values"]:
    """Hessian of −log prior density at a mode, for pooled and adjusted data; at least `LEAST_CURVATURE`."""
    assert prepared.adjustment is not None
    prepared = dataclasses.replace(prepared, adjustment=prepared.adjustment.of_priors())
    objective = _objective(model, prepared, mode.sites)
    values, axes = np.linalg.eigh(curvature(lambda x: objective(x)[1], mode.x))
    return (axes * np.maximum(values, LEAST_CURVATURE)) @ axes.T


def found_from(objective: Objective, sites: ShapesOfSites, start: Mode | None, *, polished: bool = True) -> Mode:
    names = [site for site, shape in sites.items() for _ in range(math.prod(shape))]
    starts = _starts(names) if start is None else [start.x]
    x, _ = min((_descended(objective, x) for x in starts), key=lambda end: end[1])
    hessian = curvature(lambda x: objective(x)[1], x)
    if polished:
        x = _polished(objective, x, hessian)
    values, axes = np.linalg.eigh(hessian)
    # The priors still have a curvature of about 1 where the mode is on the bound.
    covariance = (axes / np.where(values > LEAST_CURVATURE, values, 1.0)) @ axes.T
    return Mode(sites, x, covariance, hessian)


def _descended(objective: Objective, x: np.ndarray) -> tuple[np.ndarray, float]:
    """The end of L-BFGS from x, and the potential there.

    Without a scale the first step of much data goes to a bound, where a likelihood may have no slope. Here its length
    is at most 1.
    """
    scale = max(1.0, float(np.linalg.norm(objective(x)[1])))

    def scaled(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = objective(x)
        return value / scale, slope / scale

    bounds, options = [(-LARGEST_COORDINATE, LARGEST_COORDINATE)] * len(x), {"gtol": 1e-5 / scale}
    end = minimize(scaled, x, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
    return end.x, float(end.fun) * scale


def _polished(objective: Objective, x: np.ndarray, hessian: np.ndarray) -> np.ndarray:
    """The end of Newton steps with one curvature; the start if it is not definite or the steps do not get shorter.

    L-BFGS stops where a step gains less than 2e-9 of the potential, which grows with the data: at 10⁷ transitions one
    posterior standard deviation from the mode.
    """
    if np.linalg.eigvalsh(hessian)[0] <= 0:
        return x
    point, last = x, math.inf
    for _ in range(NEWTON_STEPS):
        slope = objective(point)[1]
        step = np.linalg.solve(hessian, slope)
        length = math.sqrt(slope @ step)
        if not length < last or (abs(point - step) > LARGEST_COORDINATE).any():
            break
        x, last = point, length
        if length < LAST_STEP:
            break
        point = point - step
    return x


def _starts(sites: Sequence[str]) -> list[np.ndarray]:
    temperatures = np.array([site.rpartition(".")[2] == TAU0.name for site in sites])
    if not temperatures.any():
        return [np.zeros(len(sites))]
    return [log_tau0 * temperatures for log_tau0 in (-1.5, 0.0, 1.5)]


class LayerAt(NamedTuple):
    """Coordinates of a layer, or of each network's layer, at a mode of the posterior.

    Attributes:
        u: `Coordinates.unconstrained`, shape (coordinates,) or (networks, coordinates).
        sd: standard deviations by the curvature at the mode; zero for a fixed coordinate.
        along: derivatives in the unconstrained values of the sites.
    """

    u: Float[np.ndarray, "*networks coordinates"]
    sd: Float[np.ndarray, "*networks coordinates"]
    along: Float[np.ndarray, "sites *networks coordinates"]

    def precision(self, curvature: Float[np.ndarray, "sites sites"]) -> Float[np.ndarray, "coordinates coordinates"]:
        """Precision of the coordinates, of the average network's, for a normal law of the sites; 0 for a fixed one."""
        along = self.along.reshape(len(self.along), -1, self.along.shape[-1])
        solved = np.linalg.solve(curvature, along.reshape(len(along), -1)).reshape(along.shape)
        covariance = np.einsum("snk,snl->kl", along, solved) / along.shape[1]
        free, precision = np.flatnonzero(np.diag(covariance) > 0), np.zeros_like(covariance)
        precision[np.ix_(free, free)] = np.linalg.pinv(covariance[np.ix_(free, free)], hermitian=True)
        return precision


type Pilot = Callable[[Int[np.ndarray, " some"], Mode | None], tuple[Mode, LayerAt]]
"""Function from indices of transitions, and a mode to start from or None, to the mode given these transitions."""


def layer_at(model: AbstractModel, prepared: PyTree, mode: Mode, latent: Array | None = None) -> LayerAt:
    """The coordinates of the layer, or of each network's layer, at a mode, for pooled data and any latent layers."""
    around = points_around(mode.x, SECOND_STEP)
    with jax.enable_x64(True):  # noqa: FBT003
        layers = constrained(model, in_default_types(prepared), mode.by_site(around[None]), latent).layers
    assert layers is not None
    u = np.asarray(layers[0], np.float64)
    along = np.moveaxis(slopes(u, SECOND_STEP), -1, 0)
    # Variance of each coordinate by the delta method; `along` has the shape (sites, ..., coordinates).
    variance = np.einsum("s...,st,t...->...", along, mode.covariance, along)
    return LayerAt(u[0], np.sqrt(np.maximum(variance, 0.0)), along)


@partial(jax.jit, static_argnums=0)
def potential(model: AbstractModel, prepared: PyTree, z: dict[str, Array]) -> Float[Array, ""]:
    """−log posterior density at unconstrained parameters by site name, up to a constant.

    It is jitted so that it is traced once for all programs that call it.
    """
    return jnp.asarray(potential_energy(model, (prepared,), {}, z))


@partial(jax.jit, static_argnums=0, compiler_options=RUN_ONCE)
def potential_and_slope(model: AbstractModel, prepared: PyTree, z: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    """The potential and its gradient in the unconstrained parameters."""
    return _value_and_slope(model, prepared, z)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sampled_potential(model: AbstractModel, prepared: PyTree, z: dict[str, Array]) -> Float[Array, ""]:
    """The potential for samplers, differentiable in z only; the gradient is that of `potential_and_slope`."""
    return potential(model, prepared, z)


def _pulled_back(model: AbstractModel, slope: dict[str, Array], change: Array) -> tuple[None, dict[str, Array]]:
    del model
    return None, {name: change * along for name, along in slope.items()}


@partial(jax.jit, static_argnums=0)
def _value_and_slope(model: AbstractModel, prepared: PyTree, z: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    return jax.value_and_grad(lambda z: potential(model, prepared, z))(z)


sampled_potential.defvjp(_value_and_slope, _pulled_back)
