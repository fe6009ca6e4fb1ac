"""What the last layer, or outputs, of 256 transformers say of their parameters, against the Fisher information.

So many networks have posteriors about as wide as the inverse of prior and information together, in the unconstrained
parameters: logit γ, log(c₊ − c₋), log τ0. Where layers are latent the information has no closed form: it is the sum
over the networks of the squares of their scores at the truth, each the slope of the log of a mean over innovations.
"""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers.internals import Assumptions, bridges_of, draw_latent, log_prior, log_weights

import sdeinfer as si
from sdeinfer.layers import template

NETWORKS, WIDTH, DEPTH, TOKENS, OUTPUTS = 256, 256, 64, 3, 64
TRUTH = {"gamma": 0.5, "tau0": 1.0, "c_plus": 2.0, "c_minus": -2.0}
UNCONSTRAINED = {"gamma": 0.0, "c_gap": np.log(4.0), "tau0": 0.0, "c_mean": 0.0}
SHOWN = ("gamma", "c_gap", "tau0")
SETS, STEP = 64, 1e-4


def information(model, prepared, key) -> np.ndarray:
    """Of the data and the prior, in the unconstrained parameters, by central differences."""
    keys = jr.split(key, SETS if prepared.latent else 1)

    @jax.jit
    def of_networks(x):
        def weights(key):
            return log_weights(model, prepared, x, draw_latent(model, prepared, key))

        of_bridges = jax.nn.logsumexp(jax.lax.map(weights, keys), axis=0)
        return prepared.by_network(of_bridges)

    scores = []
    for name, x in UNCONSTRAINED.items():
        above, below = (of_networks(UNCONSTRAINED | {name: x + step}) for step in (STEP, -STEP))
        scores.append((above - below) / (2 * STEP))
    latent = draw_latent(model, prepared, key)
    start = {name: jnp.asarray(x) for name, x in UNCONSTRAINED.items()}
    prior = jax.hessian(lambda x: log_prior(model, prepared, x, latent))(start)
    return np.array(scores) @ np.array(scores).T - np.array([[prior[a][b] for b in start] for a in start])


@pytest.fixture(scope="module")
def networks():
    V0 = si.equicorrelated(tokens=TOKENS, correlation=0.2, norm=1.0)
    layer = si.ShapedTransformer(**TRUTH)
    return si.sample_networks(layer, V0, width=WIDTH, depth=DEPTH, networks=NETWORKS, key=jr.key(1))


def row(what: str, sd: np.ndarray) -> None:
    print(f"{what:32s}" + "".join(f"  {name} {value:.3f}" for name, value in zip(SHOWN, sd, strict=True)), flush=True)


@pytest.mark.slow
def test_posteriors_are_as_wide_as_the_information_says(networks):
    prior = np.array([np.pi / np.sqrt(3), np.pi / np.sqrt(8), 1.0])
    print("\nsd of logit γ, log(c₊ − c₋) and log τ0")
    row("prior", prior)
    observed = {
        "every layer": (si.models.thinned_path, networks),
        "every 8th layer": (si.models.thinned_path, networks.isel(layer=slice(None, None, 8))),
        "last layer": (si.models.terminal, networks),
        "64 outputs": (si.models.outputs, si.sample_outputs(networks, outputs=OUTPUTS, key=jr.key(2))),
    }
    for what, (model, data) in observed.items():
        prepared = bridges_of(model.transitions(model.select(data)), Assumptions(template("transformer")))
        expected = np.sqrt(np.diag(np.linalg.inv(information(model, prepared, jr.key(3)))))[:3]
        row(f"{what}, information", expected)
        if model is si.models.thinned_path:
            continue
        post = si.fit(model, data, draws=500, warmup=500, key=jr.key(4))["posterior"]
        gamma, gap, tau0 = (post[name].values for name in SHOWN)
        row(f"{what}, posterior", np.array([np.log(gamma / (1 - gamma)).std(), np.log(gap).std(), np.log(tau0).std()]))
        found = np.array([np.log(gamma / (1 - gamma)).std(), np.log(gap).std()])
        print("  " + ", ".join(f"{name} {post[name].mean():.4g} ± {post[name].std():.2g}" for name in SHOWN))
        assert (np.abs(np.log(found / expected[:2])) < np.log(1.3)).all()
