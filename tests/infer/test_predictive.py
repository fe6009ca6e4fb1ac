"""Replicates of the observed networks: by the chain those of `sample_networks`, by the limit those of the solver."""

import jax.random as jr
import numpy as np
import pytest
from helpers.fits import AtTheMode
from helpers.internals import affordable_draws, predicted_draws, sample_chains

import sdeinfer as si
from sdeinfer.infer import predict
from sdeinfer.layers import template

KIND, KEY = template("transformer"), jr.key(1)
PARAMETERS = {"gamma": np.array([0.3, 0.6]), "tau0": np.ones(2), "c_plus": np.zeros(2), "c_minus": -np.ones(2)}
LAYERS = np.moveaxis(KIND.coordinates.unconstrained(PARAMETERS), 0, -1)


@pytest.fixture(scope="module")
def mixed(networks):
    """Networks of two widths, seen at some of their layers."""
    some = networks.isel(layer=[0, 2, 4, 10])
    return some.assign_coords(width=("network", np.where(np.arange(24) < 10, 96, 48)))


@pytest.mark.parametrize("law", ["finite-width", "limit"])
def test_replicates_start_at_the_observed_covariances(mixed, law):
    predicted = predict(LAYERS, mixed, architecture=KIND, law=law, key=KEY)
    assert predicted.attrs["law"] == law
    assert predicted.attrs["exploded"] < 0.05  # paths of the SDE may
    np.testing.assert_array_equal(predicted["layer"], mixed["layer"])
    for draw in range(2):
        start = predicted["covariance"].isel(layer=0, draw=draw)
        np.testing.assert_allclose(start, mixed["covariance"].isel(layer=0), rtol=1e-6)
    spread = predicted["covariance"].isel(layer=-1, token_a=0, token_b=0).std(dim="network")
    assert spread[1] > spread[0]


@pytest.mark.parametrize("each", [False, True], ids=["one layer a draw", "one layer a network"])
def test_replicates_are_networks_of_the_parameters_of_their_draw(mixed, each):
    """The chain of many parameters at once is that of each: with its random numbers, to the last bit of float32."""
    layers = LAYERS[np.arange(40) % 2]  # random numbers come in groups of 256 networks
    if each:
        layers = np.stack([np.roll(layers[:24], draw, axis=0) for draw in range(40)])
    found = predict(layers, mixed, architecture=KIND, key=KEY)["covariance"].values
    narrow = np.flatnonzero(mixed["width"].values == 48)
    V0, key = mixed["covariance"].values[:, 0], jr.fold_in(KEY, np.uint32(48))
    for draw in (0, 1, 39):
        for place, network in enumerate(narrow[:3]):
            layer = KIND.with_coordinates(layers[draw, network] if each else layers[draw])
            sizes = {"width": 48, "observed": 5, "observe_every": 2, "first": draw * len(narrow) + place}
            alone = sample_chains(layer, V0[[network]], **sizes, key=key)[0, [0, 1, 2, 5]]
            np.testing.assert_array_equal(found[draw, network], alone.astype(np.float32))


def test_layers_without_a_chain_of_arrays_and_narrow_networks_have_the_limit(mixed):
    class Compiled(type(KIND)):
        on_host = False

    compiled = Compiled(**KIND.parameters())
    few = mixed.isel(network=[0, 20])
    heads = template("transformer", heads=12)  # 4 columns for 3 tokens
    for kind in (compiled, heads):
        assert predict(LAYERS, few, architecture=kind, key=KEY).attrs["law"] == "limit"


def test_what_overflows_is_exploded(mixed):
    """As draws of a prior may."""
    kind = template("mlp")
    layers = np.full((2, 2), 30.0)
    with np.errstate(all="ignore"):
        found = predict(layers, mixed, architecture=kind, key=KEY)
    assert found.attrs["exploded"] == np.isnan(found["covariance"].values[:, :, -1]).all(axis=(-1, -2)).mean()


def test_deep_ensembles_have_fewer_replicates(networks):
    assert affordable_draws(networks) == 100
    assert affordable_draws(networks.assign_coords(layer=10 * networks["layer"])) == 2**16 // (24 * 100)
    assert affordable_draws(networks.assign_coords(layer=1000 * networks["layer"])) == 20
    np.testing.assert_array_equal(predicted_draws(100, 1000, 4), np.arange(0, 1000, 40))
    np.testing.assert_array_equal(predicted_draws(None, 7, 4), np.arange(7))


@pytest.mark.long
def test_a_fit_is_replicated_by_its_own_law_or_by_the_one_asked_for(networks):
    settings = {"sampler": AtTheMode(chains=2, draws=20), "predictions": 4, "key": KEY}
    for law, predictive, expected in (
        ("finite-width", None, "finite-width"),
        ("limit", None, "limit"),
        ("finite-width", "limit", "limit"),
    ):
        post = si.fit(si.models.full_path, networks, law=law, predictive=predictive, **settings)
        assert {post[f"{group}_predictive"].attrs["law"] for group in ("prior", "posterior")} == {expected}
        assert list(post["posterior_predictive"].data_vars) == list(post["observed_data"].data_vars)
        assert post["posterior_predictive"].sizes["layer"] == networks.sizes["layer"]
