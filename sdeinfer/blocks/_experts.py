"""A mixture of experts: MLPs of which a router chooses a few for each token. Tests: `tests/blocks/test_law.py`."""

from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, ArrayLike, Float, Int, PRNGKeyArray
from scipy.special import ndtri

from sdeinfer._arguments import at_least_one, shown
from sdeinfer._files import InputError
from sdeinfer.blocks._branch import GAIN, AbstractBranch, projected, projection, split_nodes
from sdeinfer.blocks._law import LogMoments, MatrixMoments, log_moments, moments_of_draws, sampled_log_moments
from sdeinfer.blocks._mlp import MLP
from sdeinfer.covariance._batched import matmul
from sdeinfer.covariance._matrix import pairs, vech
from sdeinfer.layers._keys import NetworkKeys
from sdeinfer.layers._wishart import factor
from sdeinfer.parameters import Parameter

SCORES = ("chosen", "all", "sigmoid")
"""Weights of experts: the softmax of the chosen logits (Mixtral, gpt-oss), that of all logits (OLMoE), or their
sigmoids over the sum of the chosen ones (DeepSeek-V3)."""


class ExpertNodes(NamedTuple):
    """Normals of a router's logits, and those of one hidden unit."""

    logits: Float[Any, "nodes m experts"]
    units: Float[Any, "nodes m"]


