"""The law of a path with an attention pattern: the dense normal of its transitions."""

import numpy as np
import pytest
from helpers.cases import CAUSAL
from helpers.internals import FullPath, path_layout, path_statistics, require_complete
from likelihood.paths import (
    WIDTH,
    common_path,
    log_prob,
    path_of,
    statistics_of,
)

import sdeinfer as si
from sdeinfer.observation import covariance_dataset


def test_more_nodes_and_pooling_change_nothing():
    layer, paths = CAUSAL["causal transformer"](), common_path(4)
    path = path_of(paths, pattern=si.CAUSAL)
    whole = log_prob(layer, path_statistics(path))
    finer = path_statistics(path, path_layout(path, nodes=200))
    np.testing.assert_allclose(log_prob(layer, finer), whole, rtol=1e-11)
    pooled = path_statistics(path, pooled=True)
    np.testing.assert_allclose(log_prob(layer, pooled).sum(), whole.sum(), rtol=1e-11)


def test_statistics_of_another_mask_are_refused():
    for own, other in ((si.CAUSAL, si.Pattern()), (si.Pattern(), si.Pattern(prompts=(1, 2)))):
        statistics = statistics_of(common_path(3), pattern=own)
        limit = si.ShapedAttention(0.5, 1.0, pattern=other).limit()
        with pytest.raises(ValueError, match=f"path: these data were prepared for attention with {own}, not with"):
            FullPath(limit, statistics).log_prob(statistics.weights)


def causal_data():
    architecture = si.layers.template("attention", pattern=si.CAUSAL)
    return covariance_dataset(common_path(3), width=WIDTH, architecture=architecture)


@pytest.mark.parametrize("model", ["thinned_path", "terminal", "hierarchical"])
def test_models_that_know_no_mask_are_refused(model, key):
    with pytest.raises(ValueError, match=f"model: {model} supports unmasked attention only; use models.full_path"):
        si.fit(getattr(si.models, model), causal_data(), law="limit", key=key)


def test_many_tokens_are_refused_with_a_pattern_only():
    data = covariance_dataset(np.stack([np.eye(25), 2 * np.eye(25)])[None], width=100)
    kind = si.layers.template("attention", pattern=si.CAUSAL)
    with pytest.raises(ValueError, match="tokens: 25 tokens have 325 covariances, .* take at most 24, by si.take"):
        require_complete(kind, data)
    require_complete(si.layers.template("attention"), data)
    require_complete(kind, si.take(data.assign_attrs(causal=1), tokens=24))
