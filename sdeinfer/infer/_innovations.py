"""One-step innovations: standardised residuals of the increments of one layer."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from sdeinfer._compiler import RUN_ONCE
from sdeinfer.layers import AbstractLayer, FiniteWidth
from sdeinfer.likelihood._statistics import repeated_widths
from sdeinfer.likelihood._terms import Moments, Terms, at_least_a_quarter, moments_of
from sdeinfer.likelihood._transitions import Path


class LawAt(NamedTuple):
    """The law of one layer at some parameters.

    Attributes:
        u: unconstrained parameters.
        widths: the distinct widths, ascending.
        moments: moments at each width.
        slopes: derivatives of the moments, with a last axis of unconstrained parameters.
    """

    u: np.ndarray
    widths: np.ndarray
    moments: Moments
    slopes: Moments


class Innovations(NamedTuple):
    """Innovations of some transitions.

    Attributes:
        transitions: indices of the transitions in the path.
        terms: terms of the transitions.
        y: the innovations, standard normal to first order; shape (transitions, p).
        sd: standard deviation of each increment, shape (transitions, p).
        mean: derivatives of each mean, divided by `sd`; shape (transitions, p, parameters).
        log_variance: derivatives of each log variance, shape (transitions, p, parameters).
    """

    transitions: np.ndarray
    terms: Terms
    y: np.ndarray
    sd: np.ndarray
    mean: np.ndarray
    log_variance: np.ndarray

    @property
    def score(self) -> np.ndarray:
        """Score of independent normals, shape (transitions, parameters)."""
        of_mean = np.einsum("tp,tpk->tk", self.y, self.mean)
        return of_mean + np.einsum("tp,tpk->tk", self.y**2 - 1, self.log_variance) / 2

    @property
    def information_of_each(self) -> np.ndarray:
        """Fisher information of independent normals by transition, shape (transitions, parameters, parameters)."""
        of_mean = np.einsum("tpk,tpl->tkl", self.mean, self.mean)
        return of_mean + np.einsum("tpk,tpl->tkl", self.log_variance, self.log_variance) / 2

    @property
    def information(self) -> np.ndarray:
        """Fisher information of all transitions, shape (parameters, parameters)."""
        mean, log_variance = (x.reshape(-1, x.shape[-1]) for x in (self.mean, self.log_variance))
        return mean.T @ mean + log_variance.T @ log_variance / 2


def law_at(
    architecture: AbstractLayer,
    u: Float[Array | np.ndarray, " parameters"],
    *,
    widths: np.ndarray,
    law: str = "finite-width",
) -> LawAt:
    """The law at unconstrained parameters, in float64.

    Arguments:
        architecture: the kind of layer.
        u: `Coordinates.unconstrained` of the layer.
        widths: the distinct widths n.
        law: "finite-width" or "limit".
    """
    widths, dtype = np.asarray(widths), jnp.result_type(float)
    found = _moments_and_slopes(architecture, law, np.asarray(u, dtype), np.asarray(repeated_widths(widths), dtype))
    moments, slopes = jax.tree.map(lambda x: np.asarray(x, np.float64), found)
    return LawAt(np.asarray(u, np.float64), np.asarray(widths), moments, slopes)


def innovations(path: Path, law: LawAt) -> Iterator[Innovations]:
    """Iterate over the innovations of a path under a law, block by block."""
    return path.over_blocks(lambda block: innovations_of(path, block, path.terms(block), law))


class Scores(NamedTuple):
    """Sums over transitions by the law of independent normals.

    Attributes:
        density: log density, up to a constant.
        score: its gradient, shape (parameters,).
        information: Fisher information, shape (parameters, parameters).
    """

    density: float
    score: np.ndarray
    information: np.ndarray


def scores_of(path: Path, law: LawAt) -> Scores:
    """The log density of a path, its score and its information."""
    density, score, information = 0.0, np.zeros_like(law.u), np.zeros((len(law.u), len(law.u)))
    for here in innovations(path, law):
        density -= np.sum(here.y**2 / 2 + np.log(here.sd))
        score, information = score + here.score.sum(axis=0), information + here.information
    return Scores(float(density), score, information)


def innovations_of(path: Path, block: np.ndarray, terms: Terms, law: LawAt) -> Innovations:
    """The innovations of some transitions of a path, from their indices and terms."""
    # Networks of one width share one row of moments.
    width = path.width_index(law.widths, block) if len(law.widths) > 1 else np.zeros(1, int)
    here, along = law.moments.at(width), law.slopes.at(width)
    mean, variance = mean_and_variance(terms, here)
    sd = np.sqrt(variance)
    own = terms.variance.swapaxes(-1, -2)
    of_mean = terms.drift.swapaxes(-1, -2) @ along.drift
    of_mixing = along.mixing + own @ along.variance_mixing
    of_variance = along.noise + own @ along.variance + of_mixing * terms.mixing[..., None]
    y = np.asarray(terms.increments - mean) / sd
    return Innovations(block, terms, y, sd, of_mean / sd[..., None], of_variance / variance[..., None])


def mean_and_variance(terms: Terms, moments: Moments) -> tuple[np.ndarray, np.ndarray]:
    """Mean and variance of each increment, shape (transitions, p); moments with a leading axis of the transitions."""
    common = moments.common_variance(terms.mixing)
    change = moments.own_variance(terms.mixing, terms.variance) / common
    return np.asarray(moments.mean(terms)), common * at_least_a_quarter(change)


@partial(jax.jit, static_argnums=(0, 1), compiler_options=RUN_ONCE)
def _moments_and_slopes(
    architecture: AbstractLayer, law: str, u: Float[Array, " parameters"], widths: Array
) -> tuple[Moments, Moments]:
    def moments(u: Float[Array, " parameters"]) -> Moments:
        layer = architecture.with_coordinates(u)

        def at(width: Array) -> Moments:
            own = layer.finite_width(width) if law == "finite-width" else FiniteWidth.of_limit(layer.limit())
            return moments_of(own)

        return jax.vmap(at)(widths)

    along = jax.vmap(lambda direction: jax.jvp(moments, (u,), (direction,)), out_axes=(None, -1))
    return along(jnp.eye(len(u), dtype=u.dtype))
