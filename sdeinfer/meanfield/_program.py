"""Observed tokens: their law, the program of β, the step and the noise, and its problem for `si.fit`."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
import xarray as xr
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray
from numpy.typing import ArrayLike
from numpyro import handlers
from numpyro.distributions import constraints

from sdeinfer._files import InputError
from sdeinfer.infer._assume import pose
from sdeinfer.infer._chains import Draws
from sdeinfer.infer._predictive import labelled_predictions
from sdeinfer.infer._problem import NETWORK, AbstractProblem, Labels, Prepared, stamp
from sdeinfer.likelihood import AbstractModel
from sdeinfer.likelihood._assumptions import Prior, checked_priors, sample_or_fix
from sdeinfer.meanfield._flow import SelfAttentionFlow
from sdeinfer.meanfield._projected_normal import ProjectedNormal
from sdeinfer.meanfield._score_tests import score_tests
from sdeinfer.observation import validate_tokens
from sdeinfer.observation._arrays import as_array, in_order, labels_of_networks
from sdeinfer.observation._dataset import TOKEN_DIMS
from sdeinfer.parameters import Coordinates, Parameter

type Sites = Mapping[str, np.ndarray]

PARAMETERS = Coordinates(
    {
        "beta": Parameter("beta", "β", "inverse temperature", "log", lambda: dist.LogNormal(np.log(3), 1)),
        "step": Parameter("step", "η", "depth-time of a layer", "log", lambda: dist.LogNormal(np.log(0.1), 1.5)),
        "noise": Parameter("noise", "σ", "sd of the noise", "log", lambda: dist.LogNormal(np.log(0.1), 1.5)),
    }
)


def tokens_dataset(tokens: ArrayLike) -> xr.Dataset:
    """Tokens of every layer as a Dataset with `tokens` over network, layer, token, component, on the unit sphere.

    Arguments:
        tokens: hidden states, shape (networks, layers, tokens, D), the initial ones first. Their norms are divided out,
            as the normalisation of the next layer does. An xarray.DataArray may have its dimensions in any order.
    """
    labels = labels_of_networks(tokens)
    x = as_array(in_order(tokens, TOKEN_DIMS, "tokens") if isinstance(tokens, xr.DataArray) else tokens, "tokens")
    if x.ndim != len(TOKEN_DIMS):
        raise InputError(f"tokens: shape (networks, layers, tokens, D) is needed, got {x.shape}")
    if x.shape[1] < 2 or x.shape[3] < 2:
        raise InputError(f"tokens: at least two layers and two components are needed, got shape {x.shape}")
    x = x.astype(np.result_type(x.dtype, np.float32), copy=False)
    norms = np.linalg.norm(x, axis=-1, keepdims=True)
    wrong = np.argwhere(~((norms > 0) & np.isfinite(norms))[..., 0])
    if len(wrong):
        place = ", ".join(f"{name} {value}" for name, value in zip(TOKEN_DIMS[:-1], wrong[0], strict=True))
        raise InputError(f"tokens: {place} is zero or not finite")
    return xr.Dataset({"tokens": (TOKEN_DIMS, x / norms)}, coords={"layer": np.arange(x.shape[1])} | labels)


class TokenPath(eqx.Module):
    """Tokens of networks before the first and after each layer (None to sample them), with the flow, β left out."""

    initial: Float[Array, "networks n D"]
    observed: Float[Array, "networks layers n D"] | None
    flow: SelfAttentionFlow
    depth: int = eqx.field(static=True)
    prior: tuple[tuple[str, Prior], ...] = eqx.field(static=True, default=())

    def prior_of(self, name: str) -> Any:
        """The prior of a parameter, or its fixed value."""
        default = PARAMETERS.sampled[name].prior
        assert default is not None
        replaced = dict(self.prior)
        return replaced[name].value if name in replaced else default()

    def flow_at(self, beta: ArrayLike) -> SelfAttentionFlow:
        """The flow with this β."""
        return eqx.tree_at(lambda flow: flow.beta, self.flow, jnp.asarray(beta))

    def unobserved(self) -> "TokenPath":
        """The same without the tokens after the first layer, for NumPyro's `Predictive`."""
        return eqx.tree_at(lambda path: path.observed, self, None, is_leaf=lambda leaf: leaf is None)


