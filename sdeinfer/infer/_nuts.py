"""NumPyro's NUTS, compiled once a process for each model, number of chains, length of warmup and shape of its data.

`numpyro.infer.MCMC` compiles anew for every object and every data set. Here the data are an argument of the compiled
functions, chains are vectorised, and iterations run in chunks (see `_chains`). The sampler sees the pooled data, whose
size does not grow with the number of networks; each network's own likelihood is computed for the kept draws,
afterwards.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree
from numpyro import handlers
from numpyro.infer import NUTS

from sdeinfer.infer._chains import Draws, in_chunks, recorded
from sdeinfer.infer._checkpoint import Checkpoint
from sdeinfer.likelihood import Program

CHUNK = 250
"""Iterations between two looks at the progress."""


def nuts(
    model: Program,
    prepared: PyTree,
    *,
    chains: int,
    draws: int,
    warmup: int,
    progress: bool = False,
    checkpoint: Checkpoint | None = None,
    key: PRNGKeyArray,
) -> Draws:
    """Sample the posterior of a model by NUTS with a dense mass matrix.

    Arguments:
        model: the NumPyro program, with its options given.
        prepared: its data, prepared by the program.
        chains: how many chains, vectorised.
        draws: kept draws of each chain.
        warmup: iterations of adaptation before them.
        progress: show a progress bar.
        checkpoint: where to keep what is done, after every chunk; the caller removes it.
        key: where the randomness comes from.

    Raises:
        InputError: where the checkpoint to go on from is that of another fit.
    """
    problem = Problem(model, warmup, CHUNK, model.pool(prepared))
    kept = in_chunks(
        _advance,
        problem,
        _start(problem, jr.split(key, chains)),
        warmup=warmup,
        draws=draws,
        chunk=CHUNK,
        progress=progress,
        checkpoint=checkpoint,
        fingerprinted=(problem.prepared, model.options, model.acceptance),
    )
    log_likelihood, log_prior = jax.tree.map(np.asarray, log_densities(model, prepared, kept["samples"]))
    return Draws(kept["samples"], log_likelihood, log_prior, kept["statistics"])


class Problem(eqx.Module):
    """A posterior to sample: what is static is compiled in, the prepared data are an argument.

    Attributes:
        model: the NumPyro program, with its options given.
        warmup: iterations of adaptation.
        chunk: most iterations between two looks at the progress.
        prepared: the model's data.
    """

    model: Program = eqx.field(static=True)
    warmup: int = eqx.field(static=True)
    chunk: int = eqx.field(static=True)
    prepared: PyTree

    def bind(self, key: PRNGKeyArray, z: dict[str, Array] | None = None) -> tuple[NUTS, Any]:
        """The kernel, bound to this model, and the state of one chain at the unconstrained parameters z.

        NumPyro's kernels are bound by their `init`, so every trace has to call it; what is not used of its result, the
        compiler drops.
        """
        kernel = NUTS(self.model, dense_mass=True, target_accept_prob=self.model.acceptance)
        return kernel, kernel.init(key, self.warmup, z, (self.prepared,), {})

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

    def advance(self, state: Any, steps: Array) -> tuple[Any, dict[str, dict[str, Array]]]:
        """Advance one chain by up to a chunk of iterations; the sites and the sampler's statistics at each."""
        kernel, _ = self.bind(state.rng_key)
        constrain = kernel.postprocess_fn((self.prepared,), {})

        def drawn(state):
            return {"samples": constrain(state.z), "statistics": _statistics(state)}

        def step(state):
            state = kernel.sample(state, (self.prepared,), {})
            return state, drawn(state)

        return recorded(step, jax.eval_shape(drawn, state), state, steps, self.chunk)


def _statistics(state: Any) -> dict[str, Array]:
    return {
        "lp": -state.potential_energy,
        "energy": state.energy,
        "diverging": state.diverging,
        "n_steps": state.num_steps,
        "acceptance_rate": state.accept_prob,
        "step_size": state.adapt_state.step_size,
    }


@eqx.filter_jit
def log_densities(
    model: Program, prepared: PyTree, samples: dict[str, Array]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """Log densities of the observed and of the latent sites at every draw."""

    def evaluate(sites: dict[str, Array]) -> tuple[dict[str, Array], dict[str, Array]]:
        seeded = handlers.substitute(handlers.seed(model, jr.key(0)), sites)
        trace = handlers.trace(seeded).get_trace(prepared)
        stochastic = {name: site for name, site in trace.items() if site["type"] == "sample"}
        density = {name: site["fn"].log_prob(site["value"]) for name, site in stochastic.items()}
        observed = {name for name, site in stochastic.items() if site["is_observed"]}
        return (
            {name: value for name, value in density.items() if name in observed},
            {name: value for name, value in density.items() if name not in observed},
        )

    shape = next(iter(samples.values())).shape[:2]
    flat = jax.tree.map(lambda x: jnp.reshape(x, (-1, *x.shape[2:])), samples)
    densities = jax.lax.map(evaluate, flat, batch_size=CHUNK)
    return jax.tree.map(lambda x: jnp.reshape(x, (*shape, *x.shape[1:])), densities)


@eqx.filter_jit
def _start(problem: Problem, keys: PRNGKeyArray) -> Any:
    return jax.vmap(problem.start)(keys)


@eqx.filter_jit
def _advance(problem: Problem, state: Any, steps: Array) -> tuple[Any, dict[str, dict[str, Array]]]:
    return jax.vmap(lambda state: problem.advance(state, steps))(state)
