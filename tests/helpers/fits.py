"""What fits of tests share: the length of their warmup, and a sampler that compiles nothing."""

import dataclasses

import jax
import jax.random as jr
import numpy as np
from helpers.internals import SampledPosterior, posterior_mode, recorded_draws, unobserved_structure

import sdeinfer as si

WARMUP = 300
"""Of the fits in the suite: its length is compiled in, so that fits of one shape and one warmup share a sampler."""


@dataclasses.dataclass(frozen=True)
class AtTheMode(si.infer.AbstractSampler):
    """Independent draws of the normal law at the posterior's mode.

    Groups, labels, verdicts, refusals and files need a posterior, and not NUTS, whose compilation takes seconds. Where
    the mode is not known beforehand (numbers of each network, groups), draws are about the starts of chains, unless it
    is `searched`, for models whose parameters are few and scalars.
    """

    searched: bool = False

    def sample(self, model, prepared, *, each=None, progress=False, key):
        """Draws, and statistics of a sampler without divergences."""
        posterior = SampledPosterior.of(model, jax.device_put(model.pool(prepared)))
        if posterior.centre is None and self.searched:
            mode = posterior_mode(model, posterior.prepared)
            by_name = np.argsort(list(mode.sites))
            root = np.linalg.cholesky(mode.covariance[np.ix_(by_name, by_name)])
            posterior = SampledPosterior(model, posterior.prepared, mode.x[by_name], root)
        rng = np.random.default_rng(np.asarray(jr.key_data(key)))
        shape, position, potential = (self.chains, self.draws), {}, np.zeros((self.chains, self.draws))
        for name, leaf in unobserved_structure(posterior.model, posterior.prepared).items():
            normals = rng.normal(size=(*shape, *leaf.shape))
            potential += (normals**2).reshape(*shape, -1).sum(-1) / 2
            if posterior.centre is None:
                centre, half = model.start_of(name, posterior.prepared)
                normals = centre + half * normals / 4
            position[name] = normals
        statistics = {
            "lp": -potential,
            "energy": potential + rng.chisquare(len(position), shape) / 2,
            "diverging": np.zeros(shape, bool),
            "n_steps": np.ones(shape, int),
            "acceptance_rate": np.ones(shape),
            "step_size": np.ones(shape),
        }
        return recorded_draws(
            posterior, prepared if each is None else each, {"position": position, "statistics": statistics}
        )
