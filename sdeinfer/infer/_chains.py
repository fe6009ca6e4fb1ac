"""Chains of any sampler: in chunks, with progress and a checkpoint, and on several cores."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from sdeinfer._progress import ProgressBar, phase
from sdeinfer.infer._checkpoint import Checkpoint, Progress, fingerprint

type Advance = Callable[[Any, PyTree, Array], tuple[PyTree, dict[str, dict[str, Array]]]]
"""From a problem, the state and a number of iterations to the new state and what was drawn at each."""


class Draws(NamedTuple):
    """What a sampler returns; every array has leading axes (chain, draw).

    Attributes:
        samples: values of the latent and deterministic sites, but for latent layers.
        log_likelihood: of each observed site, one value per element of its batch. With latent layers, one value per
            network: log of an unbiased estimate.
        log_prior: of each parameter.
        statistics: of the sampler, under ArviZ's names.
    """

    samples: dict[str, Array]
    log_likelihood: dict[str, Array]
    log_prior: dict[str, Array]
    statistics: dict[str, Array]


def in_chunks(
    advance: Advance,
    problem: Any,
    start: PyTree,
    *,
    warmup: int,
    draws: int,
    chunk: int,
    progress: bool,
    checkpoint: Checkpoint | None,
    fingerprinted: PyTree,
) -> dict[str, dict[str, Any]]:
    """Run chains to their end, chunk by chunk.

    Arguments:
        advance: the sampler, with all chains in the leading axis of its state and of what it draws.
        problem: its first argument.
        start: the chains' initial state.
        warmup: iterations that are not kept.
        draws: iterations that are.
        chunk: most iterations at a time.
        progress: show a progress bar.
        checkpoint: where to keep what is done, after every chunk.
        fingerprinted: what the draws depend on beside these.

    Raises:
        InputError: where the checkpoint to go on from is that of another fit.
    """
    done, mark = Progress(0, start, ()), ""
    if checkpoint is not None:
        # The initial state holds a density: a model that was edited meanwhile has another.
        chains = len(jax.tree.leaves(start)[0])
        mark = fingerprint(fingerprinted, chains, draws, warmup, chunk, start)
        done = checkpoint.load(mark, start)
    with ProgressBar(total=warmup + draws, initial=done.iterations, desc="sampling", show=progress) as bar:
        while done.iterations < warmup + draws:
            keep = done.iterations >= warmup
            steps = min(chunk, (warmup + draws if keep else warmup) - done.iterations)
            state, drawn = advance(problem, done.state, jnp.asarray(steps))
            chunks = done.chunks
            if keep:
                chunks = (*chunks, jax.tree.map(lambda x, steps=steps: np.asarray(x[:, :steps]), drawn))
            done = Progress(done.iterations + steps, state, chunks)
            if checkpoint is not None:
                checkpoint.save(mark, done)
            bar.update(steps)
    phase("evaluating the draws")
    return done.draws


def recorded(
    step: Callable[[PyTree], tuple[PyTree, PyTree]], structure: PyTree, state: PyTree, steps: Array, chunk: int
) -> tuple[PyTree, PyTree]:
    """Iterate one chain, under `jax.jit`, and keep what each iteration draws.

    Arguments:
        step: from the state to the next one and what is drawn there.
        structure: shapes and types of what is drawn.
        state: the chain's.
        steps: how many iterations.
        chunk: the most that there may be, for which there is room.
    """

    def iterate(i: Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        state, drawn = carry
        state, here = step(state)
        return state, jax.tree.map(lambda all, one: all.at[i].set(one), drawn, here)

    blank = jax.tree.map(lambda leaf: jnp.zeros((chunk, *leaf.shape), leaf.dtype), structure)
    return jax.lax.fori_loop(0, steps, iterate, (state, blank))


def on_cores(advance_one: Any, problem: Any, state: PyTree) -> Advance:
    """All chains, by a sampler of one chain under `eqx.filter_jit`: as many at a time as there are cores.

    Arguments:
        advance_one: the sampler.
        problem: its first argument.
        state: of all chains.
    """
    one = jax.tree.map(lambda x: x[0], state)
    compiled = advance_one.lower(problem, one, jnp.asarray(1)).compile()
    chains, x64 = len(jax.tree.leaves(state)[0]), jax.config.jax_enable_x64

    def advance(problem: Any, state: PyTree, steps: Array) -> tuple[PyTree, dict[str, dict[str, Array]]]:
        def of_chain(chain: int) -> tuple[PyTree, dict[str, dict[str, Array]]]:
            # A thread does not inherit a precision that was chosen for a block of code.
            with jax.enable_x64(x64):
                return jax.block_until_ready(compiled(problem, jax.tree.map(lambda x: x[chain], state), steps))

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            done = list(pool.map(of_chain, range(chains)))
        return jax.tree.map(lambda *each: jnp.stack(each), *done)

    return advance
