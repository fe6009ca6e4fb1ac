"""Moments of S of a branch by nodes, against plain sampling, the chain and networks with weights."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from helpers.block_references import packed_moments
from helpers.budget import assert_estimate
from helpers.cases import random_covariance
from helpers.internals import NetworkKeys, vech
from helpers.references import packed

from sdeinfer.blocks import AbstractBranch
from sdeinfer.networks import tokens_with_covariance

SCRAMBLINGS = 16
V3 = np.asarray(random_covariance(3))
WIDTH = 8


@eqx.filter_jit
def moments(branch, V, nodes, width):
    return branch.moments(V, nodes, width=width)


def scrambled(branch, V, *, width: int = WIDTH, log2: int = 12) -> tuple[np.ndarray, np.ndarray]:
    """Packed means and covariances of S, for several scramblings of the nodes."""
    of_seeds = [
        moments(branch, jnp.asarray(V), branch.nodes(len(V), width, log2=log2, seed=seed), width)
        for seed in range(SCRAMBLINGS)
    ]
    return np.stack([packed(S.mean) for S in of_seeds]), np.stack([S.covariance for S in of_seeds])


@eqx.filter_jit
def drawn(branch, V, numbers, key):
    S = branch.hidden_covariance(V, width=WIDTH, keys=NetworkKeys.numbered(key, numbers))
    return jnp.moveaxis(S[:, :, 0], -1, 0)


def by_chain(branch: AbstractBranch, draws: int, key, dtype=np.float64) -> np.ndarray:
    """Draws of S by the chain, for V3."""
    V = np.repeat(V3[:, :, None, None], draws, axis=-1).astype(dtype)
    return np.asarray(drawn(branch, V, np.arange(draws, dtype=np.uint32), key))


@eqx.filter_jit
def of_weights(branch, U, keys):
    h = jax.vmap(lambda key: branch.hidden(U, key=key))(keys)
    return h @ h.mT / h.shape[-1]


def by_weights(branch: AbstractBranch, draws: int, key) -> np.ndarray:
    """Draws of S of networks with weights, for tokens of the covariance V3."""
    key_tokens, key_weights = jr.split(key)
    U = tokens_with_covariance(jnp.asarray(V3), width=WIDTH, key=key_tokens)
    return np.asarray(of_weights(branch, U, jr.split(key_weights, draws)))


def samples(branch: AbstractBranch, draw: Callable, key, draws: int) -> list[np.ndarray]:
    """Draws of S by plain sampling, by the chain and of networks with weights."""
    key_chain, key_weights = jr.split(key)
    plain = draw(draws, np.random.default_rng(0))
    # Weights take longest: for them a quarter of the draws.
    return [plain, by_chain(branch, draws, key_chain), by_weights(branch, draws // 4, key_weights)]


def assert_moments_agree(branch: AbstractBranch, draw: Callable, key, *, draws: int) -> None:
    """Means and covariances by nodes are those of samples."""
    by_nodes = scrambled(branch, V3)
    for S in samples(branch, draw, key, draws):
        for (estimate, error), of_nodes in zip(packed_moments(S), by_nodes, strict=True):
            assert_by_sampling(estimate, error, of_nodes)


def assert_by_sampling(estimate: np.ndarray, error: np.ndarray, of_nodes: np.ndarray) -> None:
    """A sample's moment is the mean over scramblings, whose few values leave an error that counts little."""
    its_error = of_nodes.std(0, ddof=1) / np.sqrt(SCRAMBLINGS)
    assert its_error.max() < error.max() / 2
    assert_estimate(estimate, of_nodes.mean(0), np.hypot(error, its_error))


def assert_differentiable(branch: AbstractBranch) -> None:
    """Slopes of moments along a change of V and of the branch's parameter are differences."""
    nodes, change = branch.nodes(3, WIDTH, log2=6), np.random.default_rng(1).standard_normal((3, 3))

    def moved(h):
        S = branch.reshaped(1 + h).moments(V3 + h * (change + change.T) / 9, nodes, width=WIDTH)
        return jnp.concatenate([vech(S.mean), S.covariance.ravel()])

    h, along = 1e-5, jax.jit(lambda h: jax.jvp(moved, (h,), (1.0,)))
    (_, slope), (up, _), (down, _) = along(0.0), along(h), along(-h)
    # The error of a central difference is of order h² plus rounding over h.
    np.testing.assert_allclose(slope, (up - down) / (2 * h), rtol=1e-6, atol=1e-8)
