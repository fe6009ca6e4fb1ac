"""NumPyro programs of observed tokens."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
import xarray as xr
from jaxtyping import ArrayLike

from sdeinfer._files import InputError
from sdeinfer.likelihood import AbstractModel, Assumptions, sample_or_fix
from sdeinfer.meanfield._flow import on_sphere
from sdeinfer.meanfield._laws import AbstractObservation, NoisyLayers, ObservedFlow, ObservedLayers
from sdeinfer.meanfield._path import TokenPath, token_path
from sdeinfer.parameters import Coordinates, Parameter

BETA = Parameter("beta", "β", "inverse temperature", "log", lambda: dist.LogNormal(np.log(3), 1))
STEP = Parameter("step", "η", "depth-time of a layer", "log", lambda: dist.LogNormal(np.log(0.1), 1.5))
NOISE = Parameter("noise", "σ", "standard deviation of the noise", "log", lambda: dist.LogNormal(np.log(0.1), 1.5))
SCALE = Parameter("scale", "s", "scale of the values", "log", lambda: dist.LogNormal(np.log(0.1), 1.5))

LATENT = ("start_normals", "values_normals")
"""Sites of latent normals, which have no public meaning of their own."""


@dataclasses.dataclass(frozen=True)
class TokenModel(AbstractModel):
    """A program of observed tokens, a function of a `TokenPath`.

    A program of your own samples its parameters, makes a flow by `path.flow_at`, and observes `NoisyLayers`,
    `ObservedFlow` or `ObservedLayers` with `obs=path.observed`.

    Attributes:
        parameters: scalar parameters that `TokenPath.assumptions` may give a prior.
        latent_start: whether the exact tokens at the first layer are latent; their mass matrix is then diagonal.
    """

    parameters: tuple[Parameter, ...] = ()
    latent_start: bool = False

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates of the parameters on the real line."""
        return Coordinates({parameter.name: parameter for parameter in self.parameters})

    @property
    def dense(self) -> bool | list[tuple[str, ...]]:
        """Sites with a dense block of the mass matrix; all if True."""
        return [tuple(sorted(parameter.name for parameter in self.parameters))] if self.latent_start else True

    def start_of(self, name: str, prepared: TokenPath) -> tuple[float, float]:
        """About the median of the prior: far from it, tokens cluster at once and chains take long to leave."""
        if name not in self.coordinates.sampled:
            return 0.0, 0.5 if name in LATENT else 2.0
        prior = prior_of(prepared, self.coordinates.sampled[name])
        return float(dist.biject_to(prior.support).inv(prior.icdf(0.5))), 0.5

    def reduce(self, data: xr.Dataset, assumptions: Assumptions) -> TokenPath:
        """The tokens as arrays."""
        return token_path(data, assumptions=assumptions)

    def entries(self, prepared: TokenPath) -> int:
        """Entries of the attention of all networks and layers."""
        networks, n, _ = prepared.initial.shape
        return networks * len(prepared.layers) * n**2


def token_model(model: Callable[..., None]) -> TokenModel:
    """Return a `TokenModel` unchanged; wrap any other program of a `TokenPath`.

    Raises:
        InputError: for an object that is not callable, and for a model of covariances.
    """
    if isinstance(model, TokenModel):
        return model
    if isinstance(model, AbstractModel) or not callable(model):
        raise InputError(f"model: a program of a TokenPath is needed, got {getattr(model, 'name', model)!r}")
    return _of_program(model)


@functools.lru_cache(maxsize=64)
def _of_program(program: Callable[..., None]) -> TokenModel:
    # One object per program: it is part of the keys of the caches of compiled functions.
    return TokenModel(program)


@functools.partial(TokenModel, parameters=(BETA, STEP, NOISE))
def one_step(path: TokenPath) -> None:
    """β, the step and the noise of layers that add noise, with the matrices of `path.flow`; see `NoisyLayers`."""
    beta, step, noise = _sampled(path, BETA, STEP, NOISE)
    numpyro.sample("tokens", NoisyLayers(path.flow_at(beta), step, noise, path), obs=path.observed)


@functools.partial(TokenModel, parameters=(BETA, SCALE, NOISE))
def symmetric_values(path: TokenPath) -> None:
    """The same with a latent symmetric value matrix V, which includes the step; its spectrum is a site.

    V = s · S with S from the Gaussian orthogonal ensemble, E S_ij² = (1 + δ_ij)/2. With heads of one attention, V is
    the mean of their value matrices, and no more is identified.
    """
    beta, scale, noise = _sampled(path, BETA, SCALE, NOISE)
    D = path.initial.shape[-1]
    rows, columns = np.triu_indices(D)
    normals = jnp.asarray(numpyro.sample("values_normals", dist.Normal(0, 1).expand([len(rows)]).to_event(1)))
    entries = scale * normals * np.where(rows == columns, 1.0, 0.5**0.5)
    symmetric = jnp.zeros((D, D)).at[rows, columns].set(entries).at[columns, rows].set(entries)
    values = jnp.asarray(numpyro.deterministic("values", symmetric))
    numpyro.deterministic("spectrum", jnp.linalg.eigvalsh(values))
    numpyro.sample("tokens", NoisyLayers(path.flow_at(beta, V=values), 1.0, noise, path), obs=path.observed)


@functools.partial(TokenModel, parameters=(BETA, STEP, NOISE), latent_start=True)
def trajectory(path: TokenPath) -> None:
    """β, the step and the noise of observations of the exact flow, with latent first tokens; see `ObservedFlow`."""
    _observe_exact_tokens(path, ObservedFlow)


@functools.partial(TokenModel, parameters=(BETA, STEP, NOISE), latent_start=True)
def layer_trajectory(path: TokenPath) -> None:
    """The same with exact layers in place of the flow, as in a network of few of them; see `ObservedLayers`."""
    _observe_exact_tokens(path, ObservedLayers)


def prior_of(path: TokenPath, parameter: Parameter) -> Any:
    """The prior of a parameter, or its fixed value."""
    replaced: dict[str, Any] = {name: prior.value for name, prior in path.assumptions.prior}
    assert parameter.prior is not None
    return replaced.get(parameter.name, parameter.prior())


def _sampled(path: TokenPath, *parameters: Parameter) -> list[ArrayLike]:
    return [sample_or_fix(parameter.name, prior_of(path, parameter)) for parameter in parameters]


def _observe_exact_tokens(path: TokenPath, law: type[AbstractObservation]) -> None:
    """Observe exact tokens with latent first ones, given the observed ones.

    With a flat prior on the sphere they have the law of the observation about themselves, since its density depends on
    their inner product only; and the observed ones are uniform, whatever the noise.
    """
    beta, step, noise = _sampled(path, BETA, STEP, NOISE)
    standard = dist.Normal(0, 1).expand(path.initial.shape).to_event(path.initial.ndim)
    normals = numpyro.sample("start_normals", standard)
    start: Any = numpyro.deterministic("start", on_sphere(path.initial + noise * normals))
    numpyro.sample("tokens", law(path.flow_at(beta), step, noise, path, start), obs=path.observed)
