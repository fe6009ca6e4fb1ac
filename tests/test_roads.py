"""One question by many roads: the posterior of some networks, and the verdict on it."""

from functools import partial

import arviz_stats
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
import xarray as xr
from helpers.budget import assert_same_posterior, assert_within
from helpers.fits import WARMUP, AtTheMode
from helpers.internals import USED, open_in_chunks
from numpyro.infer import MCMC
from numpyro.infer import NUTS as NumPyroNUTS

import sdeinfer as si
from sdeinfer.observation import read_posterior, write

FULL_PATH = si.models.full_path
SHORT = {"chains": 2, "draws": 400, "warmup": WARMUP, "predictions": 20}


def draws_of(post: xr.DataTree) -> dict[str, np.ndarray]:
    """Logit γ and log τ0, in which the posterior is nearly normal."""
    gamma, tau0 = (np.asarray(post["posterior"][name], np.float64) for name in ("gamma", "tau0"))
    return {"gamma": np.log(gamma / (1 - gamma)), "tau0": np.log(tau0)}


def of_fit(data: xr.Dataset, **options) -> dict[str, np.ndarray]:
    return draws_of(si.fit(FULL_PATH, data, **SHORT, key=jr.key(11), **options))


def by_prepare(networks, _):
    data = si.prepare(FULL_PATH, networks)

    def chain(key):
        kernel = NumPyroNUTS(FULL_PATH, dense_mass=True)
        sampler = MCMC(kernel, num_warmup=200, num_samples=250, progress_bar=False)
        sampler.run(key, data)
        return sampler.get_samples()

    # One program: operation by operation, NumPyro's search for a start would be hundreds.
    samples = jax.jit(partial(jax.lax.map, chain))(jr.split(jr.key(12), 2))
    groups = {name: (("chain", "draw"), samples[name]) for name in ("gamma", "tau0")}
    return draws_of(xr.DataTree.from_dict({"posterior": xr.Dataset(groups)}))


def in_chunks(networks, folder):
    part = networks.copy()
    part["covariance"].encoding = {"chunks": (6, *networks["covariance"].shape[1:])}
    write(part, folder / "data.zarr")
    return of_fit(open_in_chunks(folder / "data.zarr"))


def in_another_order_of_networks_and_tokens(networks, _):
    return of_fit(networks.isel(network=np.random.default_rng(0).permutation(24), token_a=[2, 0, 1], token_b=[2, 0, 1]))


def in_single_precision(networks, _):
    with jax.enable_x64(False):  # noqa: FBT003
        return of_fit(networks.assign(covariance=networks["covariance"].astype(np.float32)))


ROADS = (in_chunks, by_prepare, in_another_order_of_networks_and_tokens, in_single_precision)


@pytest.mark.long
@pytest.mark.parametrize("road", ROADS, ids=lambda road: road.__name__)
def test_the_posterior_is_the_same(road, fitted, networks, tmp_path):
    expected = draws_of(fitted)
    for name, found in road(networks, tmp_path).items():
        assert_same_posterior(found, expected[name])


@pytest.mark.long
def test_the_verdict_is_the_same_of_a_file_and_of_permuted_data(fitted, checked, networks, tmp_path):
    si.write(fitted, tmp_path / "post.nc")
    found = si.check(read_posterior(tmp_path / "post.nc"), networks.isel(network=slice(None, None, -1)))
    assert str(found) == str(checked)
    np.testing.assert_allclose(found.to_frame()["value"], checked.to_frame()["value"], rtol=1e-12)


def test_the_verdict_is_on_the_transitions_that_were_fitted(fitted, networks, checked):
    """Those that the fit left out are no more judged with `data` than without."""
    post, constant = fitted.copy(), fitted["constant_data"].to_dataset().copy(deep=True)
    constant[USED][:, 5:] = False
    post["constant_data"] = constant
    found = si.check(post)
    assert str(found) == str(si.check(post, networks)) != str(checked)


