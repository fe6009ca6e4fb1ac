"""The mode of a posterior: where a fast first look starts."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, PyTree
from numpyro import handlers
from numpyro.infer.util import potential_energy
from scipy.optimize import minimize

from sdeinfer.likelihood import Program

FARTHEST = 8.0
"""Bound on the unconstrained parameters, logit γ, log τ0, log(c₊ − c₋) and the mean of c±: their priors end before."""


class Mode(NamedTuple):
    """The mode of a posterior density in unconstrained parameters.

    Attributes:
        sites: names of the latent sites, all of them scalars.
        x: their unconstrained values, shape (sites,).
        potential: −log of the density there.
        sd: by the curvature there (Laplace), and at most 1; shape (sites,).
    """

    sites: tuple[str, ...]
    x: Float[np.ndarray, " sites"]
    potential: float
    sd: Float[np.ndarray, " sites"]


def posterior_mode(model: Program, prepared: PyTree, *, start: Mode | None = None) -> Mode:
    """Find the mode by L-BFGS on the gradient.

    Arguments:
        model: the NumPyro program, with its options given.
        prepared: its data, pooled.
        start: a mode of the same program, to start at. Where None, the best of three: the middle of the priors with
            log τ0 = −1.5, 0 and 1.5, since for large τ0 the likelihood is flat in it.
    """
    sites = latent_sites(model, prepared) if start is None else start.sites

    def objective(x: np.ndarray) -> tuple[float, np.ndarray]:
        value, slope = _potential_and_slope(model, prepared, sites, jnp.asarray(x))
        return float(value), np.asarray(slope, np.float64)

    starts = _starts(sites) if start is None else [start.x]
    bounds = [(-FARTHEST, FARTHEST)] * len(sites)
    ends = [minimize(objective, x, jac=True, method="L-BFGS-B", bounds=bounds) for x in starts]
    found = min(ends, key=lambda end: end.fun)
    steps = 1e-4 * np.eye(len(sites))
    curvature = np.array([objective(found.x + step)[1] - objective(found.x - step)[1] for step in steps]) / 2e-4
    values, axes = np.linalg.eigh((curvature + curvature.T) / 2)
    # Where the mode is flat, or on the bound, the priors still have a curvature of about 1.
    sd = np.sqrt((axes**2 / np.maximum(values, 1.0)).sum(axis=1))
    return Mode(sites, found.x, float(found.fun), sd)


def _starts(sites: tuple[str, ...]) -> list[np.ndarray]:
    if "tau0" not in sites:
        return [np.zeros(len(sites))]
    return [log_tau0 * (np.array(sites) == "tau0") for log_tau0 in (-1.5, 0.0, 1.5)]


def latent_sites(model: Program, prepared: PyTree) -> tuple[str, ...]:
    """The names of what a program samples and does not observe."""
    traces = []

    def run() -> None:
        traces.append(handlers.trace(handlers.seed(model, jr.key(0))).get_trace(prepared))

    jax.eval_shape(run)
    return tuple(name for name, site in traces[0].items() if site["type"] == "sample" and not site["is_observed"])


def potential(model: Program, prepared: PyTree, sites: tuple[str, ...], x: Float[Array, " sites"]) -> Float[Array, ""]:
    """−log of the posterior density at unconstrained parameters, up to a constant."""
    return jnp.asarray(potential_energy(model, (prepared,), {}, dict(zip(sites, x, strict=True))))


@eqx.filter_jit
def _potential_and_slope(
    model: Program, prepared: PyTree, sites: tuple[str, ...], x: Float[Array, " sites"]
) -> tuple[Array, Array]:
    return jax.value_and_grad(lambda x: potential(model, prepared, sites, x))(x)
