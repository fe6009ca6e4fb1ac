"""Modes of 16 tokens, p = 136 terms a transition; and that blocks, which keep their memory bounded, do not show."""

import jax.random as jr
import numpy as np
import pytest
from helpers.budget import assert_within
from helpers.internals import _terms, _transitions, layer_at, observed_path, posterior_mode

import sdeinfer as si

TRUTH = {"gamma": 0.5, "tau0": 0.4, "c_plus": 1.5, "c_minus": -2.0}


def sampled(tokens: int, *, networks: int = 5, depth: int = 4, seed: int = 4, norm: float = 1.0):
    V0, layer = si.equicorrelated(tokens=tokens, correlation=0.2, norm=norm), si.ShapedTransformer(**TRUTH)
    return si.sample_networks(layer, V0, width=128, depth=depth, networks=networks, key=jr.key(seed))


@pytest.mark.slow
def test_modes_of_16_tokens_agree_with_the_truth():
    """In logit γ, log τ0 and log gap, in posterior sds by the adjusted curvature, over six sets of networks.

    Of the fourth set, the range of the law keeps a single transition: its sds are those of the priors.
    """
    model, truth, z, sds = si.models.full_path, np.log([1.0, 0.4, 3.5]), [], []
    for seed in range(6):
        prepared = si.prepare(model, sampled(16, networks=24, depth=32, seed=seed, norm=1.5)).pooled()
        layer = layer_at(model, prepared, posterior_mode(model, prepared))
        z.append((layer.u[:3] - truth) / layer.sd[:3])
        sds.append(layer.sd[:3])
    # Otherwise the priors would be compared with the truth.
    assert (np.median(sds, axis=0) < [0.02, 0.25, 0.2]).all()
    assert_within(z, "modes of 16 tokens")


def test_remembered_terms_of_many_tokens_are_the_terms(monkeypatch):
    """Twice: computed, and then remembered."""
    monkeypatch.setattr(_transitions, "MANY_TOKENS", 3)
    path = observed_path(sampled(3))
    h = path.gap[path.layer] / path.width[path.network]
    expected = _terms.terms_of(path.starts(slice(None)), path.ends(slice(None)), h)
    for _ in range(2):
        found = path.terms(slice(None))
        monkeypatch.setattr(_terms, "terms_of", None)
        for name, value in vars(expected).items():
            np.testing.assert_allclose(getattr(found, name), value, rtol=1e-12)
