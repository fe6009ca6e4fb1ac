"""Laws of observed tokens: noise in every layer, or on observations of the exact flow."""

import math
from typing import Any

import diffrax
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PRNGKeyArray
from numpyro.distributions import Distribution, constraints

from sdeinfer._files import InputError
from sdeinfer.meanfield._flow import SelfAttentionFlow, on_sphere
from sdeinfer.meanfield._path import TokenPath
from sdeinfer.meanfield._projected_normal import ProjectedNormal
from sdeinfer.meanfield._solve import OnSphere

ENTRIES = 2**20
"""Bound on the entries of the attention of all networks that a gradient keeps at a time."""


class AbstractTokenLaw(Distribution):
    """Law of the tokens of networks after their first observed layer, given a flow; one batch element is one network.

    Attributes:
        flow: the flow.
        step: depth-time of a layer; 1 if the value matrix includes it.
        noise: standard deviation of the noise: a number, or an array that broadcasts to (networks, layers, n).
        path: the data.
        start: tokens at the first observed layer, shape (networks, n, D); if None, the observed ones.
    """

    arg_constraints: dict[str, Any] = {}
    pytree_data_fields = ("flow", "step", "noise", "path", "start")
    support = constraints.independent(constraints.sphere, 2)  # pyright: ignore[reportAssignmentType, reportIncompatibleMethodOverride]
    needs_every_layer = False

    def __init__(
        self,
        flow: SelfAttentionFlow,
        step: ArrayLike,
        noise: ArrayLike,
        path: TokenPath,
        start: Float[Array, "networks n D"] | None = None,
    ):
        if self.needs_every_layer and not path.every_layer:
            raise InputError(f"data: noisy layers need every layer, got those after the first at {path.layers}")
        self.flow, self.step, self.noise, self.path = flow, jnp.asarray(step), jnp.asarray(noise), path
        self.start = path.initial if start is None else start
        networks, *event = path.initial.shape
        super().__init__((networks,), (len(path.layers), *event))

    def sample(self, key: PRNGKeyArray | None, sample_shape: tuple[int, ...] = ()) -> Float[Array, "..."]:
        """Sample networks from their first observed layer, shape (*sample_shape, networks, layers, n, D)."""
        assert key is not None
        if not sample_shape:
            return self._draw(key)
        drawn = jax.lax.map(self._draw, jr.split(key, math.prod(sample_shape)))
        return drawn.reshape(*sample_shape, *drawn.shape[1:])

    def means(self, value: Float[Array, "networks layers n D"]) -> Float[Array, "networks layers n D"]:
        """Mean of each token before its noise and its projection to the sphere, given the networks."""
        raise NotImplementedError

    def log_prob(self, value: ArrayLike, intermediates: list | None = None) -> Float[Array, " networks"]:
        """Log density of each network; `value` are the tokens after the first layer."""
        del intermediates
        value = jnp.asarray(value)
        return ProjectedNormal(self.means(value), self.noise).log_prob(value).sum(axis=(1, 2))

    def scales(self) -> Float[Array, "networks layers n"]:
        """Standard deviation of the noise of each token."""
        return jnp.broadcast_to(self.noise, (*self.batch_shape, *self.event_shape[:-1]))

    def _draw(self, key: PRNGKeyArray) -> Float[Array, "networks layers n D"]:
        raise NotImplementedError

    def _moved(self, x: Float[Array, "sets n D"]) -> Float[Array, "sets n D"]:
        """X + step · F(x) of each token x of sets of tokens."""
        return jax.vmap(lambda x: self.flow.layer(x, self.step, normalise=False))(x)