class Experts(AbstractBranch):
    """h = (p_1 h_1, …, p_E h_E, h_s): each token has weights p of its chosen k of E MLPs, and 0 for the others.

    Tokens that share no expert have no common increment: S = Σ_e p_e p_eᵀ ∘ S_e (+ S_s of experts that all tokens
    share), with independent S_e of u units. The strength is √u σ, for u units of one expert. Losses and biases that
    balance the load, capacities, and choices within groups of experts are left out.

    Attributes:
        gain: w = n σ² of the first matrices of experts.
        experts: E.
        chosen: k.
        router: w_r = n σ² of the router.
        scores: one of `SCORES`.
        scale: a factor of the weights p.
        activation, expansion, gated, offset: those of one expert; see `MLP`.
        shared: number of hidden units, divided by n, of experts that all tokens share.
    """

    kind: ClassVar[str] = "mlp"
    shape: ClassVar[Parameter] = GAIN

    gain: Float[Any, ""] = GAIN.field(default=1.0)
    experts: int = eqx.field(default=8, static=True)
    chosen: int = eqx.field(default=2, static=True)
    router: float = eqx.field(default=1.0, static=True)
    scores: Literal["chosen", "all", "sigmoid"] = eqx.field(default="chosen", static=True)
    scale: float = eqx.field(default=1.0, static=True)
    activation: str | Callable[[Array], Array] = eqx.field(default="silu", static=True)
    expansion: float = eqx.field(default=4.0, static=True)
    gated: bool = eqx.field(default=True, static=True)
    offset: float = eqx.field(default=0.0, static=True)
    shared: float = eqx.field(default=0.0, static=True)

    def __check_init__(self):
        at_least_one(experts=self.experts, chosen=self.chosen)
        if self.chosen > self.experts:
            raise InputError(f"chosen: at most {self.experts}, the number of experts, is needed, got {self.chosen}")
        if self.scores not in SCORES:
            raise InputError(f"scores: one of {', '.join(SCORES)} is needed, got {shown(self.scores)}")
        for name in ("router", "scale"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and 0 < value < np.inf):
                raise InputError(f"{name}: a positive number is needed, got {shown(value)}")
        if not (isinstance(self.shared, int | float) and 0 <= self.shared < np.inf):
            raise InputError(f"shared: a number of at least 0 is needed, got {shown(self.shared)}")
        # They check their own sizes.
        _ = self.expert, self.shared_expert

    def alternatives(self, width: int) -> dict[str, AbstractBranch]:
        """Other scores and numbers of experts, no shared ones, and other units."""
        del width
        of_scores = {"chosen": "a softmax over the chosen experts", "all": "a softmax over all", "sigmoid": "sigmoids"}
        changes = {f"weights of experts are by {words}": {"scores": scores} for scores, words in of_scores.items()}
        changes |= {"tokens choose one expert": {"chosen": 1}, "there are no shared experts": {"shared": 0.0}}
        return self.with_changes(changes | self.expert.changes())

    @property
    def expert(self) -> MLP:
        """One expert."""
        return MLP(self.gain, self.activation, self.expansion, self.gated, offset=self.offset)

    @property
    def shared_expert(self) -> MLP | None:
        """The MLP of all units that all tokens share."""
        return MLP(self.gain, self.activation, self.shared, self.gated, offset=self.offset) if self.shared else None

    def check_width(self, width: int) -> None:
        """Raise an InputError for a width of less than one hidden unit."""
        self.expert.check_width(width)
        if self.shared_expert is not None:
            self.shared_expert.check_width(width)

    def hidden(self, U: Float[Array, "m n"], *, key: PRNGKeyArray) -> Float[Array, "m u"]:
        """Draw weights and compute h, times √(U/u) for U units of all experts: `Block.increment` divides by √U."""
        tokens, width = U.shape
        key_router, key_shared, key_experts = jr.split(key, 3)
        W = jr.normal(key_router, (width, self.experts), U.dtype)
        p = self._weights(projection(U, W, jnp.zeros(self.experts, U.dtype), self.router, 0.0))
        of_experts = jax.vmap(lambda key: self.expert.hidden(U, key=key))(jr.split(key_experts, self.experts))
        h = (p.T[:, :, None] * of_experts).swapaxes(0, 1).reshape(tokens, -1)
        if self.shared_expert is not None:
            h = jnp.concatenate([h, self.shared_expert.hidden(U, key=key_shared)], axis=1)
        return h * jnp.sqrt(h.shape[1] / self.expert.units(width))

    def hidden_covariance(
        self, V: Float[Array, "m m 1 networks"], *, width: Int[Array, ""] | int, keys: NetworkKeys
    ) -> Float[Array, "m m 1 networks"]:
        """Σ_e p_e p_eᵀ ∘ S_e of the experts that a token has chosen."""
        tokens, units = len(V), self.expert.units(width)
        key_router, key_experts, key_shared = keys.split(3)
        z = key_router.normals((tokens, self.experts, 1), V.dtype)
        r = matmul(factor(projected(V, self.router, 0.0)), z)[:, :, 0]
        p = jnp.moveaxis(self._weights(jnp.moveaxis(r, 1, -1)), -1, 1)
        most = min(self.experts, tokens * self.chosen)
        # Experts are alike given p: those that no token has chosen are left out.
        order = jnp.argsort(-p.sum(0), axis=0)[:most]
        active = jnp.take_along_axis(p, order[None], axis=1)
        L = factor(projected(V, self.gain, 0.0))
        S = self.expert.units_gram(L, units, weights=active, keys=key_experts)
        if self.shared_expert is not None:
            S = S + self.shared_expert.units_gram(L, self.shared_expert.units(width), keys=key_shared)
        return S / units

    def nodes(self, tokens: int, width: int, *, log2: int, seed: int = 0) -> ExpertNodes:
        """Normals of the router and of one hidden unit."""
        del width
        rng = np.random.default_rng([seed, tokens])
        units, logits = map(ndtri, split_nodes([tokens, tokens * self.experts], log2, seed, rng))
        return ExpertNodes(logits.reshape(-1, tokens, self.experts), units)

    def moments(self, V: Float[Array, "m m"], nodes: Any, *, width: Int[Array, ""] | int) -> MatrixMoments:
        """Means over choices of the router; given a choice, the mean is M ∘ K with M = Σ_e p_e p_eᵀ."""
        means, within = self._given_choices(V, nodes, width)
        mean, covariance = moments_of_draws(vech(means))
        return MatrixMoments(mean, covariance + within)

    def hidden_logarithm(
        self,
        V: Float[Array, "m m"],
        hidden: MatrixMoments,
        nodes: Any,
        *,
        bias: ArrayLike,
        width: Int[Array, ""] | int,
    ) -> LogMoments:
        """Moments of the logarithm: by the router's choices, and to leading order in those of the units."""
        means, within = self._given_choices(V, nodes, width)
        of_choices = sampled_log_moments(hidden.mean + bias, means + bias)
        of_units = log_moments(hidden.mean + bias, within)
        return LogMoments(of_choices.mean + of_units.mean, of_choices.covariance + of_units.covariance)

    def _given_choices(
        self, V: Float[Array, "m m"], nodes: ExpertNodes, width: Any
    ) -> tuple[Float[Array, "nodes m m"], Float[Array, "p p"]]:
        """The mean of S at each choice of the router, and the mean over choices of its covariance."""
        p = self._weights(jnp.linalg.cholesky(projected(V, self.router, 0.0)) @ nodes.logits)
        of_expert = self.expert.moments(V, nodes.units, width=width)
        M = p @ p.mT
        a, b = pairs(len(V))
        both = p[:, a] * p[:, b]
        means = M * of_expert.mean
        within = jnp.einsum("rxe,rye->xy", both, both) / len(p) * of_expert.covariance
        if self.shared_expert is not None:
            of_shared = self.shared_expert.moments(V, nodes.units, width=width)
            ratio = self.shared_expert.units(width) / self.expert.units(width)
            means, within = means + ratio * of_shared.mean, within + ratio**2 * of_shared.covariance
        return means, within

    def _weights(self, logits: Float[Array, "... experts"]) -> Float[Array, "... experts"]:
        return self.scale * weights_of_experts(logits, self.chosen, self.scores)


def weights_of_experts(logits: Float[Array, "... experts"], chosen: int, scores: str) -> Float[Array, "... experts"]:
    """The weights of the `chosen` experts with the largest logits, by one of `SCORES`; 0 for the others."""
    largest = logits >= jax.lax.top_k(logits, chosen)[0][..., -1:]
    if scores == "chosen":
        return jax.nn.softmax(jnp.where(largest, logits, -jnp.inf), axis=-1)
    if scores == "all":
        return jnp.where(largest, jax.nn.softmax(logits, axis=-1), 0.0)
    p = jnp.where(largest, jax.nn.sigmoid(logits), 0.0)
    return p / p.sum(-1, keepdims=True)
