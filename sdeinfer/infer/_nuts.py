"""NumPyro's NUTS, compiled once a process for each model, number of chains, length of warmup and shape of its data.

`numpyro.infer.MCMC` compiles anew for every object and every data set. Here the data are an argument of the compiled
functions, chains are vectorised, and iterations run in chunks between which the host may show progress.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree
from numpyro import handlers
from numpyro.infer import NUTS
from tqdm import tqdm

from sdeinfer.likelihood import Program

CHUNK = 250
"""Iterations between two looks at the progress."""


class Draws(NamedTuple):
    """What a sampler returns; every array has leading axes (chain, draw).

    Attributes:
        samples: values of the latent and deterministic sites.
        log_likelihood: of each observed site, one value per element of its batch.
        log_prior: of each latent site.
        statistics: of the sampler, under ArviZ's names.
    """

    samples: dict[str, Array]
    log_likelihood: dict[str, Array]
    log_prior: dict[str, Array]
    statistics: dict[str, Array]


def nuts(
    model: Program,
    prepared: PyTree,
    *,
    architecture: str,
    chains: int,
    draws: int,
    warmup: int,
    progress: bool = False,
    key: PRNGKeyArray,
) -> Draws:
    """Sample the posterior of a model by NUTS with a dense mass matrix.

    Arguments:
        model: the NumPyro program.
        prepared: its data, prepared by the program.
        architecture: passed on to the model.
        chains: how many chains, vectorised.
        draws: kept draws of each chain.
        warmup: iterations of adaptation before them.
        progress: show a progress bar.
        key: where the randomness comes from.
    """
    problem = Problem(model, architecture, warmup, prepared)
    state = _start(problem, jr.split(key, chains))
    chunks = []
    with tqdm(total=warmup + draws, desc="NUTS", disable=not progress, delay=2) as bar:
        for keep, iterations in ((False, warmup), (True, draws)):
            for done in range(0, iterations, CHUNK):
                steps = min(CHUNK, iterations - done)
                state, chunk = _advance(problem, state, jnp.asarray(steps))
                if keep:
                    chunks.append(jax.tree.map(lambda x, steps=steps: np.asarray(x[:, :steps]), chunk))
                bar.update(steps)
    return jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *chunks)


class Problem(eqx.Module):
    """A posterior to sample: what is static is compiled in, the prepared data are an argument.

    Attributes:
        model: the NumPyro program.
        architecture: passed on to the model.
        warmup: iterations of adaptation.
        prepared: the model's data.
    """

    model: Program = eqx.field(static=True)
    architecture: str = eqx.field(static=True)
    warmup: int = eqx.field(static=True)
    prepared: PyTree

    def bind(self, key: PRNGKeyArray, z: dict[str, Array] | None = None) -> tuple[NUTS, Any]:
        """The kernel, bound to this model, and the state of one chain at the unconstrained parameters z.

        NumPyro's kernels are bound by their `init`, so every trace has to call it; what is not used of its result, the
        compiler drops.
        """
        kernel = NUTS(self.model, dense_mass=True)
        return kernel, kernel.init(key, self.warmup, z, (self.prepared,), {"architecture": self.architecture})

    def start(self, key: PRNGKeyArray) -> Any:
        """Initial state of one chain, uniform in (−2, 2) in each unconstrained parameter.

        So starts NumPyro's own `init_to_uniform`; drawing here spares the compilation of its search for a start of
        finite density, since these models have one everywhere.
        """
        structure = jax.eval_shape(lambda: self.bind(key)[1].z)
        leaves, tree = jax.tree.flatten(structure)
        key, *keys = jr.split(key, len(leaves) + 1)
        uniform = [jr.uniform(k, leaf.shape, leaf.dtype, -2, 2) for k, leaf in zip(keys, leaves, strict=True)]
        return self.bind(key, jax.tree.unflatten(tree, uniform))[1]

    def advance(self, state: Any, steps: Array) -> tuple[Any, Draws]:
        """Advance one chain by up to CHUNK iterations and record each."""
        kernel, _ = self.bind(state.rng_key)
        arguments = (self.prepared,), {"architecture": self.architecture}
        constrain = kernel.postprocess_fn(*arguments)

        def record(state):
            return self.evaluate(constrain(state.z), state)

        def iterate(i, carry):
            state, draws = carry
            state = kernel.sample(state, *arguments)
            return state, jax.tree.map(lambda all, one: all.at[i].set(one), draws, record(state))

        structure = jax.eval_shape(record, state)
        blank = jax.tree.map(lambda leaf: jnp.zeros((CHUNK, *leaf.shape), leaf.dtype), structure)
        return jax.lax.fori_loop(0, steps, iterate, (state, blank))

    def evaluate(self, sites: dict[str, Array], state: Any) -> Draws:
        """Look at the model at one draw: every site, its density, and the sampler's statistics."""
        model = handlers.substitute(handlers.seed(self.model, jr.key(0)), sites)
        trace = handlers.trace(model).get_trace(self.prepared, architecture=self.architecture)
        stochastic = {name: site for name, site in trace.items() if site["type"] == "sample"}
        density = {name: site["fn"].log_prob(site["value"]) for name, site in stochastic.items()}
        return Draws(
            samples=sites,
            log_likelihood={name: density[name] for name, site in stochastic.items() if site["is_observed"]},
            log_prior={name: density[name] for name, site in stochastic.items() if not site["is_observed"]},
            statistics={
                "lp": -state.potential_energy,
                "energy": state.energy,
                "diverging": state.diverging,
                "n_steps": state.num_steps,
                "acceptance_rate": state.accept_prob,
                "step_size": state.adapt_state.step_size,
            },
        )


@eqx.filter_jit
def _start(problem: Problem, keys: PRNGKeyArray) -> Any:
    return jax.vmap(problem.start)(keys)


@eqx.filter_jit
def _advance(problem: Problem, state: Any, steps: Array) -> tuple[Any, Draws]:
    return jax.vmap(lambda state: problem.advance(state, steps))(state)
