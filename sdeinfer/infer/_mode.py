"""The mode of a posterior, its potential and its gradient."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# NumPyro must be imported before its subpackages, see `sdeinfer.likelihood`.
import numpyro as numpyro
from jaxtyping import Array, Float, PyTree
from numpyro.infer.util import potential_energy
from scipy.optimize import minimize

from sdeinfer._compiler import RUN_ONCE
from sdeinfer.infer._densities import latent_structure
from sdeinfer.likelihood import AbstractModel, PathStatistics
from sdeinfer.parameters import TAU0

LARGEST_COORDINATE = 8.0
"""Bound on |x| for the unconstrained parameters x, such as logit γ, log τ0, log(c₊ − c₋) and (c₊ + c₋)/2."""

NEWTON_STEPS, CLOSE = 8, 1e-3
"""Largest number of Newton steps, and the length in posterior standard deviations below which the mode is reached."""

DIFFERENCES = {4: 1e-2, 8: 1e-5}
"""Step in the unconstrained parameters for finite differences, by the item size in bytes."""

LEAST_CURVATURE = 0.05
"""Least curvature of the priors: in their tails a log density may be straight, or convex."""


class Mode(NamedTuple):
    """The mode of a posterior density in unconstrained parameters.

    Attributes:
        sites: names of the latent sites.
        x: unconstrained values of the sites, raveled and concatenated; shape (values,).
        potential: −log density at x.
        covariance: inverse curvature (Laplace approximation), shape (values, values).
        curvature: Hessian of the potential at x, by differences of gradients; shape (values, values).
        shapes: shape of each site's unconstrained value; all scalar if None.
    """

    sites: tuple[str, ...]
    x: Float[np.ndarray, " values"]
    potential: float
    covariance: Float[np.ndarray, "values values"]
    curvature: Float[np.ndarray, "values values"]
    shapes: tuple[tuple[int, ...], ...] | None = None

    @property
    def sd(self) -> Float[np.ndarray, " values"]:
        """Standard deviations of the Laplace approximation."""
        return np.sqrt(np.diag(self.covariance))

    def by_site(self, x: Float[np.ndarray, "... values"]) -> dict[str, Float[np.ndarray, "..."]]:
        """Unconstrained values by the names of their sites."""
        return by_site(self.sites, self.shapes or ((),) * len(self.sites), x)


def by_site(
    sites: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], x: Float[np.ndarray, "... values"]
) -> dict[str, Float[np.ndarray, "..."]]:
    """Unconstrained values by the names of their sites, with the leading axes of x."""
    parts = np.split(x, np.cumsum([math.prod(shape) for shape in shapes])[:-1], axis=-1)
    return {site: part.reshape((*x.shape[:-1], *shape)) for site, shape, part in zip(sites, shapes, parts, strict=True)}


def posterior_mode(model: AbstractModel, prepared: PyTree, *, start: Mode | None = None) -> Mode:
    """Find the mode by L-BFGS with gradients.

    Arguments:
        model: the model.
        prepared: pooled data of the model.
        start: a mode of the same program to start from. If None, the best of three starts is used: the origin with
            log τ0 = −1.5, 0 and 1.5, since the likelihood is flat at large τ0.
    """
    structure = latent_structure(model, prepared)
    sites, shapes = tuple(structure), tuple(leaf.shape for leaf in structure.values())
    prepared, dtype = jax.device_put(prepared), jnp.result_type(float)

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = potential_and_slope(model, prepared, by_site(sites, shapes, np.asarray(x, dtype)))
        return float(value), np.concatenate([np.ravel(slope[site]) for site in sites]).astype(np.float64)

    return found_from(objective, sites, start, shapes=shapes)


def curvature_of_priors(
    model: AbstractModel, prepared: PathStatistics, mode: Mode
) -> Float[np.ndarray, "values values"]:
    """Hessian of −log prior density at a mode; eigenvalues below `LEAST_CURVATURE` are raised to it.

    Arguments:
        model: the model.
        prepared: pooled statistics of the model, with an adjustment.
        mode: a mode of the posterior.
    """
    assert prepared.adjustment is not None
    prepared = jax.device_put(dataclasses.replace(prepared, adjustment=prepared.adjustment.of_priors()))
    dtype = jnp.result_type(float)
    step = 10 * DIFFERENCES[dtype.itemsize]

    def slope(x: np.ndarray) -> np.ndarray:
        _, found = potential_and_slope(model, prepared, mode.by_site(np.asarray(x, dtype)))
        return np.concatenate([np.ravel(found[site]) for site in mode.sites]).astype(np.float64)

    change = np.array([slope(mode.x + along) - slope(mode.x - along) for along in step * np.eye(len(mode.x))])
    values, axes = np.linalg.eigh((change + change.T) / (4 * step))
    return (axes * np.maximum(values, LEAST_CURVATURE)) @ axes.T


def found_from(
    objective: Callable[[np.ndarray], tuple[float, np.ndarray]],
    sites: tuple[str, ...],
    start: Mode | None,
    *,
    shapes: tuple[tuple[int, ...], ...] | None = None,
    curvature_step: float = 1e-4,
    polished: bool = True,
) -> Mode:
    counts = [math.prod(shape) for shape in shapes or ((),) * len(sites)]
    each = [site for site, count in zip(sites, counts, strict=True) for _ in range(count)]
    starts = _starts(each) if start is None else [start.x]
    bounds = [(-LARGEST_COORDINATE, LARGEST_COORDINATE)] * len(each)
    ends = [minimize(objective, x, jac=True, method="L-BFGS-B", bounds=bounds) for x in starts]
    found = min(ends, key=lambda end: end.fun)

    def curvature_at(x: np.ndarray) -> np.ndarray:
        steps = curvature_step * np.eye(len(each))
        change = np.array([objective(x + step)[1] - objective(x - step)[1] for step in steps])
        return (change + change.T) / (4 * curvature_step)

    x, value, curvature = found.x, float(found.fun), curvature_at(found.x)
    if polished:
        x, value = _polished(objective, found.x, curvature)
    values, axes = np.linalg.eigh(curvature)
    # The priors still have a curvature of about 1 where the mode is on the bound.
    covariance = (axes / np.where(values > LEAST_CURVATURE, values, 1.0)) @ axes.T
    return Mode(sites, x, value, covariance, curvature, shapes)


def _polished(
    objective: Callable[[np.ndarray], tuple[float, np.ndarray]], x: np.ndarray, curvature: np.ndarray
) -> tuple[np.ndarray, float]:
    """The end of Newton steps with one curvature; the start if it is not definite or the steps do not get shorter.

    L-BFGS stops where a step gains less than 2e-9 of the potential, which grows with the data: at 10⁷ transitions one
    posterior standard deviation from the mode.
    """
    here, (value, slope) = x, objective(x)
    if np.linalg.eigvalsh(curvature)[0] <= 0:
        return x, value
    last = math.inf
    for _ in range(NEWTON_STEPS):
        step = np.linalg.solve(curvature, slope)
        length = math.sqrt(slope @ step)
        if not length < last or (abs(here - step) > LARGEST_COORDINATE).any():
            break
        x, last = here, length
        if length < CLOSE:
            break
        here = here - step
        value, slope = objective(here)
    return x, objective(x)[0]


def _starts(sites: Sequence[str]) -> list[np.ndarray]:
    temperatures = np.array([site.rpartition(".")[2] == TAU0.name for site in sites])
    if not temperatures.any():
        return [np.zeros(len(sites))]
    return [log_tau0 * temperatures for log_tau0 in (-1.5, 0.0, 1.5)]


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
