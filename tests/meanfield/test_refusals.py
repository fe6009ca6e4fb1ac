"""Arguments of the mean field that are refused, and in which words."""

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import xarray as xr

import sdeinfer as si
from sdeinfer import InputError, meanfield
from sdeinfer.meanfield import SelfAttentionFlow

FLOW, X = SelfAttentionFlow(1.0), np.eye(3)
THETA = np.arange(128) * (2 * np.pi / 128)
DENSITY = (1 + 0.5 * np.cos(THETA)) / (2 * np.pi)
HIDDEN = np.random.default_rng(0).normal(size=(2, 3, 4, 3))
DATA = meanfield.tokens_dataset(HIDDEN)


def fit(model=meanfield.one_step, data=DATA, **settings):
    return si.fit(model, data, key=jr.key(0), **settings)


CALLS = [
    (lambda: SelfAttentionFlow(-1.0), "beta: must be at least 0, got -1"),
    (lambda: SelfAttentionFlow(1.0, np.zeros((2, 3))), r"Q: shape \(D, D\) or \(1, D, D\) is needed, got \(2, 3\)"),
    (lambda: SelfAttentionFlow(1.0, V=np.zeros((3, 2, 2)), heads=2), r"V: shape \(D, D\) or \(2, D, D\)"),
    (lambda: SelfAttentionFlow(1.0, np.eye(2), np.eye(3)), r"Q, K, V: must have one size D, got \[2, 3\]"),
    (lambda: SelfAttentionFlow(1.0, K=np.eye(4))(jnp.asarray(X)), "K: tokens have 3 components, got a matrix of 4"),
    (lambda: SelfAttentionFlow(1.0, mlp=lambda x: jnp.ones(4))(jnp.asarray(X)), r"mlp: a function of shape \(3,\) to"),
    (lambda: meanfield.solve(FLOW, 2 * X, [1.0]), "tokens: must be on the unit sphere"),
    (lambda: meanfield.solve(FLOW, X, [1.0, 0.5]), "ts: increasing times"),
    (lambda: meanfield.growth_rates(0.0, dimension=2), "beta: must be positive, got 0"),
    (lambda: meanfield.growth_rates(1.0, dimension=1), "dimension: at least 2 is needed, got 1"),
    (lambda: meanfield.expected_first_clusters(9.0, 1), "number: at least 2 tokens are needed, got 1"),
    (lambda: meanfield.equiangular(1.0, 1, [1.0]), "number: at least 2 tokens are needed, got 1"),
    (lambda: meanfield.equiangular_tokens(3, -0.6), "inner: between -0.5 and 1 is needed for 3 tokens, got -0.6"),
    (lambda: meanfield.equiangular_tokens(3, 0.1, dimension=2), "dimension: at least 3 is needed for 3 tokens"),
    (lambda: meanfield.solve_circle(meanfield.CircleContinuum(9.0), 2 * DENSITY, [1.0]), "density: must be positive"),
    (lambda: meanfield.clusters(X[0]), r"tokens: shape \(n, D\) is needed"),
    (lambda: meanfield.peaks(X, 9.0), r"tokens: shape \(\*times, n, 2\) is needed"),
    (lambda: meanfield.first_clusters(SelfAttentionFlow(5.0, V=-X), [1.0], X), "flow: must have Q = K = V = None"),
    (lambda: meanfield.first_clusters(FLOW, [1.0], X), r"trajectory: shape \(times, n, 2\) is needed"),
    (lambda: meanfield.tokens_dataset(HIDDEN[0]), "tokens: shape .* is needed"),
    (lambda: meanfield.tokens_dataset(HIDDEN[:, :1]), "at least two layers"),
    (lambda: meanfield.tokens_dataset(HIDDEN * [[[[1]], [[0]], [[1]]]]), "network 0, layer 1, token 0 is zero"),
    (lambda: meanfield.tokens_dataset(np.ma.masked_less(HIDDEN, 0)), "tokens: .* entries are masked"),
    (lambda: fit(data=xr.Dataset()), "data: a Dataset with `tokens` over"),
    (lambda: fit(data=DATA.isel(layer=[0, 2])), "noisy layers need every layer, got"),
    (lambda: fit(prior={"gamma": 1.0}), "prior: one_step samples beta, step, noise; got a prior of 'gamma'"),
    (lambda: fit(prior={"beta": -1.0}), "prior: beta"),
    (lambda: fit(predictions=0), "predictions: a whole number of at least 1 is needed, got 0"),
    (lambda: fit(architecture="mlp"), r"architecture: known matrices of tokens are those of TokenModel\(flow=…\)"),
    (lambda: fit(meanfield.TokenModel(flow=SelfAttentionFlow(1.0, V=np.eye(4)))), "V: tokens have 3 components, got a"),
]


@pytest.mark.parametrize(("call", "message"), CALLS)
@pytest.mark.usefixtures("unchecked")
def test_bad_arguments_are_refused(call, message):
    with pytest.raises(InputError, match=message):
        call()


@pytest.mark.long
def test_clusters_too_narrow_for_the_points_are_an_error():
    with pytest.raises(RuntimeError, match="too narrow"):
        meanfield.solve_circle(meanfield.CircleContinuum(9.0), DENSITY, [10.0, 20.0])
