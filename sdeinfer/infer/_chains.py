"""Run the chains of any sampler in chunks, on several cores, with a progress bar. Tests: `tests/infer/test_fit.py`."""

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
from sdeinfer._threads import as_in_this_thread

type Advance = Callable[[Any, PyTree, np.ndarray], tuple[PyTree, dict[str, dict[str, Array]]]]
"""Function from a problem, the state of one chain and a number of iterations to the new state and the draws."""


class Draws(NamedTuple):
    """Result of a sampler; every array has leading axes (chain, draw).

    Attributes:
        samples: values of the latent and deterministic sites, without latent layers.
        layers: `Coordinates.unconstrained` of the layer, with an axis of (pooled) networks if each has its own layer;
            None for a program without a `CovariancePath`.
        log_likelihood: log likelihood of each observed site, one value per batch element. With latent layers, one value
            per network: the log of an unbiased estimate of the likelihood.
        log_prior: log prior density of each parameter.
        statistics: sample statistics by ArviZ's names.
    """

    samples: dict[str, np.ndarray]
    layers: Float[np.ndarray, "chains draws *networks coordinates"] | None
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
) -> dict[str, dict[str, Any]]:
    """Run chains from their initial states to completion, chunk by chunk, with one thread per core.

    The compiled function `advance` advances one chain instead of a batch of chains: NUTS then compiles in a third of
    the time, and no chain waits for the longest trajectory of the others.
    """

    @as_in_this_thread
    def advance_chain(state: PyTree, steps: int) -> tuple[PyTree, dict[str, dict[str, Array]]]:
        return jax.block_until_ready(advance(problem, state, np.asarray(steps)))

    states, records, done = start, [], 0
    with (
        ThreadPoolExecutor(os.cpu_count()) as pool,
        ProgressBar(total=warmup + draws, desc="sampling", show=progress) as bar,
    ):
        # Compile by 0 iterations of one chain; otherwise each thread would compile the same program.
        advance_chain(states[0], 0)
        while done < warmup + draws:
            steps = min(chunk, (warmup + draws if done >= warmup else warmup) - done)
            states, drawn = zip(*pool.map(advance_chain, states, itertools.repeat(steps)), strict=True)
            if done >= warmup:
                records.append(
                    jax.tree.map(lambda *chains, n=steps: np.stack([x[:n] for x in map(np.asarray, chains)]), *drawn)
                )
            done += steps
            bar.update(steps)
    phase("evaluating the draws")
    return jax.tree.map(lambda *parts: np.concatenate(parts, axis=1), *records)


def recorded(
    step: Callable[[PyTree], tuple[PyTree, PyTree]], state: PyTree, steps: Array | np.ndarray, chunk: int
) -> tuple[PyTree, PyTree]:
    """Iterate one chain, under `jax.jit`, by a function from a state to the next one and a draw.

    The draws are recorded in arrays of the length of a chunk, which is the largest number of steps.
    """

    def iterate(i: Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
        state, drawn = carry
        state, draw = step(state)
        return state, jax.tree.map(lambda array, value: array.at[i].set(value), drawn, draw)

    structure = jax.eval_shape(lambda state: step(state)[1], state)
    blank = jax.tree.map(lambda leaf: jnp.zeros((chunk, *leaf.shape), leaf.dtype), structure)
    return jax.lax.fori_loop(0, steps, iterate, (state, blank))
