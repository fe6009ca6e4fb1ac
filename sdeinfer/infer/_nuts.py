"""NumPyro's NUTS, compiled once a process for each model, length of warmup and shape of its pooled data.

`numpyro.infer.MCMC` compiles anew for every object and every data set. Here the data are an argument of the compiled
function, and iterations run in chunks (see `_chains`). The sampler sees the pooled data, whose size does not grow with
the number of networks; each network's own likelihood is computed for the kept draws, afterwards.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, PRNGKeyArray, PyTree
from numpyro.infer import NUTS
from numpyro.infer.util import ParamInfo

from sdeinfer._compiler import BALANCED
from sdeinfer.infer._chains import Draws, in_chunks, recorded
from sdeinfer.infer._checkpoint import Checkpoint
from sdeinfer.infer._densities import constrained_sites, latent_structure, log_densities
from sdeinfer.infer._mode import as_adjusted, potential_and_slope, sampled_potential
from sdeinfer.likelihood import Program, blank_statistics

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
        chains: how many chains, each on a core of its own while there are any.
        draws: kept draws of each chain.
        warmup: iterations of adaptation before them.
        progress: show a progress bar.
        checkpoint: where to keep what is done, after every chunk; the caller removes it.
        key: where the randomness comes from.

    Raises:
        InputError: where the checkpoint to go on from is that of another fit.
    """
    pooled = jax.device_put(model.pool(prepared))
    problem = Problem(model, warmup, CHUNK, pooled)
    kept = in_chunks(
        _advance,
        problem,
        _initial_states(problem, key, chains),
        warmup=warmup,
        draws=draws,
        chunk=CHUNK,
        progress=progress,
        checkpoint=checkpoint,
        fingerprinted=(pooled, model.options, model.acceptance),
    )
    samples = constrained_sites(model, pooled, kept["unconstrained"])
    return Draws(samples, *log_densities(model, prepared, samples), kept["statistics"])


@functools.cache
def compile_nuts(model: Program, *, tokens: int, widths: int, causal: bool, warmup: int, x64: bool) -> None:
    """Compile, on blank data and once a process, the programs that sample full paths and evaluate the draws.

    `fit` calls it in a thread, while the data are prepared. If the data need another number of nodes, those programs
    are compiled again.
    """
    # `jax.enable_x64` is thread-local.
    with jax.enable_x64(x64):
        blank = as_adjusted(model, blank_statistics(tokens, widths, causal=causal))
        problem = Problem(model, warmup, CHUNK, blank)
        zero = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in latent_structure(model, blank).items()}
        start = ParamInfo(zero, np.zeros((), jnp.result_type(float)), zero)
        (state,) = problem.initial_states([np.zeros(4, np.uint32)], [start])
        jax.block_until_ready(_advance(problem, state, np.asarray(0)))
        sites = constrained_sites(model, blank, {name: value[None, None] for name, value in zero.items()})
        log_densities(model, blank, sites)


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

    def bind(self, key: Array | np.ndarray, start: ParamInfo) -> tuple[NUTS, Any]:
        """The kernel, bound to this posterior, and the state of a chain at `start`.

        NumPyro's kernels are bound by their `init`, so every trace has to call it. With the potential and its slope
        given, `init` computes neither.
        """
        kernel = NUTS(
            potential_fn=functools.partial(sampled_potential, self.model, self.prepared),
            dense_mass=True,
            target_accept_prob=self.model.acceptance,
        )
        return kernel, kernel.init(key, self.warmup, start)

    def initial_states(self, keys: Sequence[np.ndarray], starts: Sequence[ParamInfo]) -> tuple[Any, ...]:
        """What `bind` returns for each of these keys and starts, but for its random numbers, without compiling it.

        Nearly all of it is zero; momentum and energy are those of a draw, which the first iteration makes anew.
        """
        structure = jax.eval_shape(lambda key, start: self.bind(key, start)[1], keys[0][:2], starts[0])
        blank = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), structure)
        identity = jax.tree.map(lambda mass: np.eye(len(mass), dtype=mass.dtype), blank.adapt_state.inverse_mass_matrix)
        masses = ("inverse_mass_matrix", "mass_matrix_sqrt", "mass_matrix_sqrt_inv")
        *averages, centre = blank.adapt_state.ss_state
        adapt = blank.adapt_state._replace(
            step_size=np.ones_like(centre),
            ss_state=(*averages, centre + math.log(10)),
            **dict.fromkeys(masses, identity),
        )
        # Two halves of a key's words: one for the chain, one for its adaptation.
        return tuple(
            blank._replace(rng_key=key[:2], adapt_state=adapt._replace(rng_key=key[2:]), **start._asdict())
            for key, start in zip(keys, starts, strict=True)
        )

    def advance(self, state: Any, steps: Array) -> tuple[Any, dict[str, dict[str, Array]]]:
        """Advance one chain by up to a chunk of iterations; its draws and the sampler's statistics at each."""
        kernel, _ = self.bind(state.rng_key, ParamInfo(state.z, state.potential_energy, state.z_grad))

        def step(state):
            state = kernel.sample(state, (), {})
            return state, _drawn(state)

        return recorded(step, jax.eval_shape(_drawn, state), state, steps, self.chunk)


def _drawn(state: Any) -> dict[str, dict[str, Array]]:
    return {
        "unconstrained": state.z,
        "statistics": {
            "lp": -state.potential_energy,
            "energy": state.energy,
            "diverging": state.diverging,
            "n_steps": state.num_steps,
            "acceptance_rate": state.accept_prob,
            "step_size": state.adapt_state.step_size,
        },
    }


def _initial_states(problem: Problem, key: PRNGKeyArray, chains: int) -> tuple[Any, ...]:
    """Chains that start uniform in (−2, 2) in each unconstrained parameter, as NumPyro's do.

    NumPyro searches for a start of finite density; these models have one everywhere.
    """
    words, structure = np.asarray(jr.key_data(key)).ravel(), latent_structure(problem.model, problem.prepared)
    keys, starts = [], []
    for chain in range(chains):
        random = np.random.default_rng([chain, *words])
        z = {name: random.uniform(-2, 2, leaf.shape).astype(leaf.dtype) for name, leaf in structure.items()}
        starts.append(ParamInfo(z, *potential_and_slope(problem.model, problem.prepared, z)))
        keys.append(random.integers(2**32, size=4, dtype=np.uint32))
    return problem.initial_states(keys, starts)


@functools.partial(jax.jit, compiler_options=BALANCED)
def _advance(problem: Problem, state: Any, steps: Array) -> tuple[Any, dict[str, dict[str, Array]]]:
    return problem.advance(state, steps)
