"""The projected normal distribution on spheres of any dimension, with its log density in closed form."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jax.scipy.stats import norm
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray
from numpyro.distributions import Distribution, constraints

from sdeinfer.meanfield._flow import on_sphere


class ProjectedNormal(Distribution):
    """Law of x = y/‖y‖ on the sphere S^{D−1}, with y ~ N(mean, scale² I_D).

    NumPyro's distribution of this name has a density for D = 2 and 3 and scale 1; this one for every D, without
    cancellation for small scales:

        log p(x) = −(D − 1)/2 log 2π − (‖m‖² − t²)/2 + log N_{D−1}(t),    m = mean/scale, t = ⟨m, x⟩,

    where N_k(t) = E max(z, 0)^k for z ~ N(t, 1).

    Attributes:
        mean: mean of y, shape (…, D).
        scale: standard deviation of every component of y.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("location", "scale")
    support = constraints.sphere  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, mean: ArrayLike, scale: ArrayLike):
        self.location, self.scale = jnp.asarray(mean), jnp.asarray(scale)
        shape = jnp.broadcast_shapes(self.location.shape[:-1], self.scale.shape)
        super().__init__(shape, self.location.shape[-1:])

    def sample(self, key: PRNGKeyArray | None, sample_shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Sample points on the sphere, shape (*sample_shape, …, D)."""
        assert key is not None
        normals = jr.normal(key, self.shape(sample_shape), self.location.dtype)
        return on_sphere(self.location + self.scale[..., None] * normals)

    def log_prob(self, value: ArrayLike, intermediates: list | None = None) -> Float[Array, "..."]:
        """Log density with respect to the area of the sphere."""
        del intermediates
        x = jnp.asarray(value)
        k = x.shape[-1] - 1
        along = (x * self.location).sum(axis=-1)
        across = self.location - along[..., None] * x
        normal = -((across**2).sum(axis=-1)) / (2 * self.scale**2) - k / 2 * math.log(2 * math.pi)
        return normal + log_moment(along / self.scale, k)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def log_moment(t: Float[Array, "*batch"], k: int) -> Float[Array, "*batch"]:
    """Log N_k(t), N_k = E max(z, 0)^k of z ~ N(t, 1), k ≥ 1."""
    return _log_moment_and_ratio(t, k)[0]


@log_moment.defjvp
def _(k: int, primals: tuple[Array], tangents: tuple[Array]) -> tuple[Array, Array]:
    value, ratio = _log_moment_and_ratio(*primals, k)
    return value, k / ratio * tangents[0]


def _log_moment_and_ratio(t: Float[Array, "*batch"], k: int) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
    """Log N_k(t) and R_k = N_k/N_{k−1}, of which (log N_k)′ = k/R_k.

    R_{j+1} = t + j/R_j, with R_1 = t + φ(t)/Φ(t). Forwards this is stable for positive t. For negative t, N_j is the
    minimal solution of the recursion, errors grow forwards by a factor of about exp(2 |t| √k), and the ratios are
    computed backwards, from 256 beyond the last one that is needed.
    """
    least, extra = -min(2.0, 6 / k**0.5), 256

    def forwards(t: Array) -> tuple[Array, Array]:
        ratio = t + jnp.exp(norm.logpdf(t) - norm.logcdf(t))
        total = jnp.log(ratio)
        for j in range(1, k):
            ratio = t + j / ratio
            total += jnp.log(ratio)
        return total, ratio

    def backwards(t: Array) -> tuple[Array, Array]:
        last = k + extra
        first = 2 * last / (jnp.sqrt(t**2 + 4 * last) - t)
        ratio = lower = jax.lax.fori_loop(1, extra + 1, lambda i, ratio: (last - i) / (ratio - t), first)
        total = jnp.log(ratio)
        for j in range(k - 1, 0, -1):
            lower = j / (lower - t)
            total += jnp.log(lower)
        return total, ratio

    def both(t: Array) -> tuple[Array, Array]:
        low = t < least
        of_low, of_high = backwards(jnp.where(low, t, least)), forwards(jnp.where(low, 0.0, t))
        return jax.tree.map(lambda a, b: jnp.where(low, a, b), of_low, of_high)

    total, ratio = jax.lax.cond((t < least).any(), both, forwards, t)
    return norm.logcdf(t) + total, ratio