class NoisyLayers(dist.Distribution):
    """Layers that add noise before they normalise: x ← N(x + step · F(x) + noise · ξ), ξ ~ N(0, I_D).

    F is the residual of the flow, and every transition a `ProjectedNormal`. One batch element is one network.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("flow", "step", "noise", "path")
    support = constraints.independent(constraints.sphere, 2)  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]

    def __init__(self, flow: SelfAttentionFlow, step: ArrayLike, noise: ArrayLike, path: TokenPath):
        self.flow, self.step, self.noise, self.path = flow, jnp.asarray(step), jnp.asarray(noise), path
        networks, *event = path.initial.shape
        super().__init__((networks,), (path.depth, *event))

    def before(self, value: Float[Array, "networks layers n D"]) -> Float[Array, "networks layers n D"]:
        """The tokens before each layer, given those after it."""
        return jnp.concatenate([self.path.initial[:, None], value[:, :-1]], axis=1)

    def means(self, value: Float[Array, "networks layers n D"]) -> Float[Array, "networks layers n D"]:
        """X + step · F(x) of each token x before a layer, given those after it."""
        before = self.before(value)
        networks, layers, n, _ = before.shape
        # A gradient keeps the attention of networks with 2²⁰ entries in all, or of one, at a time.
        together = min(networks, max(1, 2**20 // (layers * n**2)))
        return jax.lax.map(jax.checkpoint(self._moved), before, batch_size=together)

    def log_prob(self, value: ArrayLike, intermediates: list | None = None) -> Float[Array, " networks"]:
        """Log density of the tokens after the first layer of each network."""
        del intermediates
        value = jnp.asarray(value)
        return ProjectedNormal(self.means(value), self.noise).log_prob(value).sum(axis=(1, 2))

    def sample(self, key: PRNGKeyArray | None, sample_shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Sample networks from their first layer, shape (*sample_shape, networks, layers, n, D)."""
        assert key is not None

        def layer(x: Array, key: PRNGKeyArray) -> tuple[Array, Array]:
            x = ProjectedNormal(self._moved(x), self.noise).sample(key)
            return x, x

        def draw(key: PRNGKeyArray) -> Array:
            return jnp.moveaxis(jax.lax.scan(layer, self.path.initial, jr.split(key, self.path.depth))[1], 0, 1)

        networks = jax.lax.map(draw, jr.split(key, int(np.prod(sample_shape))))
        return networks.reshape(*sample_shape, *networks.shape[1:])

    def _moved(self, x: Float[Array, "sets n D"]) -> Float[Array, "sets n D"]:
        return jax.vmap(lambda x: self.flow.layer(x, self.step, normalise=False))(x)


def _one_step(path: TokenPath) -> None:
    beta, step, noise = (sample_or_fix(name, path.prior_of(name)) for name in PARAMETERS.sampled)
    numpyro.sample("tokens", NoisyLayers(path.flow_at(beta), step, noise, path), obs=path.observed)


@dataclasses.dataclass(frozen=True)
class TokenModel(AbstractModel):
    """The NumPyro program of β, the step and the noise of layers that add noise, see `NoisyLayers`, for `si.fit`.

    Attributes:
        flow: the flow with its known matrices, normalisation and MLP, whose β is ignored; None for Q = K = V = I.
    """

    program: Callable[[TokenPath], None] = dataclasses.field(default_factory=lambda: _one_step, init=False)
    # Equal for all flows, which come with the data, so that they share what is compiled.
    flow: SelfAttentionFlow | None = dataclasses.field(default=None, compare=False)

    coordinates = PARAMETERS

    @property
    def name(self) -> str:
        return "one_step"

    def start_of(self, name: str, prepared: TokenPath) -> tuple[Any, float]:
        """About the median of the prior: far from it, tokens cluster at once and chains take long to leave."""
        prior = prepared.prior_of(name)
        return dist.biject_to(prior.support).inv(prior.icdf(0.5)), 0.5

    def entries(self, prepared: TokenPath) -> int:
        """Entries of the attention of all networks and layers."""
        networks, n, _ = prepared.initial.shape
        return networks * prepared.depth * n**2


one_step = TokenModel()
"""The program for Q = K = V = I."""


