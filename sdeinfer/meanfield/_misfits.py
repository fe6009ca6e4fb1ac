"""Score tests of a fitted law of tokens: in which ways the observed ones leave it.

The law says that a token is x = N(m + σξ), given the layers before. Then e = σ ∂log p(x)/∂m has mean zero whatever the
noise, and is uncorrelated between tokens and layers. A direction in which networks may leave the law, m → m + δ g, has
the score ⟨e, g⟩/σ at δ = 0, summed over tokens and layers. The square of this sum over its variance is χ², after the
scores of the fitted β, step and noise are projected out (Lagrange multiplier test). Variances are those of tokens that
are simulated from the law, given the observed layers before: the sums of squares of the observed ones reject too often,
since scores of the noise have long tails.
"""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pandas as pd
from jaxtyping import Array, Float
from scipy import stats

from sdeinfer.meanfield._flow import SelfAttentionFlow
from sdeinfer.meanfield._laws import AbstractTokenLaw, NoisyLayers
from sdeinfer.meanfield._projected_normal import ProjectedNormal, slope_and_curvature

AXES = 3
"""Number of principal axes of the tokens along which matrices are tested."""

SIMULATED = 50_000
"""Least number of simulated tokens: the variances of scores then have an error of about 1 %."""

PULLS = (1.0, 4.0, 16.0)
"""Inverse temperatures at which a pull of other tokens is looked for: where it repels, β is the prior's."""

DIFFERENCE = 1e-2
"""Relative change of β and of the step for the derivatives of the means."""

PULL = "pull"
"""The direction of the step and β themselves, whose scores are not zero where a prior or a bound holds them."""

CAUSES = {
    "values": "the value matrix is not the identity, or not the fitted one",
    PULL: "tokens move by another step or β than the fitted ones, as a negative step, by which they repel each other",
    "logits": "the query and key matrices are not the identity",
    "linear": "tokens also move by themselves, as by an MLP or a bias",
    "speed": "tokens move faster or slower with many neighbours, as by attention without normalisation",
    "depth": "layers differ: the step changes with depth",
    "noise": "the noise differs between layers or tokens, or has heavier tails",
    "memory": "the noise of a layer is correlated with that of the layer before",
    "common": "tokens of a layer have common noise, as by random values",
}
"""The directions, and what a network does that leaves the law in each."""

OF_NOISE = ("noise", "memory", "common")
"""Directions in which a misfit of the means shows as well, and which are the cause only if no other direction is."""

FITTED = ("beta", "step", "noise")
"""Parameters whose scores are projected out."""


def misfits(law: AbstractTokenLaw, tokens: Float[Array, "networks layers n D"]) -> pd.DataFrame:
    """Tests of a law in the directions of `CAUSES`.

    Arguments:
        law: the fitted law, at the posterior mean of its parameters.
        tokens: the observed tokens after the first layer.

    Returns:
        One row per direction, with columns `effect`, the root mean square of the misfit in standard deviations of the
        noise (for common noise, in those of its scores); `statistic` and `dof` of χ²; `p`; and the moves of log β,
        log step and log noise, if the direction is fitted too, in columns of their names.
    """
    mean, noise = _means(law, tokens), law.scales()
    slopes = _slope(law, tokens, lambda law: law.flow.beta), _slope(law, tokens, lambda law: law.step)
    points = law.before(tokens) if isinstance(law, NoisyLayers) else mean
    layers = np.asarray(law.path.layers, float)
    # Observations of a flow add up what every layer does.
    growth = np.ones_like(layers) if isinstance(law, NoisyLayers) else layers / layers.mean()
    p = np.asarray(_attention(law.flow, points))
    pulls = np.stack([_pull(law.flow, points, jnp.asarray(beta)) for beta in PULLS], axis=-2)
    pulls /= np.sqrt((pulls**2).mean(axis=(0, 1, 2, 4), keepdims=True))  # without the softmax they grow as exp β

    def scores_of(x: Array) -> dict[str, Float[np.ndarray, "units k"]]:
        e, scores, scatter = map(np.asarray, _innovations(x, mean, noise, slopes))
        return _directions(
            e, scores, scatter, points=np.asarray(points), p=p, pulls=pulls, growth=growth[:, None, None]
        )

    second: dict[str, np.ndarray] = {}
    repeats = math.ceil(SIMULATED / noise.size)
    for key in jr.split(jr.key(0), repeats):
        for name, scores in scores_of(ProjectedNormal(mean, noise).sample(key)).items():
            second[name] = second.get(name, np.zeros(())) + scores.T @ scores / repeats
    rows = {}
    for name, scores in scores_of(tokens).items():
        fitted = () if name in (PULL, "common") else FITTED
        components = len(scores) * (mean.shape[-1] - 1)
        rows[name] = _tested(scores.sum(axis=0), second[name], fitted, components=components)
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("direction")


