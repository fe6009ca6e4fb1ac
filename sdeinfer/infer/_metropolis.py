"""Metropolis–Hastings for a few parameters and many latent layers.

The innovations u of each bridge are standard normals a priori, and w(θ, u) is the likelihood (see `likelihood.bridge`).
Every iteration first updates u at fixed θ: each bridge separately proposes innovations from their prior and accepts
them with probability min(1, w(θ, u′)/w(θ, u)). Then θ is updated a few times at fixed u, alternating random-walk and
independence proposals, with the mean and covariance of the posterior estimated in the warmup. Gradients are not used:
that of w costs six times more than w, and the compilation of NUTS ten times more. See `tests/benchmarks`.
"""

import dataclasses
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray, PyTree

from sdeinfer._files import InputError
from sdeinfer.infer._chains import Draws, in_chunks, recorded
from sdeinfer.infer._latent_densities import draw_latent, latent_mode, log_prior, log_priors, log_weights, sites_at
from sdeinfer.infer._samplers import AbstractSampler
from sdeinfer.likelihood import AbstractModel
from sdeinfer.likelihood._model import LatentLayers

PROPOSAL_FREEDOM = 6.0
"""Degrees of freedom of the t distribution of the independence moves."""

BAR_ITERATIONS = 100
"""Iterations between updates of the progress bar."""


@dataclasses.dataclass(frozen=True)
class Metropolis(AbstractSampler):
    """Metropolis–Hastings for models with latent layers; chains run in parallel on all cores."""

    def sample(
        self,
        model: AbstractModel,
        prepared: PyTree,
        *,
        each: PyTree | None = None,
        progress: bool = False,
        key: PRNGKeyArray,
    ) -> Draws:
        """Sample the posterior of a model with latent layers; see `AbstractSampler.sample`."""
        del each  # bridges are not pooled
        if not isinstance(model, LatentLayers):
            raise InputError(f"sampler: {model.name} has no latent layers; use NUTS")
        around = latent_mode(model, prepared, np.ones(len(prepared), bool), key=jr.fold_in(key, self.chains))
        chains = LatentChains(model, tuple(around.sites), self.warmup, prepared)
        centre, sd = (jnp.asarray(x, float) for x in (around.x, around.sd))
        start = tuple(chains.start(centre, sd, jr.fold_in(key, number)) for number in range(self.chains))
        sizes = {"warmup": self.warmup, "draws": self.draws, "chunk": BAR_ITERATIONS}
        records = in_chunks(_advance, chains, start, **sizes, progress=progress)
        samples = records["samples"]
        prior = jax.tree.map(np.asarray, log_priors(model, prepared, {name: samples[name] for name in around.sites}))
        coordinates = prepared.assumptions.kind.coordinates
        layers = coordinates.unconstrained({name: np.asarray(samples[name]) for name in coordinates.declared})
        return Draws(samples, np.moveaxis(layers, 0, -1), records["log_likelihood"], prior, records["statistics"])


class Proposal(NamedTuple):
    """The proposal of θ: estimates of the posterior's mean and factor; and sums over what was seen since the last."""

    mean: Float[Array, " parameters"]
    factor: Float[Array, "parameters parameters"]
    log_step: Float[Array, ""]
    seen: Float[Array, ""]
    total: Float[Array, " parameters"]
    square: Float[Array, "parameters parameters"]


class State(NamedTuple):
    """State of one chain: x is the unconstrained θ with its log prior density, `latent` is u with log w(θ, u)."""

    iteration: Int[Array, ""]
    x: Float[Array, " parameters"]
    prior: Float[Array, ""]
    latent: Float[Array, "bridges latent p"]
    log_weight: Float[Array, " bridges"]
    proposal: Proposal
    key: PRNGKeyArray


