"""NumPyro's NUTS, compiled once per process, model, length of warmup and shape of the pooled data.

`numpyro.infer.MCMC` compiles for every object and every data set. Here the data are an argument of the compiled
function. The sampler uses pooled data, whose size does not grow with the number of networks; the likelihoods of single
networks are computed afterwards for the kept draws.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.random as jr
import numpy as np
from jaxtyping import Array, PRNGKeyArray
from numpyro import infer
from numpyro.infer.util import ParamInfo

from sdeinfer.infer._densities import latent_structure
from sdeinfer.infer._mode import potential_and_slope
from sdeinfer.infer._posterior import Posterior
from sdeinfer.infer._samplers import AbstractMarkovChain


@dataclasses.dataclass(frozen=True)
class NUTS(AbstractMarkovChain):
    """NumPyro's NUTS with a dense mass matrix, or the blocks of `AbstractModel.dense`."""

    def start(self, posterior: Posterior, key: PRNGKeyArray) -> Any:
        """The state returned by NumPyro's `init`."""
        z = posterior.initial_position(key)
        slope = jax.value_and_grad(posterior.potential)(z)
        _, state = self.bind(posterior, jr.key_data(key), ParamInfo(z, *slope))
        return state

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

    def initial_states(self, posterior: Posterior, key: PRNGKeyArray) -> tuple[Any, ...]:
        """Initial states uniform in the intervals of `AbstractModel.start_of`, without compiling `start`.

        NumPyro also searches for a start of positive density; the density of these models is positive everywhere.
        """
        model, prepared = posterior.model, posterior.prepared
        words, structure = np.asarray(jr.key_data(key)).ravel(), latent_structure(model, prepared)
        keys, starts = [], []
        for chain in range(self.chains):
            random = np.random.default_rng([chain, *words])
            z = {}
            for name, leaf in structure.items():
                centre, half = model.start_of(name, prepared)
                z[name] = random.uniform(centre - half, centre + half, leaf.shape).astype(leaf.dtype)
            value, slope = potential_and_slope(model, prepared, posterior.unconstrained(z))
            starts.append(ParamInfo(z, value, posterior.pulled_back(slope)))
            keys.append(random.integers(2**32, size=4, dtype=np.uint32))
        return self.states_at(posterior, keys, starts)

    def bind(self, posterior: Posterior, key: Array | np.ndarray, start: ParamInfo) -> tuple[infer.NUTS, Any]:
        """The kernel, bound to this posterior, and the state of a chain at `start`.

        `init` binds a NumPyro kernel, so every trace has to call it. Since `start` includes the potential and its
        gradient, `init` does not compute them.
        """
        model = posterior.model
        settings: dict[str, Any] = {"dense_mass": model.dense, "target_accept_prob": model.acceptance}
        kernel = infer.NUTS(potential_fn=posterior.potential, **settings)
        return kernel, kernel.init(key, self.warmup, start)

    def states_at(self, posterior: Posterior, keys: Sequence[np.ndarray], starts: Sequence[ParamInfo]) -> tuple:
        """The states that `bind` returns for these keys and starts, computed without compiling it.

        Most fields are zero. The momentum and the energy, which `bind` draws, are zero too: the first iteration draws
        them again.
        """
        structure = jax.eval_shape(lambda key, start: self.bind(posterior, key, start)[1], keys[0][:2], starts[0])
        blank = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), structure)
        # A dense block has the shape (k, k), a diagonal one the shape (k,).
        identity = jax.tree.map(
            lambda mass: np.eye(len(mass), dtype=mass.dtype) if mass.ndim == 2 else np.ones_like(mass),
            blank.adapt_state.inverse_mass_matrix,
        )
        masses = ("inverse_mass_matrix", "mass_matrix_sqrt", "mass_matrix_sqrt_inv")
        *averages, centre = blank.adapt_state.ss_state
        adapt = blank.adapt_state._replace(
            step_size=np.ones_like(centre),
            ss_state=(*averages, centre + math.log(10)),
            **dict.fromkeys(masses, identity),
        )
        # One half of the words is the key of the chain, the other that of its adaptation.
        return tuple(
            blank._replace(rng_key=key[:2], adapt_state=adapt._replace(rng_key=key[2:]), **start._asdict())
            for key, start in zip(keys, starts, strict=True)
        )