@eqx.filter_jit
def _means(law: AbstractTokenLaw, tokens: Float[Array, "networks layers n D"]) -> Float[Array, "networks layers n D"]:
    return law.means(tokens)


@eqx.filter_jit
def _attention(
    flow: SelfAttentionFlow, points: Float[Array, "networks layers n D"]
) -> Float[Array, "networks layers heads n n"]:
    return jax.lax.map(jax.vmap(lambda x: flow.attention(x, x)), points)


@eqx.filter_jit
def _pull(
    flow: SelfAttentionFlow, points: Float[Array, "networks layers n D"], beta: Float[Array, ""]
) -> Float[Array, "networks layers n D"]:
    """The branch of a layer at another β."""
    at = eqx.tree_at(lambda flow: flow.beta, flow, beta)
    return jax.lax.map(jax.vmap(lambda x: at.residual(x, x)), points)


def _slope(
    law: AbstractTokenLaw, tokens: Float[Array, "networks layers n D"], parameter: Callable[[Any], Any]
) -> Float[Array, "networks layers n D"]:
    """Derivative of the means by the logarithm of a parameter, as a central difference."""
    up, down = (eqx.tree_at(parameter, law, replace_fn=lambda x, by=1 + d: x * by) for d in (DIFFERENCE, -DIFFERENCE))
    return (_means(up, tokens) - _means(down, tokens)) / (2 * DIFFERENCE)


@jax.jit
def _innovations(
    tokens: Float[Array, "networks layers n D"],
    mean: Float[Array, "networks layers n D"],
    noise: Float[Array, "networks layers n"],
    slopes: tuple[Float[Array, "networks layers n D"], ...],
) -> tuple[Array, Array, Array]:
    """One-step innovations of every token by a fitted law.

    Returns:
        e, the scores of the means in units of the noise, shape (networks, layers, n, D); the scores of log β, log step
        and log noise, shape (networks, layers, n, 3); and the score of a scatter of the noise between tokens, shape
        (networks, layers, n), which has mean zero by Bartlett's identity.
    """
    k = mean.shape[-1] - 1
    t = (tokens * mean).sum(axis=-1) / noise
    across = (mean - (noise * t)[..., None] * tokens) / noise[..., None]
    slope, curvature = slope_and_curvature(t, k)
    e = slope[..., None] * tokens - across
    scores = [(e * each).sum(axis=-1) / noise for each in slopes]
    of_noise = (across**2).sum(axis=-1) - t * slope
    of_scatter = of_noise**2 - 2 * (across**2).sum(axis=-1) + t * slope + t**2 * curvature
    return e, jnp.stack([*scores, of_noise], axis=-1), of_scatter


