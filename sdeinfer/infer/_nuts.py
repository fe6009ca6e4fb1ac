"""NumPyro's NUTS, compiled once per process, model, length of warmup and shape of the pooled data.

`numpyro.infer.MCMC` compiles for every object and every data set. Here the data are an argument of the compiled
function. The sampler uses pooled data, whose size does not grow with the number of networks; the likelihoods of single
networks are computed afterwards for the kept draws. Tests: `tests/infer/test_fit.py`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from numpyro import infer
from numpyro.infer.util import ParamInfo

from sdeinfer._compiler import RUN_ONCE
from sdeinfer.infer._posterior import Posterior
from sdeinfer.infer._samplers import AbstractMarkovChain


@dataclasses.dataclass(frozen=True)
class NUTS(AbstractMarkovChain):
    """NumPyro's NUTS with a dense mass matrix, or the blocks of `AbstractModel.dense`."""

    def start(self, posterior: Posterior, key: PRNGKeyArray) -> Any:
        """The state returned by NumPyro's `init`.

        The gradient is that of the program that has found the mode, so that no other is compiled; JAX cannot trace it.
        """
        state = _initial_state(self, posterior, key)
        value, slope = posterior.potential_and_slope(jax.device_get(state.z))
        return state._replace(potential_energy=value, z_grad=slope)

    def starts(self, posterior: Posterior, key: PRNGKeyArray) -> tuple[Any, ...]:
        """The initial states of all chains."""
        return tuple(self.start(posterior, jr.fold_in(key, np.uint32(chain))) for chain in range(self.chains))

    def step(self, posterior: Posterior, state: Any) -> tuple[Any, dict[str, Array], dict[str, Array]]:
        """One iteration of NumPyro's kernel."""
        kernel, _ = self.bind(posterior, state.rng_key, ParamInfo(state.z, state.potential_energy, state.z_grad))
        state = kernel.sample(state, (), {})
        statistics = {
            "lp": -state.potential_energy,
            "energy": state.energy,
            "diverging": state.diverging,
            "n_steps": state.num_steps,
            "acceptance_rate": state.accept_prob,
            "step_size": state.adapt_state.step_size,
        }
        return state, state.z, statistics

    def bind(self, posterior: Posterior, key: Array, start: ParamInfo) -> tuple[infer.NUTS, Any]:
        """The kernel, bound to this posterior, and the state of a chain at `start`.

        `init` binds a NumPyro kernel, so every trace has to call it. Since `start` includes the potential and its
        gradient, `init` does not compute them.
        """
        model = posterior.model
        settings: dict[str, Any] = {"dense_mass": model.dense, "target_accept_prob": model.acceptance}
        kernel = infer.NUTS(potential_fn=posterior.potential, **settings)
        return kernel, kernel.init(key, self.warmup, start)


@functools.partial(jax.jit, static_argnums=0, compiler_options=RUN_ONCE)
def _initial_state(sampler: NUTS, posterior: Posterior, key: PRNGKeyArray) -> Any:
    """A state whose potential and gradient are still to be filled in."""
    z = posterior.initial_position(key)
    return sampler.bind(posterior, jr.key_data(key), ParamInfo(z, jnp.zeros(()), jax.tree.map(jnp.zeros_like, z)))[1]
