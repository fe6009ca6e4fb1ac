"""Interface of samplers: `fit(..., sampler=NUTS(draws=500))` takes `NUTS`, `Metropolis` or a custom sampler.

A custom sampler subclasses `AbstractMarkovChain` and defines `start` and `step` of one chain.
"""

import abc
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from sdeinfer._arguments import shown, whole_number
from sdeinfer._compiler import BALANCED
from sdeinfer._files import InputError
from sdeinfer.infer._chains import Draws, in_chunks, recorded
from sdeinfer.infer._densities import constrained_sites, latent_structure, log_densities
from sdeinfer.infer._mode import sampled_potential
from sdeinfer.infer._whitening import Whitening, whitening_of
from sdeinfer.likelihood import AbstractModel, LatentLayers

CHUNK = 250
"""Iterations between updates of the progress bar."""


class Posterior(eqx.Module):
    """A posterior density of NumPyro's unconstrained parameters by site name, or of coordinates that whiten them.

    Attributes:
        model: the model; static.
        prepared: pooled data of the model; an argument of compiled functions.
        whitening: the coordinates; None for the unconstrained parameters themselves.
    """

    model: AbstractModel = eqx.field(static=True)
    prepared: PyTree
    whitening: Whitening | None = None

    def log_density(self, z: Mapping[str, Array]) -> Float[Array, ""]:
        """Log density up to a constant, differentiable in z."""
        return -self.potential(z)

    def potential(self, z: Mapping[str, Array]) -> Float[Array, ""]:
        """−log density up to a constant, differentiable in z."""
        return sampled_potential(self.model, self.prepared, self.unconstrained(z))

    def unconstrained(self, z: Mapping[str, Any], *, axes: int = 0) -> dict[str, Any]:
        """NumPyro's unconstrained parameters at z, see `Whitening.unconstrained`."""
        return dict(z) if self.whitening is None else self.whitening.unconstrained(z, axes=axes)

    def pulled_back(self, slope: Mapping[str, Any]) -> dict[str, Any]:
        """The derivatives in z of a function with these derivatives in the unconstrained parameters."""
        return dict(slope) if self.whitening is None else self.whitening.pulled_back(slope)

    def initial_position(self, key: PRNGKeyArray) -> dict[str, Array]:
        """A point uniform in the intervals of `AbstractModel.start_of`; its density is positive."""
        structure = latent_structure(self.model, self.prepared)
        keys = jr.split(key, len(structure))
        position = {}
        for own, (name, leaf) in zip(keys, structure.items(), strict=True):
            centre, half = self.model.start_of(name, self.prepared)
            position[name] = jr.uniform(own, leaf.shape, leaf.dtype, centre - half, centre + half)
        return position


@dataclasses.dataclass(frozen=True)
class AbstractSampler(abc.ABC):
    """A sampler of posteriors; hashable, since it is a static argument of compiled functions.

    Attributes:
        chains: number of chains.
        draws: kept draws of each chain.
        warmup: warmup iterations of each chain.
    """

    chains: int = dataclasses.field(default=4, compare=False)
    draws: int = dataclasses.field(default=1000, compare=False)
    warmup: int = 1000

    def __post_init__(self):
        for name, least in (("chains", 1), ("draws", 1), ("warmup", 0)):
            value = getattr(self, name)
            if not whole_number(value) or value < least:
                raise InputError(f"{name}: a whole number of at least {least} is needed, got {shown(value)}")

    @abc.abstractmethod
    def sample(
        self,
        model: AbstractModel,
        prepared: PyTree,
        *,
        each: PyTree | None = None,
        progress: bool = False,
        key: PRNGKeyArray,
    ) -> Draws:
        """Sample the posterior of a model.

        Arguments:
            model: the model.
            prepared: data prepared for the model; networks may be pooled.
            each: prepared data of networks whose log likelihoods are returned; `prepared` if None.
            progress: show a progress bar.
            key: PRNG key.

        Raises:
            InputError: for a model that the sampler does not support.
        """


