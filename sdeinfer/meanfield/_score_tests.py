"""Score tests of a fitted law of tokens: in which ways the observed ones leave it.

The law says that a token is x = N(m + σξ), given the layers before. Then e = σ ∂log p(x)/∂m has mean zero whatever the
noise, and is uncorrelated between tokens and layers. A direction in which networks may leave the law, m → m + δ g, has
the score ⟨e, g⟩/σ at δ = 0, summed over tokens and layers. The square of this sum over its variance is χ², after the
scores of the fitted β, step and noise are projected out (Lagrange multiplier test). Variances are those of tokens that
are simulated from the law, given the observed layers before: the sums of squares of the observed ones reject too often,
since scores of the noise have long tails. Tests: `tests/meanfield/test_program.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import xarray as xr
from jaxtyping import Array, Float
from scipy import stats

from sdeinfer.meanfield._projected_normal import ProjectedNormal

SIMULATED_TOKENS = 50_000
"""Least number of simulated tokens: the variances of scores then have an error of about 1 %."""

CAUSES = {
    "pull": "tokens move by another step or β than the fitted ones, as a negative step, by which they repel each other",
    "values": "the value matrix is not the identity, or not the fitted one",
    "linear": "tokens also move by themselves, as by an MLP or a bias",
    "depth": "layers differ: the step changes with depth",
    "common": "tokens of a layer have common noise, as by random values",
}
"""The directions, and what a network does that leaves the law in each."""


def score_tests(law: Any, tokens: Float[Array, "networks layers n D"], sds: Mapping[str, float]) -> xr.Dataset:
    """Tests of `NoisyLayers`, at the posterior mean of their parameters, in the directions of `CAUSES`.

    Arguments:
        law: the law.
        tokens: the observed tokens after the first layer.
        sds: posterior standard deviations of the logarithms of beta, step and noise that are not fixed.

    Returns:
        For each `direction` its `effect`, the root mean square of the misfit in standard deviations of the noise (of
        common noise, of its scores); `statistic` and `dof` of χ², `p`, the largest `move` of a parameter by the misfit
        in posterior sds, `of_noise`, whether a misfit of the means shows in it as well, and `cause`.
    """
    mean, slopes, attended, pulls = (np.asarray(x) for x in _of_layers(law, tokens))
    points = np.asarray(law.before(tokens))

    def scores_of(x: Array) -> dict[str, Float[np.ndarray, "units scores"]]:
        e, of_noise = (np.asarray(x) for x in _innovations(x, mean, law.noise))
        of_fitted = np.concatenate([np.einsum("...d,...dk->...k", e, slopes) / law.noise, of_noise[..., None]], -1)
        return _directions(e, of_fitted, points, attended, pulls)

    second: dict[str, np.ndarray] = {}
    repeats = math.ceil(SIMULATED_TOKENS / mean[..., 0].size)
    for key in jr.split(jr.key(0), repeats):
        for name, scores in scores_of(ProjectedNormal(mean, law.noise).sample(key)).items():
            second[name] = second.get(name, 0.0) + scores.T @ scores / repeats
    fitted = [sds.get(name) for name in ("beta", "step", "noise")]
    rows = [
        _tested(scores, second[name], [] if name in ("pull", "common") else fitted, components=mean.shape[-1] - 1)
        for name, scores in scores_of(tokens).items()
    ]
    # The pull moves the step and β themselves, by as many posterior sds as its score has.
    rows[0]["move"] = math.sqrt(rows[0]["statistic"])
    columns: dict[str, Any] = {name: ("direction", [row[name] for row in rows]) for name in rows[0]}
    columns["of_noise"] = "direction", [name == "common" for name in CAUSES]
    columns["cause"] = "direction", [*CAUSES.values()]
    return xr.Dataset(columns, {"direction": list(CAUSES)})


@eqx.filter_jit
def _of_layers(law: Any, tokens: Float[Array, "networks layers n D"]) -> tuple[Array, Array, Array, Array]:
    """Means; their slopes by log β and log step; the means of attention; and branches at β = 1, 4 and 16."""

    def means(logs: Array) -> Array:
        values = (law.flow.beta * jnp.exp(logs[0]), law.step * jnp.exp(logs[1]))
        return eqx.tree_at(lambda law: (law.flow.beta, law.step), law, values).means(tokens)

    def branches(beta: Array) -> Array:
        flow = eqx.tree_at(lambda flow: flow.beta, law.flow, beta)
        return jax.lax.map(jax.vmap(lambda x: flow.residual(x, x)), points)

    points = law.before(tokens)
    attended = jax.lax.map(jax.vmap(lambda x: (law.flow.attention(x, x) @ x).mean(axis=0)), points)
    pulls = jnp.stack([branches(jnp.asarray(beta)) for beta in (1.0, 4.0, 16.0)], axis=-2)
    # Without the softmax they grow like exp β.
    pulls = pulls / jnp.sqrt((pulls**2).mean(axis=(0, 1, 2, 4), keepdims=True))
    return means(jnp.zeros(2)), jax.jacfwd(means)(jnp.zeros(2)), attended, pulls


@jax.jit
def _innovations(
    tokens: Float[Array, "networks layers n D"], mean: Float[Array, "networks layers n D"], noise: Float[Array, ""]
) -> tuple[Float[Array, "networks layers n D"], Float[Array, "networks layers n"]]:
    """The scores of the means in units of the noise, and that of log noise, of every token."""

    def log_density(mean: Array, log_noise: Array) -> Array:
        return ProjectedNormal(mean, jnp.exp(log_noise)).log_prob(tokens).sum()

    of_mean, of_noise = jax.grad(log_density, (0, 1))(mean, jnp.full(mean.shape[:-1], jnp.log(noise)))
    return noise * of_mean, of_noise


def _directions(
    e: Float[np.ndarray, "networks layers n D"],
    of_fitted: Float[np.ndarray, "networks layers n 3"],
    points: Float[np.ndarray, "networks layers n D"],
    attended: Float[np.ndarray, "networks layers n D"],
    pulls: Float[np.ndarray, "networks layers n betas D"],
) -> dict[str, Float[np.ndarray, "units scores"]]:
    """Scores of each direction, then of the fitted parameters, one row per token; of common noise, per layer.

    The pull has no parameters, since a prior that is positive holds the step where tokens repel each other.
    """
    axes = np.linalg.svd(points.reshape(-1, points.shape[-1]), full_matrices=False)[2][:3]
    of_e, of_points, of_attended = (x @ axes.T for x in (e, points, attended))
    layer = np.arange(e.shape[1]) - (e.shape[1] - 1) / 2
    of_tokens = {
        "values": _products(of_e, of_attended),
        "linear": np.concatenate([_products(of_e, of_points), of_e], axis=-1),
        "depth": (e * attended).sum(-1, keepdims=True) * layer[:, None, None],
    }
    with_fitted = {name: np.concatenate([scores, of_fitted], axis=-1) for name, scores in of_tokens.items()}
    along = np.einsum("klid,klic->kldc", e, points)
    pairs = [(e.sum(axis=2) ** 2).sum(-1) - (e**2).sum((-1, -2))]
    pairs.append((along**2).sum((-1, -2)) - ((e**2).sum(-1) * (points**2).sum(-1)).sum(-1))
    directions = {"pull": np.einsum("klid,klibd->klib", e, pulls)} | with_fitted | {"common": np.stack(pairs, axis=-1)}
    return {name: scores.reshape(-1, scores.shape[-1]) for name, scores in directions.items()}


def _products(a: Float[np.ndarray, "*units k"], b: Float[np.ndarray, "*units l"]) -> Float[np.ndarray, "*units kl"]:
    return (a[..., :, None] * b[..., None, :]).reshape(*a.shape[:-1], -1)


def _tested(
    scores: Float[np.ndarray, "units scores"],
    second: Float[np.ndarray, "scores scores"],
    sds: list[float | None],
    *,
    components: int,
) -> dict[str, float]:
    """χ² of a direction's scores given those of the fitted parameters, the last ones, and the moves of these."""
    total, k = scores.sum(axis=0), scores.shape[1] - len(sds)
    # pinv: a fixed parameter has no score.
    regression = np.linalg.pinv(second[k:, k:], hermitian=True) @ second[k:, :k]
    given = second[:k, :k] - second[:k, k:] @ regression
    residual = total[:k] - total[k:] @ regression
    size = np.linalg.pinv(given, hermitian=True, rcond=1e-8) @ residual
    statistic, dof = float(residual @ size), int(np.linalg.matrix_rank(given, hermitian=True, tol=1e-8 * given.max()))
    effect = float(np.sqrt(max(statistic - dof, 0.0) / (len(scores) * components)))
    moves = [abs(move) / sd for move, sd in zip(regression @ size, sds, strict=True) if sd]
    p = float(stats.chi2.sf(statistic, dof))
    return {"effect": effect, "statistic": statistic, "dof": dof, "p": p, "move": max(moves, default=0.0)}
