"""Assumptions of a fit: the kind of layer, the law of a layer, and priors; and draws by them in a program."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from jaxtyping import Array, ArrayLike, Float

from sdeinfer._files import InputError
from sdeinfer.layers import AbstractLayer
from sdeinfer.layers._templates import ARCHITECTURES
from sdeinfer.parameters import BIJECTIONS, Parameter
from sdeinfer.terms import AbstractTerm


@dataclasses.dataclass(frozen=True)
class Assumptions:
    """The inputs of a model besides the data; hashable, so that equal assumptions share compiled programs."""

    architecture: AbstractLayer | None = None
    law: Literal["finite-width", "limit"] = "finite-width"
    prior: tuple[tuple[str, "Prior"], ...] = ()

    @property
    def kind(self) -> AbstractLayer:
        """The architecture; raises an InputError if there is none."""
        if self.architecture is None:
            raise InputError(
                f"architecture: the data do not name it; choose one of {', '.join(ARCHITECTURES)}, or a layer"
            )
        return self.architecture

    @property
    def other_terms(self) -> tuple[AbstractTerm, ...]:
        """The terms of the architecture's limit beside the package's."""
        return () if self.architecture is None else self.architecture.other_terms

    def sample_layer(self) -> AbstractLayer:
        """Draw the layer from its prior inside a NumPyro program; sites have the names of the coordinates."""
        return self.kind.with_parameters(self.sample_parameters())

    def sample_parameters(self) -> dict[str, ArrayLike]:
        """Draw the parameters of the layer from their priors."""
        coordinates = self.kind.coordinates
        sampled = {name: sample_or_fix(name, self.prior_of(name)) for name in coordinates.sampled}
        values = coordinates.from_sampled(sampled)
        return {
            name: value if name in sampled else numpyro.deterministic(name, value) for name, value in values.items()
        }

    def prior_of(self, name: str) -> "dist.Distribution | float":
        """The prior of a sampled coordinate, or its fixed value."""
        replaced = dict(self.prior)
        if name in replaced:
            return replaced[name].value
        default = self.kind.coordinates.sampled[name].prior
        if default is None:
            raise InputError(f"prior: {name} has no default prior; give prior={{{name!r}: …}}")
        return default()

    @property
    def fixed(self) -> dict[str, float]:
        """Values of the fixed coordinates by name."""
        return {name: prior.value for name, prior in self.prior if not isinstance(prior.value, dist.Distribution)}


NOTHING_ASSUMED = Assumptions()
"""Default assumptions of data that were not prepared for a model."""


class Prior:
    """A prior distribution or a fixed value; hashable, compared by value."""

    def __init__(self, value: "dist.Distribution | float"):
        self.value = value
        leaves, structure = jax.tree.flatten(value)
        arrays = (np.asarray(leaf) for leaf in leaves)
        self._key = (structure, tuple((leaf.dtype.str, leaf.shape, leaf.tobytes()) for leaf in arrays))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Prior) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def checked_priors(prior: Mapping[str, Any] | None, kind: Any) -> tuple[tuple[str, Prior], ...]:
    """Check the priors that replace the defaults, of a layer or of what else has a name and coordinates."""
    coordinates, given = kind.coordinates, dict(prior or {})
    for names, sampled, rule in coordinates.rules:
        numbers = [given.get(name) for name in names]
        if rule is not None and all(isinstance(value, int | float) for value in numbers):
            for name in names:
                del given[name]
            given |= dict(zip(sampled, rule.to_sampled(*numbers), strict=True))
    for name, value in given.items():
        if name not in coordinates.sampled:
            made = [
                (names, sampled) for names, sampled, rule in coordinates.rules if rule is not None and name in names
            ]
            instead = f": give those of {' and '.join(made[0][1])}, which determine it" if made else ""
            raise InputError(
                f"prior: {kind.name} samples {', '.join(coordinates.sampled)}; got a prior of {name!r}{instead}"
            )
        given[name] = _checked(name, value, coordinates.sampled[name])
    return tuple((name, Prior(given[name])) for name in sorted(given))


def _checked(name: str, value: Any, parameter: Parameter) -> "dist.Distribution | float":
    bijection = BIJECTIONS[parameter.bijection]
    if not isinstance(value, dist.Distribution):
        number = np.asarray(value)
        if number.ndim or number.dtype.kind not in "fiu":
            raise InputError(f"prior: {name}: a NumPyro distribution or a number is needed, got {value!r}")
        fixed = float(number)
        with np.errstate(all="ignore"):
            inside = np.isfinite(bijection.to_real(np, np.float64(fixed)))
        if not inside:
            ends = f"between {bijection.above:g} and {bijection.most:g}, ends excluded"
            raise InputError(f"prior: {name}: a fixed value must be {ends}, got {fixed:g}")
        return fixed
    if isinstance(value, dist.ImproperUniform) or (value.support is not None and value.support.is_discrete):
        message = f"a continuous distribution with draws is needed, got {type(value).__name__}"
        raise InputError(f"prior: {name}: {message}")
    if value.batch_shape or value.event_shape:
        raise InputError(f"prior: {name}: a distribution of one number is needed, got shape {value.shape()}")
    ends = (("lower", -np.inf), ("upper", np.inf))
    low, high = (float(getattr(value.support, f"{end}_bound", default)) for end, default in ends)
    if low < bijection.above or high > bijection.most:
        raise InputError(f"prior: {name} must be {bijection.range}; {type(value).__name__} is on ({low:g}, {high:g})")
    return value


def sample_or_fix(name: str, prior: Any) -> ArrayLike:
    """A site by its prior; a deterministic one for a number."""
    if isinstance(prior, dist.Distribution):
        return numpyro.sample(name, prior)  # pyright: ignore[reportReturnType]
    return numpyro.deterministic(name, jax.numpy.asarray(prior, float))  # pyright: ignore[reportReturnType]


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
    """
    information = sd**2 * precision
    ratio = jnp.sqrt(1 + information)  # σ/b
    with numpyro.plate(plate, len(centre)):
        z = numpyro.sample(name, dist.Normal(sd * precision * (mean - centre) / ratio, ratio))
    return jnp.asarray((mean + information * centre) / ratio**2 + sd / ratio * z)
