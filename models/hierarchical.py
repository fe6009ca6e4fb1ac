"""Every layer of networks in groups was observed; the groups' parameters resemble each other, by as much as they do."""

from typing import Literal

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
import xarray as xr
from jaxtyping import Array, ArrayLike, Float
from sdeinfer.models._priors import sample_parameters  # pyright: ignore[reportMissingImports]
from sdeinfer.models.full_path import full_path  # pyright: ignore[reportMissingImports]

from sdeinfer.layers import Architecture, FiniteWidth, Limit
from sdeinfer.likelihood import (
    FullPath,
    GroupedStatistics,
    constrained,
    grouped_statistics,
    observed_path,
    observing,
    unconstrained,
)

SPREAD_SCALE = 0.5
"""Of the prior of a standard deviation between groups. Two groups whose coordinates are 1 apart have τ0s, or gaps, a
factor e apart, or γs of 0.38 and 0.62: about as far as the priors of the population, whose standard deviations are 1.8,
1 and 1.1, let a single group be from anything. Groups of one kind of networks are nearer to each other."""

ACCEPTANCE = 0.98
"""The more groups, the more corners the posterior has: of σ near zero, and of a τ0 or a gap of which little is known.
Steps that suit other posteriors sometimes diverge there."""


def prepare(data: xr.Dataset) -> GroupedStatistics:
    """All that the likelihood needs of the data."""
    return grouped_statistics(data)


@observing(
    prepare,
    pool=GroupedStatistics.pooled,
    blocks=GroupedStatistics.blocks,
    path=observed_path,
    alike=full_path,
    acceptance=ACCEPTANCE,
)
def hierarchical(
    grouped: GroupedStatistics, *, architecture: Architecture, law: Literal["finite-width", "limit"] = "finite-width"
) -> None:
    """Networks of one architecture in groups (partial pooling), each observed at every layer.

    With u = (logit γ, log τ0, log(c₊ − c₋)), as far as the architecture has them, group g has

        u_g ~ N(μ, σ²),    σ ~ |N(0, ½²)|.

    What is sampled for it, `gamma_offset` and so on, is not centred at μ: see `_sample_coordinate`.
    `gamma`, `tau0` and `c_gap` are the values at μ, the population's medians, with the priors of every other model;
    `gamma_sd`, `tau0_sd` and `c_gap_sd` are σ; `group_gamma`, `group_tau0` and `group_c_gap`, over `group`, are those
    of the groups. The mean (c₊ + c₋)/2, which networks of one width do not know, is common to all.

    Arguments:
        grouped: the sufficient statistics of the data, as `prepare` or `infer.prepare` makes them; the data have a
            coordinate `group`.
        architecture: the kind of layer.
        law: "finite-width" or "limit", as in `full_path`.
    """
    path = grouped.path
    of_group = _sample_groups(sample_parameters(architecture), grouped)
    of_kind = {name: value[grouped.group] for name, value in of_group.items()}
    if path.adjustment is not None:
        of_kind = jax.vmap(lambda adjustment, parameters: adjustment(parameters))(path.adjustment, of_kind)

    def coefficients(parameters: dict[str, Array], width: Array) -> Limit | FiniteWidth:
        layer = architecture.layer(**parameters)
        return layer.limit() if law == "limit" else layer.finite_width(width)

    laws = jax.vmap(coefficients)(of_kind, path.widths)
    with numpyro.plate("network", path.networks):
        numpyro.sample("covariance", FullPath(laws, path), obs=path.weights)


def _sample_groups(population: dict[str, ArrayLike], grouped: GroupedStatistics) -> dict[str, Float[Array, " groups"]]:
    """The parameters of each group, about those of the population."""
    names = [name for name in ("gamma", "tau0") if name in population]
    names += ["c_gap"] if "c_plus" in population else []
    mu = unconstrained(population)
    # The mean of the slopes comes last, and is common to all.
    u = jnp.repeat(mu[:, None], grouped.groups, axis=1)
    for i, name in enumerate(names):
        u = u.at[i].set(_sample_coordinate(name, mu[i], i, grouped))
    found = constrained(tuple(population), u)
    for name, value in found.items():
        numpyro.deterministic(f"group_{name}", value)
    if "c_plus" in found:
        numpyro.deterministic("group_c_gap", found["c_plus"] - found["c_minus"])
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
    told = sd**2 * precision
    ratio = jnp.sqrt(1 + told)  # σ/b
    with numpyro.plate("group", grouped.groups):
        z = numpyro.sample(f"{name}_offset", dist.Normal(sd * precision * (mu - centre) / ratio, ratio))
    return (mu + told * centre) / ratio**2 + sd / ratio * z
