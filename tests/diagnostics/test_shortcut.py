"""γ by what hidden states keep of those before, on networks whose weights are independent normals and on others."""

import numpy as np
import pytest
import xarray as xr
from helpers import numpy_networks
from helpers.budget import assert_estimate
from helpers.fits import AtTheMode
from helpers.internals import Residuals, attributes_of_layer, check_shortcuts, groups_of_data, used_of, with_used
from helpers.numpy_networks import Network

import sdeinfer as si
from sdeinfer.layers import template

V0 = np.eye(3) + 0.3
KINDS = {
    "transformer": {"heads": 2, "output_projection": True, "expansion": 2},
    "attention": {"causal": True},
    "feedforward": {},
}


def observed(network: Network, *, networks: int = 40, depth: int = 6) -> xr.Dataset:
    rng = np.random.default_rng(4)
    X = numpy_networks.tokens_of(V0, width=32, networks=networks, rng=rng)
    return si.observe(numpy_networks.hidden_states(network, X, depth=depth, rng=rng))


def posterior_of(data: xr.Dataset, architecture: str, gamma: np.ndarray, model: str = "full_path") -> Residuals:
    """A posterior with the draws of γ."""
    draws = xr.Dataset({"gamma": (("chain", "draw"), gamma[None])})
    tree = xr.DataTree.from_dict({"posterior": draws, **groups_of_data(data, used_of(data))})
    tree.attrs = {**attributes_of_layer(template(architecture)), "model": model}
    return Residuals.of(tree)


@pytest.mark.parametrize("architecture", KINDS)
def test_a_layer_keeps_the_shortcut_of_each_branch_on_average(architecture):
    """Also where the softmax is far from its expansion: only the last weights of a branch matter."""
    network = Network(gamma=0.6, tau0=0.1, architecture=architecture, **KINDS[architecture])
    kept = observed(network)["shortcut"].values[:, 1:]
    expected = (1 - 0.6**2) ** (1 if architecture == "transformer" else 0.5)
    assert_estimate(kept.mean(), expected, kept.std() / np.sqrt(kept.size))


@pytest.mark.parametrize(("architecture", "power"), [("transformer", 2), ("attention", 1), ("feedforward", 1)])
def test_the_distance_by_hand(architecture, power):
    data = observed(Network())
    gamma = np.random.default_rng(0).uniform(0.3, 0.7, 100)
    kept, expected = data["shortcut"].values[:, 1:], np.sqrt(1 - gamma**2) ** power
    error = np.sqrt(kept.var() / 240 + expected.var())
    (found,) = check_shortcuts(posterior_of(data, architecture, gamma)).verdicts
    np.testing.assert_allclose(found.value, abs(kept.mean() - expected.mean()) / error)
    assert f"and {gamma.mean():.3g} in the fit" in found.advice


def test_the_transitions_that_were_fitted_are_judged():
    """A last state that is normalised is left out by `used`; the first layer of a part has no state before."""
    data, gamma = observed(Network()), np.full(9, 0.5)
    kept = data["shortcut"].values.copy()
    kept[:, -1] = 0
    other = data.assign_coords(shortcut=(("network", "layer"), kept))
    used = np.arange(6) < 5
    assert not check_shortcuts(posterior_of(other, "transformer", gamma)).passed
    part = posterior_of(with_used(other, np.tile(used, (40, 1))), "transformer", gamma)
    assert check_shortcuts(part) == check_shortcuts(posterior_of(data.isel(layer=slice(6)), "transformer", gamma))
    kept[:, 3] = np.nan
    parts = data.assign_coords(shortcut=(("network", "layer"), kept))
    assert (
        check_shortcuts(posterior_of(with_used(parts, np.tile(used, (40, 1))), "transformer", gamma)).verdicts[0].passed
    )


@pytest.mark.long
@pytest.mark.parametrize("projection", [False, True])
def test_a_projection_that_was_not_declared_is_seen(projection, key):
    """A fit without it finds a larger γ in the noise of networks."""
    data = observed(Network(gamma=0.6, architecture="attention", output_projection=True), networks=200, depth=10)
    architecture, sampler = template("attention", output_projection=projection), AtTheMode(chains=2, draws=100)
    post = si.fit(si.models.full_path, data, architecture=architecture, sampler=sampler, predictions=2, key=key)
    assert si.check(post).to_frame().loc["gamma by hidden states, sds", "passed"] == projection


def test_what_has_no_such_strength_is_not_judged():
    data, gamma = observed(Network(), networks=20), np.full(9, 0.9)
    assert check_shortcuts(posterior_of(data, "transformer", gamma)).verdicts
    assert not check_shortcuts(posterior_of(data.drop_vars("shortcut"), "transformer", gamma)).verdicts
    assert not check_shortcuts(posterior_of(data, "mlp", gamma)).verdicts
    assert not check_shortcuts(posterior_of(data, "transformer", gamma, model="terminal")).verdicts
    assert not check_shortcuts(posterior_of(data.isel(network=[0, 1]), "transformer", gamma)).verdicts
    labelled = data.drop_vars("shortcut").assign_coords(shortcut=("network", np.arange(20)))
    assert not check_shortcuts(posterior_of(labelled, "transformer", gamma)).verdicts
    fixed = posterior_of(data, "transformer", gamma)
    tree = fixed.tree.assign({"posterior": xr.DataTree(xr.Dataset({"tau0": (("chain", "draw"), np.ones((1, 9)))}))})
    tree.attrs = fixed.tree.attrs | {"fixed_gamma": 0.9}
    assert not check_shortcuts(Residuals.of(tree)).passed