@dataclasses.dataclass(frozen=True)
class Tokens(AbstractProblem):
    """Tokens over layers, with the flow of their known matrices, and priors that replace the defaults."""

    flow: SelfAttentionFlow
    priors: tuple[tuple[str, Prior], ...]

    @property
    def fixed(self) -> dict[str, float]:
        """The parameters with one value."""
        return {name: prior.value for name, prior in self.priors if isinstance(prior.value, float)}

    def prepare(self, data: xr.Dataset, largest_logit: float) -> Prepared:
        """The tokens as arrays."""
        del largest_logit
        x = jnp.asarray(data["tokens"].values, jnp.result_type(float))
        path = TokenPath(x[:, 0], x[:, 1:], self.flow, x.shape[1] - 1, self.priors)
        return Prepared(path, path, data)

    def predict(
        self,
        prepared: Prepared,
        samples: Sites,
        layers: Any,
        draws: Int[np.ndarray, " some"],
        *,
        law: Any,
        key: PRNGKeyArray,
    ) -> xr.Dataset:
        """Networks simulated from their first layer, one for each draw."""
        del layers, law
        chains = len(samples["noise"])
        chosen = {name: jnp.asarray(values[:, draws].reshape(-1)) for name, values in samples.items()}
        keys = jr.split(key, chains * len(draws))
        tokens = np.asarray(_simulated(self.model, prepared.networks.unobserved(), chosen, keys))
        dataset = xr.Dataset({"tokens": (("draw", *TOKEN_DIMS), tokens)})
        return labelled_predictions(
            dataset.assign_coords(prepared.data.isel(layer=slice(1, None)).coords), chains, draws
        )

    def labels(self, prepared: Prepared) -> Labels:
        """Parameters are numbers; a network has a density."""
        return Labels({}, {"tokens": [NETWORK]}, [], {NETWORK: prepared.data[NETWORK].values})

    def observed(self, prepared: Prepared) -> dict[str, xr.Dataset]:
        """The tokens after the first layer, and the first ones."""
        tokens = prepared.data["tokens"]
        first = tokens.isel(layer=0).rename("initial").to_dataset()
        return {"observed_data": tokens.isel(layer=slice(1, None)).to_dataset(), "constant_data": first}

    def label(self, labels: Labels, prepared: Prepared, before: Sites, draws: Draws) -> dict[str, xr.Dataset]:
        """Also the score tests of the law at the posterior means, for `check`."""
        path, samples = prepared.networks, draws.samples
        beta, step, noise = (np.mean(samples[name]) for name in PARAMETERS.sampled)
        sds = {name: float(np.log(samples[name]).std()) for name in PARAMETERS.sampled if name not in self.fixed}
        tests = score_tests(NoisyLayers(path.flow_at(beta), step, noise, path), path.observed, sds)
        return super().label(labels, prepared, before, draws) | {"score_tests": tests}

    def attributes(self, labels: Labels, prepared: Prepared, draws: Draws) -> dict[str, Any]:
        """Those of the data, and the fixed parameters."""
        fixed = {f"fixed_{name}": value for name, value in self.fixed.items()}
        identified = " ".join(draws.log_prior)
        return {**prepared.data.attrs, **fixed, "model": self.model.name, "identified": identified, **stamp()}


@pose.register
def _pose_tokens(
    model: TokenModel, data: xr.Dataset, *, architecture: Any, law: str, prior: Mapping[str, Any] | None
) -> tuple[xr.Dataset, Tokens]:
    """Tokens of every layer, see `tokens_dataset`, and the problem of fitting them."""
    del law
    if architecture is not None:
        raise InputError("architecture: known matrices of tokens are those of TokenModel(flow=…)")
    data = validate_tokens(data)
    if "layer" in data.coords and (np.diff(data["layer"].values) != 1).any():
        raise InputError(f"data: noisy layers need every layer, got {data['layer'].values}")
    flow = SelfAttentionFlow(1.0) if model.flow is None else model.flow
    jax.eval_shape(flow, jnp.asarray(data["tokens"].values[0, 0]))  # refuses matrices of another size
    return data, Tokens(model, flow, checked_priors(prior, model))


@functools.partial(jax.jit, static_argnums=0)
def _simulated(model: TokenModel, path: TokenPath, sites: dict[str, Array], keys: Key[Array, " draws"]) -> Array:
    def simulate(drawn: tuple[dict[str, Array], PRNGKeyArray]) -> Array:
        values, key = drawn
        return handlers.trace(handlers.substitute(handlers.seed(model, key), values)).get_trace(path)["tokens"]["value"]

    return jax.lax.map(simulate, (sites, keys))
