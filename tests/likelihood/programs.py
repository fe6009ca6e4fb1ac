"""Settings of the tests of users' programs, and densities of programs."""

import functools

import jax
import jax.random as jr
from helpers.fits import AtTheMode
from numpyro.infer.util import log_density

NETWORKS = 5
SHORT = {"sampler": AtTheMode(chains=2, draws=40), "predictions": 4, "key": jr.key(1)}


@functools.partial(jax.jit, static_argnums=0)
def density(model, path, at):
    return log_density(model, (path,), {}, at)[0]
