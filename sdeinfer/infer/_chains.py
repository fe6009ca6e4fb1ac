"""Chains of any sampler: in chunks, with progress and a checkpoint, and on several cores."""

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from sdeinfer._progress import ProgressBar, phase
from sdeinfer.infer._checkpoint import Checkpoint, Progress, fingerprint

type Advance = Callable[[Any, PyTree, np.ndarray], tuple[PyTree, dict[str, dict[str, Array]]]]
"""From a problem, the state of one chain and a number of iterations to its new state and the draws of each."""


class Draws(NamedTuple):
    """What a sampler returns; every array has leading axes (chain, draw).

    Attributes:
        samples: values of the latent and deterministic sites, but for latent layers.
        layers: `Coordinates.unconstrained` of the layer, with an axis of (pooled) networks where each has its own.
        log_likelihood: of each observed site, one value per element of its batch. With latent layers, one value per
            network: log of an unbiased estimate.
        log_prior: of each parameter.
        statistics: of the sampler, under ArviZ's names.
    """

    samples: dict[str, np.ndarray]
    layers: Float[np.ndarray, "chains draws *networks coordinates"]
    log_likelihood: dict[str, np.ndarray]
    log_prior: dict[str, np.ndarray]
    statistics: dict[str, np.ndarray]


def in_chunks(
    advance: Advance,
    problem: Any,
    start: tuple[PyTree, ...],
    *,
    warmup: int,
    draws: int,
    chunk: int,
    progress: bool,
    checkpoint: Checkpoint | None,
    fingerprinted: PyTree,
) -> dict[str, dict[str, Any]]:
    """Run chains to their end, chunk by chunk, on as many threads as there are cores.

    One chain at a time is compiled, not all of them side by side: NUTS then needs a third of the compilation, and no
    chain waits for the longest trajectory of the others.

    Arguments:
        advance: the sampler of one chain, under `jax.jit`.
        problem: its first argument.
        start: the initial state of each chain.
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
        mark = fingerprint(fingerprinted, draws, warmup, chunk, start)
        done = checkpoint.load(mark, start)
    x64 = jax.config.jax_enable_x64

    def advance_chain(state: PyTree, steps: int) -> tuple[PyTree, dict[str, dict[str, Array]]]:
        # `jax.enable_x64` is thread-local.
        with jax.enable_x64(x64):
            return jax.block_until_ready(advance(problem, state, np.asarray(steps)))

    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        ProgressBar(total=warmup + draws, initial=done.iterations, desc="sampling", show=progress) as bar,
    ):
        if done.iterations < warmup + draws:
            # No iterations of one chain: threads that start together would each compile the same program.
            advance_chain(done.state[0], 0)
        while done.iterations < warmup + draws:
            keep = done.iterations >= warmup
            steps = min(chunk, (warmup + draws if keep else warmup) - done.iterations)
            states, drawn = zip(*pool.map(advance_chain, done.state, itertools.repeat(steps)), strict=True)
            chunks = done.chunks
            if keep:
                kept = jax.tree.map(
                    lambda *chains, steps=steps: np.stack([x[:steps] for x in map(np.asarray, chains)]), *drawn
                )
                chunks = (*chunks, kept)
            done = Progress(done.iterations + steps, states, chunks)
            if checkpoint is not None:
                checkpoint.save(mark, done)
            bar.update(steps)
    phase("evaluating the draws")
    return done.draws


def recorded(
    step: Callable[[PyTree], tuple[PyTree, PyTree]],
    structure: PyTree,
    state: PyTree,
    steps: Array | np.ndarray,
    chunk: int,
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
