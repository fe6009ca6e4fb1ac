"""NumPyro's eight schools with ArviZ's summary: what a first fit costs with a program of a few lines."""

import arviz as az
import jax
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.infer import MCMC, NUTS

jax.config.update("jax_enable_x64", True)  # noqa: FBT003

EFFECTS = np.array([28.0, 8.0, -3.0, 7.0, -1.0, 1.0, 18.0, 12.0])
ERRORS = np.array([15.0, 10.0, 16.0, 11.0, 9.0, 11.0, 10.0, 18.0])


def schools(errors, effects=None):
    mu, tau = numpyro.sample("mu", dist.Normal(0, 5)), numpyro.sample("tau", dist.HalfCauchy(5))
    with numpyro.plate("school", len(errors)):
        offset = numpyro.sample("offset", dist.Normal(0, 1))
        numpyro.sample("effect", dist.Normal(mu + tau * offset, errors), obs=effects)


if __name__ == "__main__":
    sampler = MCMC(NUTS(schools), num_warmup=1000, num_samples=1000, num_chains=4, progress_bar=False)
    sampler.run(jax.random.key(0), ERRORS, effects=EFFECTS)
    print(az.summary(az.from_numpyro(sampler)))
