"""Increments of residual branches: one strength for each kind of block, one for each layer, or partial pooling."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import ArrayLike, Float

from sdeinfer.likelihood._assumptions import sample_members, sample_or_fix
from sdeinfer.likelihood._increments import BranchModel, BranchPath, Increments

SPREAD_SCALE = 0.5
"""Scale of the half-normal prior of the standard deviation of log strengths over depth; 0.5 is a factor of 1.6."""


@BranchModel
def branches(path: BranchPath) -> None:
    """One strength for each block of a layer, such as `attention.strength` and `mlp.strength`, common to all layers.

    Gains and temperatures are those of the architecture; a prior for `mlp.gain` or `attention.temperature` makes them
    latent.
    """
    _observe(path, [sample_or_fix(name, path.prior_of(name)) for name in path.strengths])


@BranchModel
def every_branch(path: BranchPath) -> None:
    """A strength for each block of each layer, with independent priors; strengths have the dimension `layer`."""
    strengths = []
    for name in path.strengths:
        with numpyro.plate("layer", path.layers):
            strengths.append(sample_or_fix(name, path.prior_of(name)))
    _observe(path, strengths)


@BranchModel
def branches_over_depth(path: BranchPath) -> None:
    """Strengths of layers about that of their block (partial pooling): log g_ℓ ~ N(log g, σ²), σ ~ |N(0, ½²)|.

    `attention.strength` is g, `attention.strength_sd` is σ, and `attention.layer_strength` holds the values of layers.
    The site `attention.strength_offset` reparameterises them, see `sample_members`.
    """
    strengths = []
    for block, name in enumerate(path.strengths):
        middle = jnp.log(jnp.asarray(sample_or_fix(name, path.prior_of(name))))
        sd = numpyro.sample(f"{name}_sd", dist.HalfNormal(SPREAD_SCALE))
        of_layer = sample_members(f"{name}_offset", "layer", middle, sd, *path.estimates(block))
        with numpyro.plate("layer", path.layers):
            strengths.append(numpyro.deterministic(name.replace("strength", "layer_strength"), jnp.exp(of_layer)))
    _observe(path, strengths)


def _observe(path: BranchPath, strengths: Sequence[Float[ArrayLike, "*layers"]]) -> None:
    """Observe the increments; strengths are of each block, for all layers or for each."""
    values = jnp.stack([jnp.broadcast_to(strength, path.layers) for strength in strengths], axis=1).reshape(-1)
    law = Increments(path, values[: len(path.part)], path.sample_shapes())
    numpyro.sample("increments", law, obs=path.observed)
