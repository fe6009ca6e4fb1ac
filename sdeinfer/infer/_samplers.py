"""Interface of samplers: `fit(..., sampler=NUTS(draws=500))` takes `NUTS`, `Metropolis` or a custom sampler.

A custom sampler subclasses `AbstractMarkovChain` and defines `start` and `step` of one chain.
Tests: `tests/diagnostics/test_arviz.py`.
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
from jaxtyping import Array, Int, PRNGKeyArray, PyTree

from sdeinfer._arguments import shown, whole_number
from sdeinfer._files import InputError
from sdeinfer.infer._chains import Draws, in_chunks, recorded
from sdeinfer.infer._densities import constrained, log_likelihoods
from sdeinfer.infer._posterior import Posterior
from sdeinfer.likelihood import AbstractModel
from sdeinfer.likelihood._model import LatentLayers

BAR_ITERATIONS = 250
"""Iterations between updates of the progress bar."""


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
    """A sampler defined by `start` and `step` of one chain, both traced by JAX."""

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
            ArviZ's names, such as `acceptance_rate`. `check` tests `diverging` and `energy`, and names what is missing.
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
        posterior = Posterior.of(model, jax.device_put(model.pool(prepared)))
        records = in_chunks(
            functools.partial(advance_compiled, self),
            posterior,
            self.starts(posterior, key),
            warmup=self.warmup,
            draws=self.draws,
            chunk=BAR_ITERATIONS,
            progress=progress,
        )
        return recorded_draws(posterior, prepared if each is None else each, records)

    def starts(self, posterior: Posterior, key: PRNGKeyArray) -> tuple[PyTree, ...]:
        """The initial states of all chains."""
        return tuple(_start(self, posterior, chain_key) for chain_key in jr.split(key, self.chains))

    def advance(self, posterior: Posterior, state: PyTree, steps: Int[Array | np.ndarray, ""]) -> tuple[PyTree, PyTree]:
        """Advance one chain by up to a chunk of iterations and record its draws."""

        def step(state: PyTree) -> tuple[PyTree, dict[str, dict[str, Array]]]:
            state, position, statistics = self.step(posterior, state)
            return state, {"position": position, "statistics": statistics}

        return recorded(step, state, steps, BAR_ITERATIONS)


def recorded_draws(posterior: Posterior, networks: PyTree, records: Mapping[str, Any]) -> Draws:
    """Sites, layers and densities at the kept positions."""
    z = posterior.unconstrained(records["position"], axes=2)
    values = constrained(posterior.model, posterior.prepared, z)
    observed = log_likelihoods(posterior.model, networks, values.sites, values.layers)
    return Draws(values.sites, values.layers, observed, values.log_prior, dict(records["statistics"]))


@eqx.filter_jit
def _start(sampler: AbstractMarkovChain, posterior: Posterior, key: PRNGKeyArray) -> PyTree:
    return sampler.start(posterior, key)


@functools.partial(jax.jit, static_argnums=0)
def advance_compiled(
    sampler: AbstractMarkovChain, posterior: Posterior, state: PyTree, steps: Array | np.ndarray
) -> Any:
    """`AbstractMarkovChain.advance`, compiled once per sampler, model and shape of its data."""
    return sampler.advance(posterior, state, steps)