@dataclasses.dataclass(frozen=True)
class AbstractMarkovChain(AbstractSampler):
    """A sampler defined by `start` and `step` of one chain, both traced by JAX.

    Iterations run in chunks, with a progress bar; chains run with one thread per core.
    """

    @abc.abstractmethod
    def start(self, posterior: Posterior, key: PRNGKeyArray) -> PyTree:
        """The initial state of one chain, any pytree of arrays; a sampler may adapt here or in its first steps."""

    @abc.abstractmethod
    def step(self, posterior: Posterior, state: PyTree) -> tuple[PyTree, dict[str, Array], dict[str, Array]]:
        """One iteration.

        Arguments:
            posterior: the posterior to sample.
            state: state of one chain.

        Returns:
            The new state; its position by site name, of which `posterior.log_density` is a function; and statistics by
            ArviZ's names, such as `diverging` and `acceptance_rate`.
        """

    def sample(
        self,
        model: AbstractModel,
        prepared: PyTree,
        *,
        each: PyTree | None = None,
        progress: bool = False,
        key: PRNGKeyArray,
    ) -> Draws:
        """Sample the posterior of a model without latent layers; see `AbstractSampler.sample`."""
        if isinstance(model, LatentLayers):
            raise InputError(f"sampler: {model.name} has latent layers, for which there is Metropolis only")
        pooled = jax.device_put(model.pool(prepared))
        posterior = Posterior(model, pooled, whitening_of(model, pooled))
        kept = in_chunks(
            _advance,
            (self, posterior),
            self.initial_states(posterior, key),
            warmup=self.warmup,
            draws=self.draws,
            chunk=CHUNK,
            progress=progress,
        )
        z = posterior.unconstrained(kept["unconstrained"], axes=2)
        return draws_of(model, prepared if each is None else each, pooled, kept | {"unconstrained": z})

    def initial_states(self, posterior: Posterior, key: PRNGKeyArray) -> tuple[PyTree, ...]:
        """The initial states of all chains."""
        keys = jr.split(key, self.chains)
        return tuple(_start((self, posterior), own) for own in keys)

    def advance(self, posterior: Posterior, state: PyTree, steps: Int[Array | np.ndarray, ""]) -> tuple[PyTree, PyTree]:
        """Advance one chain by up to a chunk of iterations and record its draws."""

        def step(state: PyTree) -> tuple[PyTree, dict[str, dict[str, Array]]]:
            state, position, statistics = self.step(posterior, state)
            return state, {"unconstrained": position, "statistics": statistics}

        structure = jax.eval_shape(lambda state: step(state)[1], state)
        return recorded(step, structure, state, steps, CHUNK)


def draws_of(model: AbstractModel, prepared: PyTree, pooled: PyTree, kept: Mapping[str, Any]) -> Draws:
    """Sites, layers and densities at draws of the unconstrained parameters."""
    sites, layers = constrained_sites(model, pooled, kept["unconstrained"])
    observed, prior = log_densities(model, prepared, sites)
    statistics = kept["statistics"]
    if "diverging" not in statistics:
        some = next(iter(kept["unconstrained"].values()))
        statistics = statistics | {"diverging": np.zeros(some.shape[:2], bool)}
    return Draws(sites, layers, observed, prior, statistics)


type _Problem = tuple[AbstractMarkovChain, Posterior]


@eqx.filter_jit
def _start(problem: _Problem, key: PRNGKeyArray) -> PyTree:
    sampler, posterior = problem
    return sampler.start(posterior, key)


def _advance(problem: _Problem, state: PyTree, steps: Array | np.ndarray) -> tuple[PyTree, PyTree]:
    sampler, posterior = problem
    return advance_compiled(sampler, posterior, state, steps)


@functools.partial(jax.jit, static_argnums=0, compiler_options=BALANCED)
def advance_compiled(
    sampler: AbstractMarkovChain, posterior: Posterior, state: PyTree, steps: Array | np.ndarray
) -> Any:
    """`AbstractMarkovChain.advance`, compiled once per sampler, model and shape of its data."""
    return sampler.advance(posterior, state, steps)
