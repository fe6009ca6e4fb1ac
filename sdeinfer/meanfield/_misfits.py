"""Score tests of a fitted law of tokens: in which ways the observed ones leave it.

The law says that a token is x = N(m + σξ), given the layers before. Then e = σ ∂log p(x)/∂m has mean zero whatever the
noise, and is uncorrelated between tokens and layers. A direction in which networks may leave the law, m → m + δ g, has
the score ⟨e, g⟩/σ at δ = 0, summed over tokens and layers. The square of this sum over the sum of squares is χ², after
the scores of the fitted β, step and noise are projected out (Lagrange multiplier test).
"""

import copy
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float
from scipy import stats

from sdeinfer.meanfield._laws import AbstractTokenLaw, NoisyLayers
from sdeinfer.meanfield._projected_normal import projected_normal

AXES = 3
"""Number of principal axes of the tokens along which matrices are tested."""

DIFFERENCE = 1e-2
"""Relative change of β and of the step for the derivatives of the means."""

CAUSES = {
    "values": "the value matrix is not the identity, or not the fitted one",
    "logits": "the query and key matrices are not the identity",
    "linear": "tokens also move by themselves, as by an MLP or a bias",
    "speed": "tokens move faster or slower with many neighbours, as by attention without normalisation",
    "depth": "layers differ: the step changes with depth",
    "noise": "the noise differs between layers or tokens, or has heavier tails",
    "memory": "the noise of a layer is correlated with that of the layer before",
    "common": "tokens of a layer have common noise, as by random values",
}
"""The directions, and what a network does that leaves the law in each."""


class Innovations(NamedTuple):
    """One-step innovations of tokens by a fitted law; every array has leading axes (networks, layers, tokens).

    Attributes:
        e: scores of the means in units of the noise, shape (…, D).
        scores: scores of log β, log step and log noise, shape (…, 3).
        scatter: the score of a scatter of the noise between tokens, which has mean zero by Bartlett's identity.
        points: tokens at which the directions are evaluated, shape (…, D).
        p: the attention, shape (networks, layers, heads, n, n).
        growth: factor of a direction at each layer: observations of a flow add up what every layer does.
    """

    e: Float[np.ndarray, "networks layers n D"]
    scores: Float[np.ndarray, "networks layers n parameters"]
    scatter: Float[np.ndarray, "networks layers n"]
    points: Float[np.ndarray, "networks layers n D"]
    p: Float[np.ndarray, "networks layers heads n n"]
    growth: Float[np.ndarray, " layers"]


def innovations(law: AbstractTokenLaw, tokens: Float[Array, "networks layers n D"]) -> Innovations:
    """Innovations of the observed tokens by a law."""
    step_by_step = isinstance(law, NoisyLayers)
    mean = law.means(tokens)
    changes = {"beta": _changed(law, beta=DIFFERENCE), "step": _changed(law, step=DIFFERENCE)}
    lower = {"beta": _changed(law, beta=-DIFFERENCE), "step": _changed(law, step=-DIFFERENCE)}
    slopes = [(changes[name].means(tokens) - lower[name].means(tokens)) / (2 * DIFFERENCE) for name in changes]
    points = jnp.concatenate([law.path.initial[:, None], tokens[:, :-1]], axis=1) if step_by_step else mean
    layers = jnp.asarray(law.path.layers, float)
    found = _scores(tokens, mean, jnp.broadcast_to(law.noise, mean.shape[:-1]), tuple(slopes))
    p = jax.lax.map(jax.vmap(lambda x: law.flow.attention(x, x)), points)
    growth = jnp.ones_like(layers) if step_by_step else layers / layers.mean()
    return Innovations(*map(np.asarray, (*found, points, p, growth)))


def misfits(law: AbstractTokenLaw, tokens: Float[Array, "networks layers n D"]) -> pd.DataFrame:
    """Tests of a law in the directions of `CAUSES`.

    Arguments:
        law: the fitted law, at the posterior mean of its parameters.
        tokens: the observed tokens after the first layer.

    Returns:
        One row per direction, with columns `effect`, the multiple correlation of the innovations with it (0 to 1);
        `statistic` and `dof` of χ²; `p`; and the moves of log β, log step and log noise, if the direction is fitted
        too, in columns of their names.
    """
    found = innovations(law, tokens)
    D = found.e.shape[-1]
    nuisance = found.scores.reshape(-1, found.scores.shape[-1])
    rows = {}
    for name, scores in _directions(found).items():
        columns = scores.reshape(-1, scores.shape[-1])
        same_units = len(columns) == len(nuisance)
        rows[name] = _tested(columns, nuisance if same_units else None, components=D - 1)
    return pd.DataFrame.from_dict(rows, orient="index").rename_axis("direction")


