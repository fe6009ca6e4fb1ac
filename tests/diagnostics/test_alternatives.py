"""Other architectures and sizes, by their evidence."""

import functools

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import xarray as xr
from helpers.budget import assert_within
from helpers.cases import layer_of
from helpers.internals import (
    EVIDENCE,
    PRIOR_SD,
    attributes_of_layer,
    call_of,
    different_sizes,
    log_ratios,
    neighbours,
    path_statistics,
)
from scipy.special import logsumexp

import sdeinfer as si
from sdeinfer.diagnostics import alternatives
from sdeinfer.layers import AbstractLayer, kind_in_words, template
from sdeinfer.likelihood import any_transitions

TRUTH = {"gamma": 0.6, "tau0": 0.8}
ONE, FOUR = (template("attention", heads=heads) for heads in (1, 4))


@functools.cache
def data_of(kind: AbstractLayer, networks: int = 256):
    V0 = si.equicorrelated(tokens=3, correlation=0.1, norm=1.6)
    return si.sample_networks(layer_of(kind, **TRUTH), V0, width=64, depth=8, networks=networks, key=jr.key(4))


def at_truth(kind: AbstractLayer, networks: int = 256) -> xr.DataTree:
    layers = xr.Dataset({name: ("network", np.full(networks, value)) for name, value in TRUTH.items()})
    tree = xr.DataTree.from_dict({"layers": layers})
    tree.attrs = {**attributes_of_layer(kind), "law": "finite-width"}
    return tree


@pytest.mark.long
def test_the_number_of_heads_is_found_where_the_data_tell_it():
    data = data_of(FOUR)
    found = {each.architecture: each for each in alternatives(at_truth(ONE), data, ONE)}
    assert found[ONE].evidence == 0
    assert found[FOUR].evidence > EVIDENCE
    assert found[FOUR].evidence >= max(each.evidence for each in found.values()) - EVIDENCE
    assert abs(found[FOUR].values["gamma"] - TRUTH["gamma"]) < 0.05
    assert found[template("mlp")].evidence < -100


@pytest.mark.long
def test_a_causal_mask_that_was_not_declared_is_found():
    masked = template("attention", pattern=si.CAUSAL)
    found = {each.architecture: each for each in alternatives(at_truth(ONE), data_of(masked), ONE)}
    assert found[masked].evidence > EVIDENCE
    found = {each.architecture: each for each in alternatives(at_truth(ONE), data_of(ONE), ONE)}
    assert found[masked].evidence < -EVIDENCE


@functools.partial(jax.jit, static_argnums=0)
def densities(kind: AbstractLayer, u, statistics):
    """Log densities of the data at some coordinates."""

    def density(u):
        law = kind.with_coordinates(u).finite_width(64.0)
        return jnp.sum(statistics.log_density(jax.tree.map(lambda x: jnp.asarray(x)[None], law), statistics.value))

    return jax.lax.map(density, u, batch_size=512)


def test_evidence_is_the_integral_of_the_likelihood():
    """Laplace's approximation against a sum over a grid of the coordinates."""
    data = data_of(ONE, networks=64)
    statistics = path_statistics(any_transitions(data), pooled=True)
    grid = [np.linspace(-0.5, 1.5, 81), np.linspace(-1.5, 1.5, 121)]
    u = np.stack(np.meshgrid(*grid, indexing="ij"), axis=-1).reshape(-1, 2)
    volume = np.prod([each[1] - each[0] for each in grid])

    def integral(kind: AbstractLayer) -> float:
        prior = -(u**2).sum(axis=1) / (2 * PRIOR_SD**2) - 2 * np.log(PRIOR_SD) - np.log(2 * np.pi)
        return float(logsumexp(np.asarray(densities(kind, u, statistics)) + prior) + np.log(volume))

    found = {each.architecture: each.evidence for each in alternatives(at_truth(ONE, 64), data, ONE)}
    for sizes in ({"heads": 2}, {"heads": 8}, {"output_projection": True}):
        other = template("attention", **sizes)
        assert abs(found[other] - (integral(other) - integral(ONE))) < 0.1


def test_sizes_are_named():
    assert kind_in_words(template("transformer")) == "transformer"
    assert call_of(FOUR) == "si.layers.template('attention', heads=4)"
    assert kind_in_words(template("attention", heads=2, pattern=si.CAUSAL)) == "attention, 2 heads, a causal mask"
    assert different_sizes(ONE, FOUR) == ["1 head"]
    assert different_sizes(template("transformer", output_projection=True), template("transformer")) == [
        "an output projection"
    ]
    assert different_sizes(ONE, template("mlp")) == ["attention"]


@pytest.mark.long
def test_log_ratios_of_exact_layers_are_those_of_networks():
    """Whatever the error of the normal laws, what it adds to the evidence for another architecture is subtracted."""
    data = data_of(ONE, 64)
    path, kinds = any_transitions(data), (ONE, *neighbours(ONE, data))
    u = np.array([ONE.coordinates.sampled[name].to_real(np.float64(value)) for name, value in TRUTH.items()])
    modes = [np.resize(u, len(kind.coordinates)) for kind in kinds]  # of attention the truth
    mean, sd = log_ratios(path, kinds, "finite-width", modes)
    assert mean[0] == sd[0] == 0
    heads = kinds.index(FOUR)
    assert mean[heads] < 0
    statistics = path_statistics(path, pooled=True)
    own, other = (float(densities(kind, u[None], statistics)[0]) for kind in (ONE, FOUR))
    assert_within((other - own - mean[heads]) / sd[heads])


def test_only_what_the_laws_do_not_explain_is_evidence(monkeypatch):
    data, truth = data_of(FOUR), at_truth(ONE)
    ratios = iter([(0.0, 1e9), (-10.0, 1.0)])
    monkeypatch.setattr("sdeinfer.diagnostics._alternatives.log_ratios", lambda _, kinds, *__: _of_each(kinds, ratios))
    assert max(each.evidence for each in alternatives(truth, data, ONE)) < EVIDENCE
    assert max(each.evidence for each in alternatives(truth, data, ONE)) > EVIDENCE


def _of_each(kinds, ratios):
    return tuple(np.full(len(kinds), value) for value in next(ratios))
