"""Every layer of networks in groups was observed; their parameters are partially pooled."""

from functools import partial

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float
from sdeinfer.models.full_path import full_path  # pyright: ignore[reportMissingImports]

from sdeinfer.likelihood import Assumptions, CovariancePath, GroupedStatistics, Groups

SPREAD_SCALE = 0.5
"""Of the prior of a standard deviation between groups. Two groups whose coordinates are 1 apart have τ0s, or gaps, a
factor e apart, or γs of 0.38 and 0.62: about as far as the priors of the population, whose standard deviations are 1.8,
1 and 1.1, let a single group be from anything. Groups of one kind of networks are nearer to each other."""


@partial(Groups, ungrouped=full_path)
def hierarchical(grouped: GroupedStatistics) -> None:
    """Networks of one architecture in groups (partial pooling), each observed at every layer.

    With u = (logit γ, log τ0, log(c₊ − c₋)), as far as the architecture has them, group g has

        u_g ~ N(μ, σ²),    σ ~ |N(0, ½²)|.

    What is sampled for it, `gamma_offset` and so on, is not centred at μ: see `_sample_coordinate`.
    `gamma`, `tau0` and `c_gap` are the values at μ, the population's medians, with the priors of every other model;
    `gamma_sd`, `tau0_sd` and `c_gap_sd` are σ; `group_gamma`, `group_tau0` and `group_c_gap`, over `group`, are those
    of the groups. The mean (c₊ + c₋)/2, which networks of one width do not know, is common to all.

    Arguments:
        grouped: the data, as `sdeinfer.prepare` makes them of a Dataset with a coordinate `group`.
    """
    path, assumptions = grouped.path, grouped.assumptions
    of_group = _sample_groups(assumptions, grouped)
    own = {name: value[grouped.group_of_network] for name, value in of_group.items()}
    layer = assumptions.kind.layer(**own)
    with numpyro.plate("network", path.networks):
        numpyro.sample("covariance", CovariancePath(layer, path), obs=path.observed)


def _sample_groups(assumptions: Assumptions, grouped: GroupedStatistics) -> dict[str, Float[Array, " groups"]]:
    """The parameters of each group, about those of the population."""
    coordinates = assumptions.kind.coordinates
    mu = coordinates.unconstrained(assumptions.sample_parameters())
    # Coordinates that the limit does not depend on, such as the mean of the slopes, are common to all, and so are fixed
    # ones.
    u = jnp.repeat(mu[:, None], grouped.groups, axis=1)
    for place, (name, parameter) in enumerate(coordinates.sampled.items()):
        if parameter.identified and name not in assumptions.fixed:
            u = u.at[place].set(_sample_coordinate(name, mu[place], place, grouped))
    found = coordinates.constrained(u)
    for name, value in (found | coordinates.to_sampled(found)).items():
        if name not in coordinates.sampled or coordinates.sampled[name].identified:
            numpyro.deterministic(f"group_{name}", value)
    return found


def _sample_coordinate(
    name: str, mu: Float[Array, ""], place: int, grouped: GroupedStatistics
) -> Float[Array, " groups"]:
    """u_g ~ N(μ, σ²), by way of a z_g that is about N(0, 1) in the posterior whatever μ and σ are.

    Where a group's data alone say nothing, u_g = μ + σ z_g: σ may be near zero. Where they say û ± s, z_g of this kind
    would be known the better the larger σ, to s/σ, which a sampler of one step size cannot follow. The law of u_g given
    μ, σ and the data is then N(a, b²), b⁻² = σ⁻² + s⁻² and a = b² (μ/σ² + û/s²), up to the prior of the rest, and

        u_g = a + b z_g,    z_g ~ N((μ − a)/b, σ²/b²)

    has the same law for every û and s. The first is its case s = ∞.
    """
    sd = numpyro.sample(f"{name}_sd", dist.HalfNormal(SPREAD_SCALE))
    centre, precision = jnp.zeros((2, grouped.groups))
    if grouped.estimates is not None:
        centre, precision = grouped.estimates.centre[:, place], grouped.estimates.precision[:, place]
    marginal_information = sd**2 * precision
    ratio = jnp.sqrt(1 + marginal_information)  # σ/b
    with numpyro.plate("group", grouped.groups):
        z = numpyro.sample(f"{name}_offset", dist.Normal(sd * precision * (mu - centre) / ratio, ratio))
    return (mu + marginal_information * centre) / ratio**2 + sd / ratio * z
