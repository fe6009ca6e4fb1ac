"""Partial pooling: members of a population, by a form that a sampler with one step size likes."""

from typing import Any

import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, Float


def sample_members(
    name: str, plate: str, mean: Any, sd: Any, centre: Float[Array, " members"], precision: Float[Array, " members"]
) -> Float[Array, " members"]:
    """Draw u_g ~ N(μ, σ²) as a function of z_g, which is approximately N(0, 1) in the posterior for every μ and σ.

    Without information in a member's data, the non-centred u_g = μ + σ z_g is suitable, also for σ near zero. For data
    that give û ± s, its z_g would have posterior standard deviation s/σ, which varies with σ, and a sampler with one
    step size is inefficient. Given μ, σ and the data, u_g is approximately N(a, b²) with b⁻² = σ⁻² + s⁻² and
    a = b² (μ/σ² + û/s²). Therefore

        u_g = a + b z_g,    z_g ~ N((μ − a)/b, σ²/b²),

    which gives u_g the law N(μ, σ²) for every û and s; s = ∞ is the non-centred form.

    Arguments:
        name: the site of z.
        plate: the plate of the members.
        mean: μ.
        sd: σ.
        centre: û.
        precision: s⁻².
    """
    information = sd**2 * precision
    ratio = jnp.sqrt(1 + information)  # σ/b
    with numpyro.plate(plate, len(centre)):
        z = numpyro.sample(name, dist.Normal(sd * precision * (mean - centre) / ratio, ratio))
    return jnp.asarray((mean + information * centre) / ratio**2 + sd / ratio * z)