class NoisyLayers(AbstractTokenLaw):
    """Layers that add noise before they normalise: x ← N(x + step · F(x) + noise · ξ), ξ ~ N(0, I_D).

    Every transition is a `ProjectedNormal`, so that the density is exact. What a layer does beside the flow, as by an
    MLP or heads that the flow leaves out, is noise. The path must have every layer.
    """

    needs_every_layer = True

    def before(self, value: Float[Array, "networks layers n D"]) -> Float[Array, "networks layers n D"]:
        """The tokens before each layer, given those after it."""
        return jnp.concatenate([self.start[:, None], value[:, :-1]], axis=1)

    def means(self, value: Float[Array, "networks layers n D"]) -> Float[Array, "networks layers n D"]:
        """X + step · F(x) of each token x before a layer."""
        before = self.before(value)
        networks, layers, n, _ = before.shape
        together = max(1, ENTRIES // (layers * n**2))
        if together >= networks:
            return jax.vmap(self._moved)(before)
        return jax.lax.map(jax.checkpoint(self._moved), before, batch_size=together)

    def _draw(self, key: PRNGKeyArray) -> Float[Array, "networks layers n D"]:
        def layer(x: Array, of_layer: tuple[Array, Array]) -> tuple[Array, Array]:
            number, scale = of_layer
            x = ProjectedNormal(self._moved(x), scale).sample(jr.fold_in(key, number))
            return x, x

        of_layers = jnp.asarray(self.path.layers), jnp.moveaxis(self.scales(), 1, 0)
        found = jax.lax.scan(layer, self.start, of_layers)[1]
        return jnp.moveaxis(found, 0, 1)


class AbstractObservation(AbstractTokenLaw):
    """Observations of exact tokens with independent noise: x_ℓ = N(exact_ℓ + noise · ξ), ξ ~ N(0, I_D).

    `start` are the exact tokens at the first observed layer.
    """

    def exact(self) -> Float[Array, "networks layers n D"]:
        """The exact tokens at the observed layers."""
        raise NotImplementedError

    def means(self, value: Float[Array, "networks layers n D"]) -> Float[Array, "networks layers n D"]:
        """The exact tokens, whatever the observed ones."""
        del value
        return self.exact()

    def _draw(self, key: PRNGKeyArray) -> Float[Array, "networks layers n D"]:
        return ProjectedNormal(self.exact(), self.noise).sample(key)


class ObservedFlow(AbstractObservation):
    """Observations of the exact flow with independent noise: x_ℓ = N(x(step · ℓ) + noise · ξ), ξ ~ N(0, I_D).

    The flow is solved by one step of Tsit5 for each layer. Its error is 4e-9 at β = 4, step = 0.2 and 2e-6 at β = 9,
    step = 0.5; `check` compares `solver_error` with the posterior.
    """

    def solver_error(self) -> Float[Array, ""]:
        """√Σ|x − x′|² over the noise, of the solution x and that of half the step, x′.

        A change of the means of this size moves no parameter by more posterior standard deviations, to first order.
        """
        squares = ((self.exact() - self.exact(steps=2)) ** 2).sum(axis=-1)
        return jnp.sqrt((squares / self.scales() ** 2).sum())

    def exact(self, *, steps: int = 1) -> Float[Array, "networks layers n D"]:
        """The flow at the observed layers, by so many steps of the solver for each layer."""
        # Time is counted in layers, so that the grid is known when the program is compiled.
        count = self.path.layers[-1]
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, x, args: args[1] * jax.vmap(args[0])(x)),
            OnSphere(),
            t0=0.0,
            t1=float(count),
            dt0=1 / steps,
            y0=self.start,
            args=(self.flow, self.step),
            saveat=diffrax.SaveAt(ts=list(map(float, self.path.layers))),
            max_steps=steps * count,
            adjoint=diffrax.RecursiveCheckpointAdjoint(checkpoints=steps * count),
            throw=False,
        )
        assert solution.ys is not None
        return jnp.moveaxis(solution.ys, 0, 1)


class ObservedLayers(AbstractObservation):
    """Observations of exact layers x ← N(x + step · F(x)) with independent noise, in place of the flow."""

    def exact(self) -> Float[Array, "networks layers n D"]:
        """The tokens after the exact layers."""

        def layer(x: Array, _: None) -> tuple[Array, Array]:
            x = on_sphere(self._moved(x))
            return x, x

        found = jax.lax.scan(layer, self.start, length=self.path.layers[-1])[1]
        return jnp.moveaxis(found[jnp.asarray(self.path.layers) - 1], 0, 1)