def _directions(
    e: Float[np.ndarray, "networks layers n D"],
    of_fitted: Float[np.ndarray, "networks layers n parameters"],
    scatter: Float[np.ndarray, "networks layers n"],
    *,
    points: Float[np.ndarray, "networks layers n D"],
    p: Float[np.ndarray, "networks layers heads n n"],
    pulls: Float[np.ndarray, "networks layers n betas D"],
    growth: Float[np.ndarray, "layers 1 1"],
) -> dict[str, Float[np.ndarray, "units k"]]:
    """Scores of every direction, and then those of the fitted parameters: one row per token.

    Those of common noise have one row per layer of a network, and no parameters.

    Arguments:
        e: see `_innovations`, also for the next two.
        of_fitted: scores of the fitted parameters.
        scatter: scores of a scatter of the noise.
        points: tokens at which the directions are evaluated.
        p: the attention.
        pulls: the branch of a layer at each of `PULLS`.
        growth: factor of a direction at each layer.
    """
    axes = np.linalg.svd(points.reshape(-1, points.shape[-1]), full_matrices=False)[2][:AXES]
    attended = np.einsum("klhij,kljd->klihd", p, points).mean(axis=3)
    of_e, of_points, of_attended = (x @ axes.T for x in (e, points, attended))
    layer = np.arange(e.shape[1]) - (e.shape[1] - 1) / 2
    # e is tangent up to the noise; m − ⟨m, x⟩x is what a direction changes.
    moved = np.einsum("klid,kljd->klij", e, points) - (e * attended).sum(-1)[..., None]
    logits = np.einsum("klhij,klij,klic,kljb->klicb", p, moved, of_points, of_points) / p.shape[2]
    # With Q = K = I, the attention of a token to itself is e^β over the softmax's sum.
    speed = -np.log(np.einsum("klhii->kli", p) / p.shape[2])
    speed -= speed.mean()
    before = np.concatenate([np.zeros_like(e[:, :1]), e[:, :-1]], axis=1)
    by_layer = of_fitted[..., -1:] * layer[:, None, None]
    of_tokens = {
        "values": _products(of_e, of_attended) * growth,
        "logits": logits.reshape(*e.shape[:3], -1) * growth,
        "linear": np.concatenate([_products(of_e, of_points), of_e], axis=-1) * growth,
        "speed": (e * attended).sum(-1, keepdims=True) * speed[..., None] * growth,
        "depth": (e * attended).sum(-1, keepdims=True) * layer[:, None, None],
        "noise": np.concatenate([by_layer, scatter[..., None]], axis=-1),
        "memory": (e * before).sum(-1, keepdims=True),
    }
    rows = {
        name: np.concatenate([scores, of_fitted], axis=-1).reshape(scatter.size, -1)
        for name, scores in of_tokens.items()
    }
    along = np.einsum("klid,klic->kldc", e, points)
    pairs = [(e.sum(axis=2) ** 2).sum(-1) - (e**2).sum((-1, -2))]
    pairs.append((along**2).sum((-1, -2)) - ((e**2).sum(-1) * (points**2).sum(-1)).sum(-1))
    rows[PULL] = (np.einsum("klid,klibd->klib", e, pulls) * growth).reshape(-1, len(PULLS))
    return rows | {"common": np.stack(pairs, axis=-1).reshape(-1, 2)}


def _products(a: Float[np.ndarray, "*units k"], b: Float[np.ndarray, "*units l"]) -> Float[np.ndarray, "*units kl"]:
    return (a[..., :, None] * b[..., None, :]).reshape(*a.shape[:-1], -1)


def _tested(
    total: Float[np.ndarray, " scores"],
    second: Float[np.ndarray, "scores scores"],
    fitted: tuple[str, ...],
    *,
    components: int,
) -> dict[str, float]:
    """χ² of a direction's scores given those of the fitted parameters, which come last, and the moves of these."""
    k = len(total) - len(fitted)
    # pinv: a fixed parameter has no score.
    regression = np.linalg.pinv(second[k:, k:], hermitian=True) @ second[k:, :k]
    given = second[:k, :k] - second[:k, k:] @ regression
    rest = total[:k] - total[k:] @ regression
    size = np.linalg.pinv(given, hermitian=True, rcond=1e-8) @ rest
    statistic, dof = float(rest @ size), int(np.linalg.matrix_rank(given, hermitian=True, tol=1e-8 * given.max()))
    effect = float(np.sqrt(max(statistic - dof, 0.0) / components))
    moves = dict.fromkeys(FITTED, 0.0) | dict(zip(fitted, -(regression @ size), strict=True))
    return {"effect": effect, "statistic": statistic, "dof": dof, "p": float(stats.chi2.sf(statistic, dof)), **moves}