class LatentChains(eqx.Module):
    """A posterior to sample; the sites are the names of the parameters, all scalar."""

    model: LatentLayers = eqx.field(static=True)
    sites: tuple[str, ...] = eqx.field(static=True)
    warmup: int = eqx.field(static=True)
    prepared: PyTree

    @eqx.filter_jit
    def start(self, mean: Float[Array, " parameters"], sd: Float[Array, " parameters"], key: PRNGKeyArray) -> State:
        """The initial state of a chain: θ drawn about a mode, innovations drawn from their prior."""
        key, key_x, key_latent = jr.split(key, 3)
        x = mean + 1.5 * sd * jr.normal(key_x, mean.shape)
        latent = draw_latent(self.model, self.prepared, key_latent)
        zero = jnp.zeros_like(mean)
        step = jnp.asarray(np.log(2.4 / np.sqrt(len(mean))), mean.dtype)  # of a weak type, the chunks compile twice
        proposal = Proposal(mean, jnp.diag(sd), step, jnp.zeros(()), zero, jnp.outer(zero, zero))
        return State(jnp.asarray(0), x, self._prior(x, latent), latent, self._weights(x, latent), proposal, key)

    def _iteration(self, state: State) -> tuple[State, dict[str, dict[str, Array]]]:
        key, key_renew, key_moves = jr.split(state.key, 3)
        state, estimate, renewed = self._renewed(state, key_renew)
        adapting, moves = state.iteration < self.warmup, 6  # half of them random-walk, half independence moves

        def move(i, carry):
            state, accepted = carry
            state, probability = self._moved(state, i % 2 == 0, adapting, jr.fold_in(key_moves, i))
            return state, accepted.at[i % 2].add(2 * probability / moves)

        state, accepted = jax.lax.fori_loop(0, moves, move, (state, jnp.zeros(2)))
        ends = jnp.asarray([round(self.warmup * share) for share in (0.2, 0.5, 1.0)])
        update = (state.iteration + 1 == ends).any()
        proposal = jax.tree.map(lambda new, old: jnp.where(update, new, old), _learned(state.proposal), state.proposal)
        density = state.prior + jnp.sum(state.log_weight)
        draw = {
            "samples": sites_at(self.model, self.prepared, self._by_name(state.x), state.latent),
            "log_likelihood": {"covariance": estimate},
            "statistics": {
                "lp": density,
                "diverging": ~jnp.isfinite(density),
                "acceptance_rate": accepted[0],
                "acceptance_anywhere": accepted[1],
                "acceptance_latent": renewed,
                "step_size": jnp.exp(proposal.log_step),
            },
        }
        return state._replace(iteration=state.iteration + 1, proposal=proposal, key=key), draw

    def _renewed(self, state: State, key: PRNGKeyArray) -> tuple[State, Array, Array]:
        """Update u; also return the log of an unbiased likelihood estimate per network, and the acceptance rate."""
        key_proposal, key_choice = jr.split(key)
        proposed = draw_latent(self.model, self.prepared, key_proposal)
        weight = self._weights(state.x, proposed)
        # −log of a uniform is exponential. NaN is never accepted, and a current NaN is always replaced.
        taken = ~(weight - state.log_weight <= -jr.exponential(key_choice, weight.shape, weight.dtype))
        taken &= ~jnp.isnan(weight)
        latent = jnp.where(taken[:, None, None], proposed, state.latent)
        log_weight = jnp.where(taken, weight, state.log_weight)
        # A bridge that explodes has no density at its end.
        estimate = self.prepared.by_network(jnp.where(jnp.isnan(weight), -jnp.inf, weight))
        return state._replace(latent=latent, log_weight=log_weight), estimate, jnp.mean(taken)

    def _moved(self, state: State, near: Array, adapting: Array, key: PRNGKeyArray) -> tuple[State, Array]:
        """One random-walk (`near`) or independence move of θ, and its acceptance probability."""
        key_x, key_choice = jr.split(key)
        proposal = state.proposal
        normal, chi = jr.normal(key_x, state.x.shape), jr.chisquare(jr.fold_in(key_x, 1), PROPOSAL_FREEDOM)
        neighbour = state.x + jnp.exp(proposal.log_step) * proposal.factor @ normal
        anywhere = proposal.mean + proposal.factor @ normal * jnp.sqrt(PROPOSAL_FREEDOM / chi)
        x = jnp.where(near, neighbour, anywhere)
        correction = jnp.where(near, 0.0, _log_t(proposal, state.x) - _log_t(proposal, x))
        prior, weight = self._prior(x, state.latent), self._weights(x, state.latent)
        change = prior - state.prior + jnp.sum(weight) - jnp.sum(state.log_weight) + correction
        probability = jnp.where(jnp.isnan(change), 0.0, jnp.minimum(1.0, jnp.exp(change)))
        # A chain that started at zero density accepts any point of positive density.
        stuck = ~jnp.isfinite(state.prior + jnp.sum(state.log_weight)) & jnp.isfinite(prior + jnp.sum(weight))
        taken = stuck | (jr.uniform(key_choice) < probability)
        x, prior, weight = jax.tree.map(
            lambda new, old: jnp.where(taken, new, old), (x, prior, weight), (state.x, state.prior, state.log_weight)
        )
        rate = 4.0 / jnp.sqrt(state.iteration + 10.0)
        log_step = proposal.log_step + jnp.where(adapting & near, rate * (probability - 0.3), 0.0)
        away = x - proposal.mean
        proposal = proposal._replace(
            log_step=log_step,
            seen=proposal.seen + 1,
            total=proposal.total + away,
            square=proposal.square + jnp.outer(away, away),
        )
        return state._replace(x=x, prior=prior, log_weight=weight, proposal=proposal), probability

    def _by_name(self, x: Float[Array, " parameters"]) -> dict[str, Array]:
        return dict(zip(self.sites, x, strict=True))

    def _prior(self, x: Float[Array, " parameters"], latent: Array) -> Float[Array, ""]:
        return log_prior(self.model, self.prepared, self._by_name(x), latent)

    def _weights(self, x: Float[Array, " parameters"], latent: Array) -> Float[Array, " bridges"]:
        return log_weights(self.model, self.prepared, self._by_name(x), latent)


def _learned(proposal: Proposal) -> Proposal:
    """Update the proposal from its sums; the previous covariance has the weight of 20 draws."""
    count = jnp.maximum(proposal.seen, 1.0)
    shift = proposal.total / count
    covariance = proposal.square / count - jnp.outer(shift, shift)
    before = proposal.factor @ proposal.factor.T
    factor = jnp.linalg.cholesky((covariance * count + before * 20.0) / (count + 20.0))
    zero = jnp.zeros_like(shift)
    return Proposal(proposal.mean + shift, factor, proposal.log_step, jnp.zeros(()), zero, jnp.outer(zero, zero))


def _log_t(proposal: Proposal, x: Float[Array, " parameters"]) -> Float[Array, ""]:
    """Log density of the independence proposal, up to a constant."""
    white = jax.scipy.linalg.solve_triangular(proposal.factor, x - proposal.mean, lower=True)
    return -(PROPOSAL_FREEDOM + len(x)) / 2 * jnp.log1p(jnp.sum(white**2) / PROPOSAL_FREEDOM)


@eqx.filter_jit
def _advance(chains: LatentChains, state: State, steps: Int[Array | np.ndarray, ""]) -> Any:
    return recorded(chains._iteration, state, steps, BAR_ITERATIONS)
