"""The textbook peer: Euler steps as dense multivariate normals, latent layers by their innovations, NumPyro's NUTS."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro
import numpyro.distributions as dist
from limit import diffusion, drift, main, priors, vech
from numpyro.infer import MCMC, NUTS


def euler(theta, x, h):
    """Means and covariances of the next layers, x of shape (pairs, p)."""
    return jax.vmap(lambda x: (x + h * drift(theta, x), h * diffusion(theta, x)))(x)


def model(starts, ends, h, between):
    """Pairs of observed layers, starts and ends of shape (pairs, p), with so many latent layers between them."""
    theta = priors()
    with numpyro.plate("pair", len(starts)):
        x = starts
        if between:
            xi = numpyro.sample("xi", dist.Normal().expand([between, starts.shape[-1]]).to_event(2))
        for layer in range(between):
            mean, covariance = euler(theta, x, h)
            x = mean + jnp.einsum("nij,nj->ni", jnp.linalg.cholesky(covariance), xi[:, layer])
        mean, covariance = euler(theta, x, h)
        numpyro.sample("end", dist.MultivariateNormal(mean, covariance), obs=ends)


def fit(data, settings):
    x = jax.vmap(jax.vmap(vech))(jnp.asarray(data["V"]))
    starts, ends = (part.reshape(-1, x.shape[-1]) for part in (x[:, :-1], x[:, 1:]))
    between = int(np.diff(data["layers"])[0]) - 1
    mcmc = MCMC(NUTS(model), **settings)
    mcmc.run(jr.key(0), starts, ends, 1 / float(data["width"]), between, extra_fields=("diverging", "num_steps"))
    return mcmc


if __name__ == "__main__":
    main(fit)
