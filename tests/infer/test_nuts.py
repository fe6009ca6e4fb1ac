import jax
import jax.random as jr
import numpy as np
from numpyro.infer.util import ParamInfo

import sdeinfer as si
from sdeinfer.infer import NUTS, Posterior
from sdeinfer.layers import Architecture
from sdeinfer.likelihood import Assumptions, blank_statistics


def test_chains_start_in_the_state_that_numpyro_makes():
    """But for momentum and energy, which every iteration makes anew, and for which key is whose; each in its own."""
    blank = blank_statistics(2, 1, assumptions=Assumptions(Architecture("attention"), "limit"))
    sampler, posterior = NUTS(warmup=100), Posterior(si.models.full_path, blank)
    z = {"gamma": np.array(0.3), "tau0": np.array(-0.2)}
    start = ParamInfo(z, np.array(1.5), {"gamma": np.array(2.0), "tau0": np.array(0.5)})
    key = np.arange(4, dtype=np.uint32)
    (found,) = sampler.states_at(posterior, [key], [start])
    expected = jax.jit(lambda key, start: sampler.bind(posterior, key, start)[1])(key[:2], start)
    np.testing.assert_array_equal(found.rng_key, key[:2])
    np.testing.assert_array_equal(found.adapt_state.rng_key, key[2:])
    states = [
        state._replace(energy=0.0, rng_key=0, adapt_state=state.adapt_state._replace(rng_key=0))
        for state in (found, expected)
    ]
    jax.tree.map(np.testing.assert_array_equal, *states)
    first, other = (sampler.initial_states(posterior, jr.key(seed)) for seed in (0, 1))
    of_all = np.array([[state.z["gamma"], state.rng_key[0], state.adapt_state.rng_key[0]] for state in first + other])
    assert all(len(set(values)) == len(of_all) for values in of_all.T)
    types = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), state) for state in (found, expected)]
    assert types[0] == types[1]