def _changed(law: AbstractTokenLaw, *, beta: float = 0.0, step: float = 0.0) -> AbstractTokenLaw:
    changed = copy.copy(law)
    changed.flow = eqx.tree_at(lambda flow: flow.beta, law.flow, law.flow.beta * (1 + beta))
    changed.step = law.step * (1 + step)
    return changed


@jax.jit
def _scores(
    tokens: Float[Array, "networks layers n D"],
    mean: Float[Array, "networks layers n D"],
    noise: Float[Array, "networks layers n"],
    slopes: tuple[Float[Array, "networks layers n D"], ...],
) -> tuple[Array, Array, Array]:
    """e, the scores, and the score of a scatter of the noise, of every token."""

    def of_token(x: Array, mean: Array, noise: Array, slopes: tuple[Array, ...]) -> tuple[Array, Array, Array]:
        along_mean = jax.grad(lambda mean: projected_normal(x, mean, noise))(mean)

        def density(log_change: Array) -> Array:
            return projected_normal(x, mean, noise * jnp.exp(log_change))

        zero = jnp.zeros((), x.dtype)
        of_noise, curvature = jax.grad(density)(zero), jax.grad(jax.grad(density))(zero)
        scores = jnp.stack([*(along_mean @ slope for slope in slopes), of_noise])
        return noise * along_mean, scores, of_noise**2 + curvature

    function: Callable[..., tuple[Array, Array, Array]] = of_token
    for _ in range(3):
        function = jax.vmap(function)
    return function(tokens, mean, noise, slopes)


def _directions(found: Innovations) -> dict[str, Float[np.ndarray, "*units scores"]]:
    """Scores of every direction, one row per token or, for common noise, per layer of a network."""
    e, points, p = found.e, found.points, found.p
    axes = np.linalg.svd(points.reshape(-1, points.shape[-1]), full_matrices=False)[2][:AXES]
    growth = found.growth[:, None, None]
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
    together = e.sum(axis=2)
    pairs = [(together**2).sum(-1) - (e**2).sum((-1, -2))]
    along = np.einsum("klid,klic->kldc", e, points)
    pairs.append((along**2).sum((-1, -2)) - ((e**2).sum(-1) * (points**2).sum(-1)).sum(-1))
    by_layer = found.scores[..., -1:] * layer[:, None, None]
    return {
        "values": _products(of_e, of_attended) * growth,
        "logits": logits.reshape(*e.shape[:3], -1) * growth,
        "linear": np.concatenate([_products(of_e, of_points), of_e], axis=-1) * growth,
        "speed": (e * attended).sum(-1, keepdims=True) * speed[..., None] * growth,
        "depth": (e * attended).sum(-1, keepdims=True) * layer[:, None, None],
        "noise": np.concatenate([by_layer, found.scatter[..., None]], axis=-1),
        "memory": (e * before).sum(-1, keepdims=True),
        "common": np.stack(pairs, axis=-1),
    }


def _products(a: Float[np.ndarray, "*units k"], b: Float[np.ndarray, "*units l"]) -> Float[np.ndarray, "*units kl"]:
    return (a[..., :, None] * b[..., None, :]).reshape(*a.shape[:-1], -1)


def _tested(
    scores: Float[np.ndarray, "units k"], nuisance: Float[np.ndarray, "units parameters"] | None, *, components: int
) -> dict[str, float]:
    """χ² of a direction's scores given those of the fitted parameters, and the moves of these."""
    names = ("beta", "step", "noise")
    total, inverse = scores.sum(axis=0), np.zeros((len(names), scores.shape[1]))
    projected = scores
    if nuisance is not None:
        inverse = np.linalg.pinv(nuisance) @ scores
        projected = scores - nuisance @ inverse
        # The posterior mean is not exactly the mode.
        total = projected.sum(axis=0)
    second = projected.T @ projected
    size = np.linalg.pinv(second, hermitian=True, rcond=1e-8) @ total
    statistic, dof = float(total @ size), int(np.linalg.matrix_rank(second, hermitian=True, tol=1e-8 * second.max()))
    effect = float(np.sqrt(max(statistic - dof, 0.0) / (len(scores) * components)))
    moves = dict(zip(names, -(inverse @ size), strict=True))
    return {"effect": effect, "statistic": statistic, "dof": dof, "p": float(stats.chi2.sf(statistic, dof)), **moves}
