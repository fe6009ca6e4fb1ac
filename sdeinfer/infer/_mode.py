"""The mode of a posterior, its potential and its gradient."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

# NumPyro must be imported before its subpackages, see `sdeinfer.likelihood`.
import numpyro as numpyro
from jaxtyping import Array, Float, Key, PRNGKeyArray, PyTree
from numpyro.infer.util import potential_energy
from scipy.optimize import minimize

from sdeinfer._compiler import RUN_ONCE
from sdeinfer._progress import phase
from sdeinfer.infer._densities import HANDLERS, latent_structure
from sdeinfer.infer._latent import draw_latent, given_latent, log_prior, log_weights
from sdeinfer.likelihood import AbstractModel, EveryLayer, LatentLayers, PathStatistics, layer_of, no_adjustment
from sdeinfer.parameters import TAU0

LARGEST_COORDINATE = 8.0
"""Bound on |x| for the unconstrained parameters x, such as logit γ, log τ0, log(c₊ − c₋) and (c₊ + c₋)/2."""

NEWTON_STEPS, CLOSE = 8, 1e-3
"""Largest number of Newton steps, and the length in posterior standard deviations below which the mode is reached."""

SETS = 8
"""Number of draws of the innovations over which each bridge's likelihood is averaged. Given a single draw the latent
layers are fixed, and the mode is that of a much narrower posterior, anywhere in the support of the actual one."""

DIFFERENCES = {4: 1e-2, 8: 1e-5}
"""Step in the unconstrained parameters for finite differences, by the item size in bytes."""

LEAST_CURVATURE = 0.05
"""Least curvature of the priors: in their tails a log density may be straight, or convex."""

NO_DENSITY = 1e10
"""Finite substitute for an infinite potential, whose differences would not be finite."""


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
    prepared, dtype = jax.device_put(as_adjusted(model, prepared)), jnp.result_type(float)

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = potential_and_slope(model, prepared, by_site(sites, shapes, np.asarray(x, dtype)))
        return float(value), np.concatenate([np.ravel(slope[site]) for site in sites]).astype(np.float64)

    return _found(objective, sites, start, shapes=shapes)


def curvature_of_priors(
    model: AbstractModel, prepared: PathStatistics, mode: Mode
) -> Float[np.ndarray, "values values"]:
    """Hessian of −log prior density at a mode; eigenvalues below `LEAST_CURVATURE` are raised to it.

    Arguments:
        model: the model.
        prepared: pooled statistics of the model, with an adjustment or such that `as_adjusted` adds one.
        mode: a mode of the posterior.
    """
    prepared = as_adjusted(model, prepared)
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


def latent_mode(
    model: LatentLayers, prepared: PyTree, chosen: np.ndarray, *, start: Mode | None = None, key: PRNGKeyArray
) -> Mode:
    """The mode of a posterior with latent layers, whose likelihood is averaged over `SETS` draws of the innovations.

    Arguments:
        model: the model.
        prepared: data of the model.
        chosen: mask of the bridges in the likelihood, shape (bridges,).
        start: as in `posterior_mode`.
        key: PRNG key of the draws.
    """
    keys = jr.split(key, SETS)
    if start is None:
        sites = tuple(latent_structure(given_latent(model), prepared, draw_latent(model, prepared, key)))
    else:
        sites = start.sites

    def potential(x: np.ndarray) -> float:
        return float(_potential_of_chosen(model, prepared, keys, jnp.asarray(chosen), sites, jnp.asarray(x)))

    evaluations = itertools.count(1)

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        phase(f"searching for the mode, evaluation {next(evaluations)}")
        # An automatic gradient takes six times longer to evaluate and ten times longer to compile.
        slope = [potential(x + step) - potential(x - step) for step in difference * np.eye(len(x))]
        return potential(x), np.array(slope) / (2 * difference)

    difference = DIFFERENCES[jnp.asarray(1.0).dtype.itemsize]
    return _found(objective, sites, start, curvature_step=10 * difference, polished=False)


def _found(
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
    # Where the mode is on the bound, the priors still have a curvature of about 1.
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


def as_adjusted(model: AbstractModel, prepared: PyTree) -> PyTree:
    """Add the identity adjustment where one will follow, so that one program serves the mode before and after it."""
    if not isinstance(prepared, PathStatistics) or prepared.adjustment is not None:
        return prepared
    if prepared.assumptions.law == "limit" or not isinstance(model, EveryLayer):
        return prepared
    if not model.makes_layers:
        count, own = len(prepared.assumptions.kind.coordinates), False
    else:
        layer = layer_of(model, prepared)
        if layer is None:
            return prepared
        count, own = len(layer.coordinates), model.has_own_layers(prepared)
    return dataclasses.replace(prepared, adjustment=no_adjustment(count, len(prepared.widths) if own else None))


@partial(jax.jit, static_argnums=0)
def potential(model: AbstractModel, prepared: PyTree, z: dict[str, Array]) -> Float[Array, ""]:
    """−log posterior density at unconstrained parameters by site name, up to a constant.

    It is jitted so that it is traced once for all programs that call it.
    """
    with HANDLERS:
        return jnp.asarray(potential_energy(model, (prepared,), {}, z))


@partial(jax.jit, static_argnums=0, compiler_options=RUN_ONCE)
def potential_and_slope(model: AbstractModel, prepared: PyTree, z: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    """The potential and its gradient in the unconstrained parameters."""
    return _traced_once(model, prepared, z)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def sampled_potential(model: AbstractModel, prepared: PyTree, z: dict[str, Array]) -> Float[Array, ""]:
    """The potential for samplers, differentiable in z only; the gradient is that of `potential_and_slope`."""
    return potential(model, prepared, z)


def _pulled_back(model: AbstractModel, slope: dict[str, Array], change: Array) -> tuple[None, dict[str, Array]]:
    del model
    return None, {name: change * along for name, along in slope.items()}


def _traced_once(model: AbstractModel, prepared: PyTree, z: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    # Two threads compile the mode search and the sampler; the lock lets the second reuse the trace of the first.
    with HANDLERS:
        return _value_and_slope(model, prepared, z)


sampled_potential.defvjp(_traced_once, _pulled_back)


@partial(jax.jit, static_argnums=0)
def _value_and_slope(model: AbstractModel, prepared: PyTree, z: dict[str, Array]) -> tuple[Array, dict[str, Array]]:
    return jax.value_and_grad(lambda z: potential(model, prepared, z))(z)


@eqx.filter_jit
def _potential_of_chosen(
    model: LatentLayers,
    prepared: PyTree,
    keys: Key[Array, " sets"],
    chosen: Array,
    sites: tuple[str, ...],
    x: Float[Array, " sites"],
) -> Array:
    z = dict(zip(sites, x, strict=True))

    def weights(key: PRNGKeyArray) -> Array:
        weight = log_weights(model, prepared, z, draw_latent(model, prepared, key))
        return jnp.where(jnp.isnan(weight), -jnp.inf, weight)

    of_bridges = jax.nn.logsumexp(jax.lax.map(weights, keys), axis=0)
    prior = log_prior(model, prepared, z, draw_latent(model, prepared, keys[0]))
    density = prior + jnp.sum(jnp.where(chosen, of_bridges, 0.0))
    return jnp.where(jnp.isfinite(density), -density, NO_DENSITY)