OTHERS = {
    "V doubled": (lambda data: data.assign(covariance=2 * data["covariance"]), "network 0 differs at layer 0"),
    "fewer networks": (lambda data: data.isel(network=slice(8)), "8 networks, where 24 were fitted"),
    "fewer layers": (lambda data: data.isel(layer=slice(5)), "other layers"),
    "another width": (lambda data: data.assign_coords(width=("network", np.full(24, 128))), "other widths"),
    "other tokens": (lambda data: data.isel(token_a=[1, 0, 2], token_b=[1, 0, 2]), "network 0 differs at layer 1"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_data_are_refused(name, fitted, networks):
    change, message = OTHERS[name]
    with pytest.raises(si.InputError, match=f"data: not the data that were fitted: {message}"):
        si.check(fitted, change(networks))


@pytest.mark.long
def test_the_true_architecture_is_ranked_first_by_arviz(fitted, networks):
    """By the group `log_likelihood`, which holds densities of the data."""
    other = si.fit(FULL_PATH, networks, architecture="attention", **SHORT, key=jr.key(3))
    np.testing.assert_array_equal(*(post["constant_data"]["used"].values for post in (fitted, other)))
    table = arviz_stats.compare({"transformer": fitted, "attention": other})
    assert list(table.index) == ["transformer", "attention"]
    # Means over the draws, which need no importance weights.
    mean = [post["log_likelihood"]["covariance"].mean(("chain", "draw")) for post in (fitted, other)]
    difference = float((mean[0] - mean[1]).sum())
    assert_within((difference - abs(table.loc["attention", "elpd_diff"])) / table.loc["attention", "dse"])


@pytest.mark.long
def test_parts_that_are_joined_are_checked_with_their_labels_repeated(networks):
    both = xr.concat([networks.isel(network=slice(12)), networks.isel(network=slice(12, 24))], "network")
    both = both.assign_coords(network=[*range(12), *range(12)])
    post = si.fit(FULL_PATH, both, sampler=AtTheMode(chains=2, draws=100), predictions=2, key=jr.key(1))
    assert si.check(post, both).to_frame().equals(si.check(post).to_frame())
    with pytest.raises(si.InputError, match="network 0 differs"):
        si.check(post, xr.concat([both.isel(network=slice(12, 24)), both.isel(network=slice(12))], "network"))


@pytest.mark.one_case("full_path")
@pytest.mark.parametrize("model", [FULL_PATH, si.models.thinned_path], ids=["full_path", "thinned_path"])
def test_a_fit_is_in_double_precision_whatever_that_of_jax(model, networks):
    data = networks if model is FULL_PATH else networks.isel(layer=[0, 4, 8], network=slice(4))
    sampler = AtTheMode(chains=2, draws=100) if model is FULL_PATH else si.infer.Metropolis(1, 20, 20)
    fits, verdicts = [], []
    for x64 in (False, True):
        with jax.enable_x64(x64):
            post = si.fit(model, data, sampler=sampler, predictions=2, key=jr.key(1))
            fits.append(post)
            verdicts.append(si.check(post).to_frame())
            assert jnp.ones(1).dtype == (np.float64 if x64 else np.float32)
    for name in ("posterior", "log_likelihood", "prior"):
        xr.testing.assert_identical(*(post[name].to_dataset().drop_attrs() for post in fits))
    assert verdicts[0].equals(verdicts[1])


def test_prepared_data_have_the_type_of_jax(networks):
    double = si.prepare(FULL_PATH, networks)
    with jax.enable_x64(False):  # noqa: FBT003
        single = si.prepare(FULL_PATH, networks)
    pairs = list(zip(jax.tree.leaves(single), jax.tree.leaves(double), strict=True))
    assert {one.dtype.itemsize for one, _ in pairs} == {4}
    for one, other in pairs:
        np.testing.assert_array_equal(one, np.asarray(other).astype(one.dtype))
