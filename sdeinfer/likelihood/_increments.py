"""Increments of residual branches: prepared data, their distribution, and models of them.

Tests: `tests/models/test_branches.py`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
import xarray as xr
from jaxtyping import Array, ArrayLike, Float, PRNGKeyArray
from numpyro.distributions import constraints

from sdeinfer._files import InputError
from sdeinfer.blocks._block import STRENGTH
from sdeinfer.blocks._coefficients import LARGEST_FACTOR, LOG_FACTORS, branch_coefficients, interpolated
from sdeinfer.blocks._information import adjusted_coefficients
from sdeinfer.blocks._order import BlockOrder
from sdeinfer.likelihood._assumptions import Prior, checked_priors, sample_or_fix
from sdeinfer.likelihood._model import AbstractModel


class BranchPath(eqx.Module):
    """The increments of networks' branches, and the assumptions on their blocks."""

    coefficients: Float[Array, "networks branches grid 4"]
    observed: Float[Array, "networks branches"]
    own_shapes: Float[Array, " blocks"]
    part: tuple[int, ...] = eqx.field(static=True)
    strengths: tuple[str, ...] = eqx.field(static=True)
    shapes: tuple[str, ...] = eqx.field(static=True)
    prior: tuple[tuple[str, Prior], ...] = eqx.field(static=True, default=())

    @classmethod
    def of(cls, data: xr.Dataset, order: BlockOrder, prior: Mapping[str, Any] | None = None) -> "BranchPath":
        """The path of a Dataset of branches."""
        given = checked_priors(prior, order)
        for name, shape in order.shapes.items():
            fixed = dict(given).get(name, Prior(shape)).value
            if isinstance(fixed, float) and not 1 / LARGEST_FACTOR <= fixed / shape <= LARGEST_FACTOR:
                raise InputError(
                    f"prior: {name}: must be within a factor of {LARGEST_FACTOR:g} of the block's own {shape:g}, "
                    f"got {fixed:g}"
                )
        coefficients = jnp.asarray(adjusted_coefficients(branch_coefficients(data, order), data, order))
        return cls(
            coefficients,
            jnp.zeros(coefficients.shape[:2]),
            jnp.asarray(list(order.shapes.values()), float),
            part=order.part,
            strengths=tuple(order.strengths),
            shapes=tuple(order.shapes),
            prior=given,
        )

    @property
    def layers(self) -> int:
        """Number of layers; the last may be without its last blocks."""
        return -(-len(self.part) // len(self.strengths))

    def prior_of(self, name: str) -> Any:
        """The prior of a strength, or its fixed value."""
        replaced = dict(self.prior)
        assert STRENGTH.prior is not None
        return replaced[name].value if name in replaced else STRENGTH.prior()

    def estimates(self, block: int) -> tuple[Float[Array, " layers"], Float[Array, " layers"]]:
        """Estimates of log g of a block in each layer, at its own gain or temperature, and their precisions."""
        middle = self.coefficients[:, :, len(LOG_FACTORS) // 2].sum(0)
        branches = np.flatnonzero(np.asarray(self.part) == block)
        # −χ²/2 is a polynomial in log g², twice log g; a last layer without the block has no precision.
        linear, quadratic = (
            jnp.zeros(self.layers).at[: len(branches)].set(middle[branches, degree]) for degree in (1, 2)
        )
        return -linear / jnp.where(quadratic < 0, quadratic, -1.0) / 4, -8 * quadratic

    def sample_shapes(self) -> Float[Array, " blocks"]:
        """Draw the gains and temperatures that have a prior; log factors to the blocks' own values."""
        given = dict(self.prior)
        log_factors = [
            jnp.log(jnp.asarray(sample_or_fix(name, given[name].value)) / shape) if name in given else jnp.zeros(())
            for name, shape in zip(self.shapes, self.own_shapes, strict=True)
        ]
        return jnp.stack(log_factors)


class Increments(dist.Distribution):
    """The increments of all branches, given strengths, gains and temperatures; independent given what is read."""

    support = constraints.independent(constraints.real, 0)  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, path: BranchPath, strengths: Float[Array, " branches"], log_factors: Float[Array, " blocks"]):
        self.path, self.strengths, self.log_factors = path, strengths, log_factors
        super().__init__(batch_shape=path.observed.shape)

    def log_prob(self, value: ArrayLike, intermediates: list | None = None) -> Float[Array, "networks branches"]:
        """Log density of each increment."""
        del value, intermediates
        densities = jnp.zeros(self.batch_shape)
        for number in range(len(self.path.shapes)):
            branches = np.flatnonzero(np.asarray(self.path.part) == number)
            log_scale = self.log_factors[number]
            inside = jnp.abs(log_scale) <= LOG_FACTORS[-1]
            terms = interpolated(self.path.coefficients[:, branches], jnp.where(inside, log_scale, 0.0))
            log_factor = 2 * jnp.log(self.strengths[branches])
            density = terms[..., 0] + terms[..., 1] * log_factor + terms[..., 2] * log_factor**2 + terms[..., 3]
            densities = densities.at[:, branches].set(jnp.where(inside, density, -jnp.inf))
        return densities

    def sample(self, key: PRNGKeyArray | None, sample_shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Zeros: the density has the observed increments in its coefficients."""
        del key
        return jnp.zeros((*sample_shape, *self.batch_shape))


@dataclasses.dataclass(frozen=True)
class BranchModel(AbstractModel):
    """A program of the increments of residual branches, a function of a `BranchPath`."""
