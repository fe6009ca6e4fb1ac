"""The same problems in dynestyx, with what it has for states that are observed exactly, at some times or at all.

A discrete-time Gaussian transition with a callable covariance is the Euler chain; `DiracIdentityObservation` observes V
itself; `LatentPathBuilder` makes a latent state of every layer that is NaN. Its NUTS is NumPyro's.
"""

import dynestyx as dsx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
from limit import diffusion, drift, main, priors, vech
from numpyro.infer import MCMC, NUTS, init_to_value

builder = dsx.LatentPathBuilder()
"""One for every call of the model: it has to know which layers are latent from a call that is not traced."""


def model(times, values):
    """Networks with values of shape (networks, layers, p) at the times of all layers, NaN where latent."""
    theta = priors()
    x0 = values[0, 0]
    with builder, dsx.plate("network", len(values)):
        dynamics = dsx.DynamicalModel(
            initial_condition=dist.MultivariateNormal(x0, jnp.eye(len(x0))),
            state_evolution=dsx.GaussianStateEvolution(
                F=lambda x, u, now, then: x + (then - now) * drift(theta, x),
                cov=lambda x, u, now, then: (then - now) * diffusion(theta, x),
            ),
            observation_model=dsx.DiracIdentityObservation(),
            control_dim=0,
        )
        dsx.sample("f", dynamics, obs_times=times, obs_values=values)


def fit(data, settings):
    V, layers, width = data["V"], data["layers"], float(data["width"])
    x = np.asarray(jax.vmap(jax.vmap(vech))(jnp.asarray(V)))
    every = np.arange(layers[-1] + 1)
    values = np.full((len(x), len(every), x.shape[-1]), np.nan)
    values[:, layers] = x
    latent = np.isnan(values[0, :, 0])
    # Straight lines between observations are positive definite; what a chain starts from by default is often not.
    lines = [np.stack([np.interp(every, layers, entry) for entry in network.T], axis=1)[latent] for network in x]
    start = {f"f_p{number}_state_path_params": jnp.asarray(line.ravel()) for number, line in enumerate(lines)}
    mcmc = MCMC(NUTS(model, init_strategy=init_to_value(values=start)), **settings)
    run = (jnp.asarray(every / width), jnp.asarray(values))
    mcmc.run(jr.key(0), *run, extra_fields=("diverging", "num_steps"))
    return mcmc


if __name__ == "__main__":
    main(fit)
