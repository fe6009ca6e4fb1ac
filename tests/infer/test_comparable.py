"""Fits are compared where they are of the same transitions, with the weights of what was sampled."""

import arviz_stats
import jax.random as jr
import numpy as np
import pytest
from helpers.fits import AtTheMode

import sdeinfer as si

pytestmark = pytest.mark.filterwarnings("ignore:Estimated shape parameter:UserWarning")  # of so few draws
FITS = {"sampler": AtTheMode(chains=2, draws=100), "predictions": 1, "key": jr.key(1)}


@pytest.fixture(scope="module")
def fits():
    layer = si.ShapedTransformer(gamma=0.5, tau0=1.0, c_plus=1.0, c_minus=-2.0)
    V0 = si.equicorrelated(tokens=3, correlation=0.2, norm=1.4)
    data = si.sample_networks(layer, V0, width=48, depth=8, networks=12, key=jr.key(0))
    first = si.fit(si.models.full_path, data, **FITS)
    same = data.assign(used=first["constant_data"]["used"])
    other = si.fit(si.models.full_path, same, architecture="attention", largest_logit=np.inf, **FITS)
    fewer = same.assign(used=same["used"] & (same["layer"].values < 4))
    return first, other, si.fit(si.models.full_path, fewer, largest_logit=np.inf, **FITS), data


def test_densities_are_averaged_by_the_weights_of_the_sampled_likelihood(fits):
    first, other, *_ = fits
    table = arviz_stats.compare(si.infer.comparable({"transformer": first, "attention": other}))
    assert set(table.index) == {"transformer", "attention"}
    found = si.infer.comparable({"transformer": first})["transformer"]
    log_weights, _ = first["adjusted_log_likelihood"]["covariance"].azstats.psislw(dim=["chain", "draw"])
    densities = first["log_likelihood"]["covariance"]
    expected = np.log(np.exp(log_weights + densities).sum(("chain", "draw")))
    np.testing.assert_allclose(found.elpd_i, expected, rtol=1e-6)


def test_fits_of_other_transitions_or_networks_are_refused(fits):
    first, _, fewer, data = fits
    with pytest.raises(si.InputError, match="posteriors: b used 48 transitions and a 96, 48 of them in one fit alone"):
        si.infer.comparable({"a": first, "b": fewer})
    elsewhere = si.fit(si.models.full_path, data.isel(network=slice(6)), **FITS)
    with pytest.raises(si.InputError, match="posteriors: b is a fit of other networks than a"):
        si.infer.comparable({"a": first, "b": elsewhere})
    with pytest.raises(si.InputError, match="posteriors: b has no group log_likelihood"):
        si.infer.comparable({"a": first, "b": first.drop_nodes("log_likelihood")})
