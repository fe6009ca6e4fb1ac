"""Priors that replace the default ones: what is accepted, what follows from them, and what is refused."""

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import numpyro.distributions as dist
import pytest
from helpers.internals import Assumptions, Mode, blank_statistics, checked_priors, layer_at, unobserved_structure
from numpyro import handlers
from numpyro.infer.util import constrain_fn

import sdeinfer as si
from sdeinfer.layers import template
from sdeinfer.models import full_path

TRANSFORMER = si.layers.template("transformer")


def assumed(prior, law="limit") -> Assumptions:
    return Assumptions(TRANSFORMER, law, checked_priors(prior, TRANSFORMER))


@pytest.mark.parametrize(
    ("prior", "message"),
    [
        ({"tau": 1.0}, "transformer samples gamma, tau0, c_gap, c_mean; got a prior of 'tau'"),
        ({"c_plus": 1.0}, "got a prior of 'c_plus'"),
        ({"tau0": -1.0}, "tau0: a fixed value must be between 0 and inf, ends excluded, got -1"),
        ({"gamma": 1.0}, "gamma: a fixed value must be between 0 and 1, ends excluded, got 1"),
        ({"tau0": dist.Normal(0, 1)}, "tau0 must be greater than 0 and finite; Normal is on"),
        ({"gamma": dist.LogNormal(0, 1)}, "gamma must be in"),
        ({"gamma": dist.Beta(2, 2).expand([3])}, "a distribution of one number is needed"),
        ({"tau0": "1"}, "a NumPyro distribution or a number is needed, got '1'"),
        ({"gamma": "wide"}, "a NumPyro distribution or a number is needed, got 'wide'"),
        ({"c_gap": dist.Poisson(2.0)}, "c_gap: a continuous distribution with draws is needed, got Poisson"),
        ({"c_gap": dist.ImproperUniform(dist.constraints.positive, (), ())}, "a continuous distribution with draws"),
    ],
)
def test_priors_that_cannot_be_are_refused(prior, message):
    with pytest.raises(si.InputError, match=message):
        checked_priors(prior, TRANSFORMER)


def test_both_slopes_are_fixed_by_their_own_names():
    assert assumed({"c_plus": 1.0, "c_minus": -3.0}).fixed == {"c_gap": 4.0, "c_mean": -1.0}


def test_equal_priors_share_compiled_programs():
    one, other = (assumed({"tau0": dist.Uniform(0.2, 3.0), "gamma": 0.5}) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != assumed({"tau0": dist.Uniform(0.2, 2.0), "gamma": 0.5})
    assert one != assumed({"tau0": dist.Uniform(0.2, 3.0)})


def test_a_fixed_coordinate_is_no_site():
    blank = blank_statistics(2, assumptions=assumed({"tau0": 1.5, "c_mean": 0.0}))
    assert set(unobserved_structure(full_path, blank)) == {"gamma", "c_gap"}
    trace = handlers.trace(handlers.seed(full_path, jr.key(0))).get_trace(blank)
    assert trace["tau0"]["type"] == "deterministic"
    assert float(trace["tau0"]["value"]) == 1.5
    assert float(trace["c_plus"]["value"]) == -float(trace["c_minus"]["value"])


def test_coordinates_at_a_mode_are_those_of_the_sites_there():
    """Whatever NumPyro's unconstrained values are; the standard deviations by a change of variables."""
    prior = {"gamma": dist.Beta(8.0, 2.0), "tau0": 1.5, "c_gap": dist.Uniform(0.2, 3.0)}
    blank = blank_statistics(2, assumptions=assumed(prior))
    sites = tuple(unobserved_structure(full_path, blank))
    x = np.linspace(-0.4, 0.7, len(sites))
    covariance = 0.01 * (np.eye(len(sites)) + 0.3)
    found = layer_at(full_path, blank, Mode(dict.fromkeys(sites, ()), x, covariance, np.linalg.inv(covariance)))

    def coordinates(x):
        values = constrain_fn(full_path, (blank,), {}, dict(zip(sites, x, strict=True)), return_deterministic=True)
        kind = TRANSFORMER.coordinates
        return kind.unconstrained({name: values[name] for name in kind.declared})

    slope = jax.jacfwd(coordinates)(jnp.asarray(x))
    np.testing.assert_allclose(found.u, coordinates(jnp.asarray(x)), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(found.sd**2, np.diag(slope @ covariance @ slope.T), rtol=1e-6, atol=1e-12)
    assert (found.sd == 0).tolist() == [False, True, False, False]


def test_parameters_without_a_prior_ask_for_one():
    kind = template(si.ShapedAttention(gamma=0.5, tau0=1.0, gamma1=1.0))
    with pytest.raises(si.InputError, match="gamma1 has no default prior; give prior="):
        handlers.seed(Assumptions(kind, "limit").sample_layer, jr.key(0))()
