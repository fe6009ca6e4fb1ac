"""Networks in groups, observed at every layer, with partially pooled parameters."""

from functools import partial

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float
from sdeinfer.models.full_path import full_path  # pyright: ignore[reportMissingImports]

from sdeinfer.likelihood import CovariancePath
from sdeinfer.likelihood._assumptions import sample_members
from sdeinfer.likelihood._model import GroupModel
from sdeinfer.likelihood._statistics import PathStatistics

SPREAD_SCALE = 0.5
"""Scale of the half-normal prior of the standard deviation between groups, in the real coordinates. A distance of 1 is
a factor e in τ0 or the gap, or γ = 0.38 against 0.62: about the width of the population's priors, whose standard
deviations are 1.8 (logit γ), 1 (log τ0) and 1.1 (log gap). Groups of similar networks should differ by less."""


@partial(GroupModel, ungrouped=full_path)
def hierarchical(path: PathStatistics) -> None:
    """Networks of one architecture in groups (partial pooling), each observed at every layer.

    With u = those of logit γ, log τ0 and log(c₊ − c₋) that the architecture has, group g has

        u_g ~ N(μ, σ²),    σ ~ |N(0, ½²)|.

    The sampled sites `gamma_offset`, `tau0_offset` and `c_gap_offset` reparameterise u_g, see `sample_members`.
    `gamma`, `tau0` and `c_gap` are the values at μ, the population's medians, with the same priors as in other models;
    `gamma_sd`, `tau0_sd` and `c_gap_sd` are σ; `group_gamma`, `group_tau0` and `group_c_gap`, over `group`, are the
    groups' values. The mean (c₊ + c₋)/2, which networks of one width do not identify, is common to all groups.
    """
    of_group = _sample_groups(path)
    of_network = {name: value[path.group_of_network] for name, value in of_group.items()}
    layer = path.assumptions.kind.with_parameters(of_network)
    with numpyro.plate("network", path.networks):
        numpyro.sample("covariance", CovariancePath(layer, path), obs=path.observed)


def _sample_groups(path: PathStatistics) -> dict[str, Float[Array, " groups"]]:
    """Draw the parameters of each group about those of the population."""
    assumptions = path.assumptions
    coordinates = assumptions.kind.coordinates
    mu = coordinates.unconstrained(assumptions.sample_parameters())
    # Fixed coordinates, and those on which the limit does not depend, such as the mean of the slopes, are common.
    u = jnp.repeat(mu[:, None], path.groups, axis=1)
    for place, (name, parameter) in enumerate(coordinates.sampled.items()):
        if parameter.identified and name not in assumptions.fixed:
            u = u.at[place].set(_sample_coordinate(name, mu[place], place, path))
    parameters = coordinates.constrained(u)
    for name, value in (parameters | coordinates.to_sampled(parameters)).items():
        if name not in coordinates.sampled or coordinates.sampled[name].identified:
            with numpyro.plate("group", path.groups):
                numpyro.deterministic(f"group_{name}", value)
    return parameters


def _sample_coordinate(name: str, mu: Float[Array, ""], place: int, path: PathStatistics) -> Float[Array, " groups"]:
    """Draw a coordinate of each group about that of the population, see `sample_members`."""
    sd = numpyro.sample(f"{name}_sd", dist.HalfNormal(SPREAD_SCALE))
    centre, precision = jnp.zeros((2, path.groups))
    if path.estimates is not None:
        centre, precision = path.estimates.centre[:, place], path.estimates.precision[:, place]
    return sample_members(f"{name}_offset", "group", mu, sd, centre, precision)
